"""What the engine accepts, refuses and reports."""

from __future__ import annotations

import pytest

from tests.support.tiny import Tiny
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import FinishReason, SamplingParams
from v4graph.errors import PlanError, RequestError
from v4graph.model.params import random_params

SPEC = Tiny(kinds=("swa",), hidden=32, hash_layers=0).spec()
PARAMS = random_params(SPEC, seed=2)


@pytest.fixture
def llm() -> LLMEngine:
    config = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32, compile=False, device="cpu"
    )
    return LLMEngine.from_params(SPEC, PARAMS, config)


def drain(llm: LLMEngine) -> dict[str, tuple[list[int], FinishReason | None]]:
    out: dict[str, tuple[list[int], FinishReason | None]] = {}
    while llm.has_unfinished():
        for step in llm.step():
            tokens, _ = out.get(step.request_id, ([], None))
            out[step.request_id] = (tokens + step.token_ids, step.finish_reason)
    return out


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([0, SPEC.vocab_size], "not in 0..95"),
        ([-1], "not in 0..95"),
        ([2] * 32, "leaves no room"),
    ],
)
def test_bad_prompts(llm: LLMEngine, prompt: list[int], message: str) -> None:
    with pytest.raises(RequestError, match=message) as fault:
        llm.add_request("a", prompt, SamplingParams())
    assert fault.value.field == "prompt"
    assert not llm.has_unfinished()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("seed", 2**63),
        ("stop_token_ids", (-1,)),
    ],
)
def test_bad_sampling_parameters(field: str, value: object) -> None:
    with pytest.raises(RequestError) as fault:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert fault.value.field == field


def test_a_request_id_is_used_once_at_a_time(llm: LLMEngine) -> None:
    llm.add_request("a", [2, 3], SamplingParams())
    with pytest.raises(RequestError, match="in use"):
        llm.add_request("a", [2, 3], SamplingParams())
    drain(llm)
    llm.add_request("a", [2, 3], SamplingParams())


def test_abort_in_every_state(llm: LLMEngine) -> None:
    llm.abort("never seen")
    greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    for name in ("running", "prefilling", "waiting"):
        llm.add_request(name, [2] * 20, greedy)
    llm.step()
    for name in ("waiting", "prefilling", "running", "running"):
        llm.abort(name)
        llm.check_integrity()
    while llm.has_unfinished():
        # The round in flight at the abort is read and dropped.
        assert llm.step() == []
    assert all(pool.num_used == 0 for pool in llm.pages.pools.values())


def test_stops(llm: LLMEngine) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    llm.add_request("free", [7, 8, 9], greedy)
    free, reason = drain(llm)["free"]
    assert (len(free), reason) == (12, FinishReason.LENGTH)
    stop = free[4]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    llm.add_request("stopped", [7, 8, 9], params)
    tokens, reason = drain(llm)["stopped"]
    assert tokens == free[: free.index(stop) + 1]
    assert reason is FinishReason.STOP


def test_the_context_limit_ends_a_request(llm: LLMEngine) -> None:
    params = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    llm.add_request("long", [5] * 30, params)
    tokens, reason = drain(llm)["long"]
    assert (len(tokens), reason) == (2, FinishReason.LENGTH)


def test_a_greedy_engine_refuses_to_sample() -> None:
    config = EngineConfig(max_model_len=32, compile=False, device="cpu", greedy_only=True)
    llm = LLMEngine.from_params(SPEC, PARAMS, config)
    with pytest.raises(RequestError, match="greedy"):
        llm.add_request("a", [2], SamplingParams(temperature=0.5))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EngineConfig(kernels="triton", device="cpu"), "kernels 'triton'"),
        (EngineConfig(device="tpu:x"), "device"),
        (EngineConfig(max_num_seqs=0, device="cpu"), "max_num_seqs 0"),
        (EngineConfig(max_model_len=10**6, device="cpu"), "max_model_len 1000000"),
        (
            EngineConfig(kv_memory_bytes=10, device="cpu"),
            r"10 bytes \(kv_memory_bytes, --kv-memory\)",
        ),
    ],
)
def test_limits_that_cannot_hold(config: EngineConfig, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        LLMEngine.from_params(SPEC, PARAMS, config)
