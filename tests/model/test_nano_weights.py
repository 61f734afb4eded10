"""v4-nano as shipped: files, tokenizer, held-out loss, transformers parity, the trainer's paths."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from v4graph.model.params import random_params
from v4graph.model.recompute import RecomputeModel
from v4graph.plan.weights import inventory
from v4graph.spec.load import load_spec
from v4graph.spec.model import SparseAttention

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "specs" / "v4-nano"
sys.path.insert(0, str(ROOT / "tools"))

from eval_nano import documents, load_params, windows  # noqa: E402
from nano.export import hf_config  # noqa: E402
from nano.fast import FastModel  # noqa: E402
from nano.tokenizer import SPECIAL  # noqa: E402

SPEC = load_spec("v4-nano")
MAX_BYTES = 24_000_000
HELD_OUT_NATS = 2.05


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def params() -> dict[str, Tensor]:
    return load_params(FOLDER)


@pytest.fixture(scope="module")
def held_out(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(t).ids for t in documents(FOLDER / "heldout.txt")]


class Gaps(RecomputeModel):
    """Keeps the smallest gap at the edge of the index selection."""

    smallest = math.inf

    def index_select(
        self,
        p: str,
        a: SparseAttention,
        x: Tensor,
        q_low: Tensor,
        causal_BSW: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        scores = self.index_scores(p, a, x, q_low, cos, sin)
        scores = scores.masked_fill(~causal_BSW, -math.inf).sort(-1, descending=True).values
        edge = scores[..., a.indexer.topk - 1] - scores[..., a.indexer.topk]
        live = causal_BSW.sum(-1) > a.indexer.topk
        self.smallest = min(self.smallest, float(edge[live].min()))
        return super().index_select(p, a, x, q_low, causal_BSW, cos, sin)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def test_files_hold_the_inventory() -> None:
    found = {}
    for file in sorted(FOLDER.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118 (not a mapping)
                part = f.get_slice(name)
                assert name not in found
                found[name] = (part.get_dtype(), tuple(part.get_shape()), file.name)
    expected = {e.name: (e.dtype, e.shape) for e in inventory(SPEC)}
    assert {k: v[:2] for k, v in found.items()} == expected
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {k: v[2] for k, v in found.items()}
    assert index["metadata"]["total_size"] == sum(e.num_bytes for e in inventory(SPEC))


def test_whole_folder_is_small() -> None:
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) < MAX_BYTES


def test_config_is_the_spec() -> None:
    shipped = json.loads((FOLDER / "config.json").read_text())
    assert shipped == hf_config(SPEC)


def test_weights_are_finite_and_hash_tables_balanced(params: dict[str, Tensor]) -> None:
    assert all(bool(torch.isfinite(v).all()) for v in params.values())
    tables = [v for k, v in params.items() if k.endswith("tid2eid")]
    assert len(tables) == 2
    for table in tables:
        assert (table[:, 0] != table[:, 1]).all()
        assert table.flatten().bincount(minlength=16).tolist() == [512] * 16


def test_special_tokens_come_first(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == SPEC.vocab_size == 4096
    assert [tokenizer.id_to_token(i) for i in range(len(SPECIAL))] == list(SPECIAL)
    assert SPEC.bos_token_id == 0
    assert SPEC.eos_token_ids == (1,)
    assert tokenizer.encode("<｜User｜>hi<｜Assistant｜></think>").ids[0] == 3  # noqa: RUF001


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n\tif x:\n\t\treturn {\n            'a': [1, 2,  3],\n        }\n\n\n",
        "   leading, trailing   \n \n\r\n\t\x00\x7f",
        "naïve Ærøskøbing 漢字かな 한국어 עברית 🙂👩‍👩‍👧 ﷽ \u200b\ufeff",
        "x" * 3000,
        "1234567890" * 20,
    ],
)
def test_tokenizer_is_lossless(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert max(ids) < 4096
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_tokenizer_is_lossless_on_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json")) if not _CACHE else _CACHE[0]
    _CACHE[:] = [tokenizer]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


_CACHE: list[Tokenizer] = []


def test_held_out_text_holds_enough_prompts(held_out: list[list[int]]) -> None:
    assert len([d for d in held_out if len(d) >= 128]) >= 64
    assert sum(len(d) >= 2048 for d in held_out) >= 6


@torch.no_grad()
def test_held_out_loss(params: dict[str, Tensor], held_out: list[list[int]]) -> None:
    parts = list(windows(held_out, 1024))[:2]
    model, losses = FastModel(SPEC, params, 1024), []
    for ids in parts:
        hidden, _, _ = model.main(ids[:, :-2])
        logits = F.linear(hidden, params["head.weight"])
        losses.append(float(F.cross_entropy(logits[0], ids[0, 1:-1])))
    assert sum(losses) / len(losses) < HELD_OUT_NATS


@torch.no_grad()
def test_equals_transformers(params: dict[str, Tensor], held_out: list[list[int]]) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    )
    ids = next(windows(held_out, 598))
    model = Gaps(SPEC, params)
    ours = model.forward(ids).logits
    # Nearer than this, rounding may pick another row on either side.
    assert model.smallest > 1e-7
    assert relative(ours, oracle(ids).logits) < 1e-4


@pytest.mark.parametrize("weights", ["shipped", "random"])
@torch.no_grad()
def test_training_forward_equals_reference(
    weights: str, params: dict[str, Tensor], held_out: list[list[int]]
) -> None:
    chosen = params if weights == "shipped" else random_params(SPEC, seed=1)
    ids = next(windows(held_out, 256))[:, :257]
    fast, slow = FastModel(SPEC, chosen, 256), RecomputeModel(SPEC, chosen)
    hidden, streams, _ = fast.main(ids[:, :-1])
    expected = slow.forward(ids[:, :-1])
    assert relative(F.linear(hidden, chosen["head.weight"]), expected.logits) < 1e-4
    assert relative(streams, expected.streams) < 1e-4


@torch.no_grad()
def test_training_drafts_equal_what_an_engine_drafts(
    params: dict[str, Tensor], held_out: list[list[int]]
) -> None:
    """Deeper steps see true rows up to their start and one drafted row a step after it."""
    ids = next(windows(held_out, 192))[:, :193]
    mode = SPEC.speculative["mtp"]
    fast, slow = FastModel(SPEC, params, 192), RecomputeModel(SPEC, params)
    _, streams, _ = fast.main(ids[:, :-1])
    rows = [F.linear(h, params["head.weight"]) for h, _ in fast.drafts(streams, ids, 3)]
    first = slow.draft(streams, ids[:, 1:], mode)
    assert relative(rows[0], first.logits) < 1e-4
    for t in (0, 1, 62, 63, 64, 130):
        carried = torch.cat((streams[:, : t + 1], first.streams[:, t : t + 1]), dim=1)
        for d in (1, 2):
            step = slow.draft(carried, ids[:, 1 : t + d + 2], mode)
            assert relative(rows[d][:, t + d], step.logits[:, -1]) < 1e-4
            carried = torch.cat((carried, step.streams[:, -1:]), dim=1)
