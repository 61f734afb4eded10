"""v4-nano's trained weights through the engine's paths, against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.runner import Runner, relative_error, top2_gap
from v4graph.model.loader import load_params
from v4graph.plan.types import Limits, Mode
from v4graph.spec.load import load_spec, spec_path
from v4graph.text.tokenizer import Tokenizer

BOUND = 1e-4
DIRECTORY = spec_path("v4-nano").with_suffix("")


@pytest.fixture(scope="module")
def ids() -> list[int]:
    text = (DIRECTORY / "heldout.txt").read_text(encoding="utf-8")
    return Tokenizer.from_directory(DIRECTORY, 0).encode(text, add_bos=True)[:420]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        DIRECTORY, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def params() -> dict[str, Tensor]:
    return load_params(load_spec("v4-nano"), DIRECTORY, torch.float32)


@pytest.mark.parametrize("chunk", [31, 32, 33, 64, 129, 420])
def test_chunked_prefill(
    chunk: int, ids: list[int], model: torch.nn.Module, params: dict[str, Tensor]
) -> None:
    """420 tokens: selection is strict from token 132 on (32 rows of 4)."""
    with torch.no_grad():
        oracle = model(torch.tensor([ids])).logits[0]
    limits = Limits(
        max_num_seqs=1, max_num_batched_tokens=chunk, max_model_len=512, speculative="none"
    )
    runner = Runner(load_spec("v4-nano"), params, limits)
    request = runner.add(ids)
    while request.num_computed_tokens < len(ids):
        count = min(chunk, len(ids) - request.num_computed_tokens)
        row = runner.step([(request, count)])[0]
        at = request.num_computed_tokens
        assert relative_error(row, oracle[at - 1]) <= BOUND, f"position {at}"


def test_ragged_decode(ids: list[int], model: torch.nn.Module, params: dict[str, Tensor]) -> None:
    """Five prompts of different lengths decode 60 tokens in one batch."""
    limits = Limits(
        max_num_seqs=5, max_num_batched_tokens=512, max_model_len=512, speculative="none"
    )
    runner = Runner(load_spec("v4-nano"), params, limits)
    lengths = (3, 31, 64, 129, 260)
    requests = [runner.add(ids[:n]) for n in lengths]
    rows = [[row.clone()] for row in runner.step([(r, r.num_tokens) for r in requests])]
    for _ in range(60):
        step = runner.step([(r, 1) for r in requests], Mode.DECODE)
        for kept, row in zip(rows, step, strict=True):
            kept.append(row.clone())
    for request, n, kept in zip(requests, lengths, rows, strict=True):
        with torch.no_grad():
            oracle = model(torch.tensor([request.token_ids[:-1]])).logits[0, n - 1 :]
        for i, (row, expected) in enumerate(zip(kept, oracle, strict=True)):
            assert relative_error(row, expected) <= BOUND, f"prompt {n}, token {i}"
            same = int(row.argmax()) == int(expected.argmax())
            assert same or top2_gap(expected) < 1e-4, f"gap {top2_gap(expected)}"
