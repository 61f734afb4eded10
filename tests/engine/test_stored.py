"""Packed cache rows and weights as stored: every engine path against a recompute that rounds rows
as the caches do and multiplies by the same weights, decoded."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.runner import Runner, relative_error
from tests.support.speculation import greedy, run
from tests.support.stored import decoded, fp8, stored
from tests.support.tiny import Tiny
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.model.params import random_params
from v4graph.model.projections import StoredParam
from v4graph.model.recompute import RecomputeModel
from v4graph.model.rounds import RoundOracle
from v4graph.plan.types import Limits
from v4graph.spec.model import DsparkSpeculation, MtpSpeculation

BOUND = 1e-4
PLAIN = Tiny(hidden=64, index_heads=8)
PACKED = replace(PLAIN, row_format="fp8_ds")
DSPARK = replace(PACKED, dspark=(2, 3))


@cache
def weights(tiny: Tiny) -> dict[str, StoredParam]:
    return stored(random_params(tiny.spec(), seed=3))


@cache
def oracle(tiny: Tiny) -> RecomputeModel:
    return RecomputeModel(tiny.spec(), decoded(weights(tiny)))


def ids(count: int, seed: int = 0) -> list[int]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(2, 96, (count,), generator=gen).tolist()


def logits(tiny: Tiny, tokens: list[int]) -> Tensor:
    return oracle(tiny).forward(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize(
    ("row_format", "compiled"),
    [("model", False), ("bf16", False), ("bf16", True), ("fp8_ds", False), ("fp8_ds", True)],
)
def test_chunks_and_decoding_equal_the_recompute(row_format: str, compiled: bool) -> None:
    tiny = replace(PLAIN, row_format=row_format)
    limits = Limits(max_num_seqs=2, max_num_batched_tokens=24, max_model_len=96, greedy_only=True)
    runner = Runner(tiny.spec(), dict(weights(tiny)), limits, compiled=compiled)  # type: ignore[arg-type]
    tokens, more = ids(70), ids(41, 1)
    expected, others = logits(tiny, tokens), logits(tiny, more)
    one, two = runner.add(tokens), runner.add(more)
    for begin in range(0, 60, 20):
        got = runner.step([(one, 20), (two, 4)])
        assert relative_error(got[0], expected[begin + 19]) < BOUND
        assert relative_error(got[1], others[begin // 5 + 3]) < BOUND
    for at in range(60, 70):
        got = runner.step([(one, 1), (two, 1)])
        assert relative_error(got[0], expected[at]) < BOUND
        assert relative_error(got[1], others[at - 48]) < BOUND


def engine(tiny: Tiny, speculative: str, **more: Any) -> LLMEngine:
    config: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 29,
        "max_model_len": 128,
        "compile": False,
        "checked": True,
        "device": "cpu",
        "greedy_only": True,
        "speculative": speculative,
        **more,
    }
    return LLMEngine.from_params(tiny.spec(), dict(weights(tiny)), EngineConfig(**config))


PROMPTS = {str(n): ids(n, n) for n in (5, 16, 33, 62)}


@cache
def plain(tiny: Tiny) -> dict[str, list[int]]:
    return run(engine(tiny, "none"), PROMPTS, greedy(24)).tokens


@pytest.mark.parametrize("tiny", [PACKED, DSPARK], ids=["mtp", "dspark"])
@pytest.mark.parametrize("operators", [False, True])
def test_no_gap_with_packed_rows(tiny: Tiny, operators: bool) -> None:
    name = "mtp" if tiny.dspark is None else "dspark"
    mode = tiny.spec().speculative[name]
    assert isinstance(mode, MtpSpeculation | DsparkSpeculation)
    kernels = "operators" if operators else "auto"
    session = run(engine(tiny, name, kernels=kernels), PROMPTS, greedy(24))
    assert session.tokens == plain(tiny)
    assert session.differences(RoundOracle(oracle(tiny), mode)) == []
    assert session.num_drafts > 0


def test_greedy_tokens_are_the_recomputes() -> None:
    for name, tokens in plain(PACKED).items():
        full = [*PROMPTS[name], *tokens]
        rows = logits(PACKED, full)[len(PROMPTS[name]) - 1 : -1]
        assert rows.argmax(-1).tolist() == tokens


def test_operators_serve_plain_rows_alike() -> None:
    for kernels in ("reference", "operators"):
        session = run(engine(PLAIN, "mtp", kernels=kernels), PROMPTS, greedy(24))
        assert session.differences(RoundOracle(oracle(PLAIN), mtp())) == []


def mtp() -> MtpSpeculation:
    mode = PLAIN.spec().speculative["mtp"]
    assert isinstance(mode, MtpSpeculation)
    return mode


def test_preemption_and_cached_prefixes_with_packed_rows() -> None:
    """Pages of bytes are copied, poisoned and computed again like any others."""
    prompts = {str(n): ids(n, n) for n in (50, 55, 60, 62)}
    llm = engine(PACKED, "mtp", kv_memory_bytes=384_000, max_model_len=88)
    first = run(llm, prompts, greedy(24))
    again = run(llm, prompts, greedy(24))
    assert llm.metrics["num_preemptions"] > 0
    assert llm.metrics["prefix_hit_tokens"] > 0
    expected = run(engine(PACKED, "none", prefix_cache=False), prompts, greedy(24)).tokens
    assert first.tokens == again.tokens == expected
    llm.check_integrity()


def test_what_no_operator_multiplies_is_decoded() -> None:
    """Compressors, routers and the head may be FP8 in a file; their scales count."""
    params = dict(weights(PACKED))
    for name, p in params.items():
        chosen = name.endswith(("wgate.weight", "compressor.wkv.weight", "ffn.gate.weight"))
        if chosen or name == "head.weight":
            assert isinstance(p, Tensor)
            params[name] = fp8(p)
    config = EngineConfig(max_model_len=64, compile=False, device="cpu", greedy_only=True)
    llm = LLMEngine.from_params(PACKED.spec(), params, config)
    tokens = run(llm, {"a": ids(33)}, greedy(12)).tokens["a"]
    model = RecomputeModel(PACKED.spec(), decoded(params))
    rows = model.forward(torch.tensor([[*ids(33), *tokens]])).logits[0]
    assert rows[32:-1].argmax(-1).tolist() == tokens
