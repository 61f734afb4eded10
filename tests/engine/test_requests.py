"""What the engine accepts, refuses and reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.tiny import Tiny
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import FinishReason, SamplingParams
from v4graph.errors import PlanError, RequestError
from v4graph.model.params import random_params
from v4graph.ops.logits import Prefix, process_logits
from v4graph.ops.sampling import probabilities
from v4graph.program.rules import unpack

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
        ("temperature", 10**400),
        ("repetition_penalty", 0.99e-6),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-46),
        *(
            (name, value)
            for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
            # Zero in float32, and subnormal there.
            for value in (1e-46, 1.1e-38)
        ),
        ("frequency_penalty", -1e-46),
        ("logit_bias", {3: 1e-46}),
        ("logit_bias", {3: -1e-40}),
    ],
)
def test_bad_sampling_parameters(field: str, value: object) -> None:
    with pytest.raises(RequestError) as fault:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert fault.value.field == field


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
def test_ranges_are_told_with_both_ends(seed: int) -> None:
    with pytest.raises(RequestError, match=f"integer of {-(2**63)} to {2**63 - 1}, got {seed}"):
        SamplingParams(seed=seed)
    with pytest.raises(RequestError, match=r"repetition_penalty must be a number in 1e-06\.\.100"):
        SamplingParams(repetition_penalty=0)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1e-6, temperature=1.2e-38),
        SamplingParams(repetition_penalty=1e-6, temperature=1.0, min_p=1.2e-38),
        SamplingParams(repetition_penalty=100.0, frequency_penalty=-2.0, temperature=1e-5),
        SamplingParams(presence_penalty=1.2e-38, logit_bias={3: -1.2e-38}, top_p=1.2e-38),
    ],
)
def test_distributions_are_finite_at_the_ends_of_the_ranges(
    llm: LLMEngine, params: SamplingParams
) -> None:
    """As the device holds them, on logits as large as any model's."""
    llm.add_request("a", [2, 3], params)
    llm.step()
    table, slot = llm.programs.state.table, 1
    rules = unpack(table.rule_ints[slot : slot + 1], table.rule_floats[slot : slot + 1])
    size = SPEC.vocab_size
    logits = torch.linspace(-1e4, 1e4, size)[None, None]
    everything = torch.arange(size)[None]
    prefix = Prefix(everything, torch.tensor([size]), everything[:, :0], torch.zeros(1, 1).long())
    names = ("temperature", "top_k", "top_p", "min_p")
    own = (table.scalars[name][slot].view(1, 1) for name in names)
    probs = probabilities(process_logits(logits, prefix, rules), *own)
    assert probs.isfinite().all()
    assert probs.sum().item() == pytest.approx(1.0)
    given = (params.repetition_penalty, params.presence_penalty, params.min_p, params.top_p)
    held = (rules.repetition, rules.presence, table.scalars["min_p"], table.scalars["top_p"])
    for value, tensor in zip(given, held, strict=True):
        assert (value > 0) == bool(tensor[slot if tensor.numel() > 1 else 0] > 0)
    drain(llm)


def test_bans_of_the_whole_vocabulary() -> None:
    six = replace(Tiny(kinds=("swa",), hidden=32, hash_layers=0), vocab=6).spec()
    config = EngineConfig(max_model_len=64, compile=False, device="cpu", speculative="mtp")
    llm = LLMEngine.from_params(six, random_params(six, seed=2), config)
    words = tuple((i,) for i in range(6))
    with pytest.raises(RequestError, match="all 6 tokens of the vocabulary are banned") as fault:
        llm.add_request("a", [2], SamplingParams(bad_words=words))
    assert fault.value.field == "bad_words"
    ends = SamplingParams(bad_words=words[:4], stop_token_ids=(4, 5), min_tokens=2)
    with pytest.raises(RequestError, match="min_tokens 2 keeps away"):
        llm.add_request("a", [2], ends)
    llm.add_request("one", [2], SamplingParams(bad_words=words[:5], max_tokens=5, ignore_eos=True))
    assert drain(llm)["one"][0] == [5] * 5
    # What follows a token is not known before: id 0, banned or not.
    pairs = tuple((a, b) for a in range(6) for b in range(6))
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature, bad_words=pairs, max_tokens=6, ignore_eos=True
        )
        llm.add_request("none", [2], params)
        assert drain(llm)["none"][0][1:] == [0] * 5


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
