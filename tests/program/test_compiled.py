"""Compiled programs: equal to eager, one compilation a region, none while serving."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.runner import relative_error
from tests.support.tiny import Tiny
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import SamplingParams
from v4graph.errors import ProgramError
from v4graph.model.params import random_params
from v4graph.plan.types import Bucket, Mode
from v4graph.program.compiler import Call
from v4graph.program.step import StepProgram
from v4graph.program.tape import Tape
from v4graph.program.variants import Variant

TINY = Tiny(kinds=("csa", "hca", "csa"), hidden=32, hash_layers=1, page_tokens=16)
SPEC = TINY.spec()
PARAMS = random_params(SPEC, seed=3)


def engine(compiled: bool) -> LLMEngine:
    config = EngineConfig(
        max_num_seqs=3,
        max_num_batched_tokens=24,
        max_model_len=128,
        decode_buckets=(3,),
        prefill_buckets=((24, 3),),
        compile=compiled,
        device="cpu",
    )
    return LLMEngine.from_params(SPEC, PARAMS, config)


@pytest.fixture(scope="module")
def compiled() -> LLMEngine:
    return engine(True)


@pytest.fixture(scope="module")
def eager() -> LLMEngine:
    return engine(False)


def program(llm: LLMEngine, mode: Mode) -> StepProgram:
    (found,) = [p for (m, _), p in llm.programs.programs.items() if m is mode]
    return found


def test_logits_and_pools_equal_the_eager_program(compiled: LLMEngine, eager: LLMEngine) -> None:
    """Same steps on both; a lost in-place write would show in the pools."""
    prompts = {"a": list(range(2, 40)), "b": [9] * 17, "c": [3, 5, 7]}
    for llm in (compiled, eager):
        for name, ids in prompts.items():
            params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
            llm.add_request(name, ids, params)
    while eager.has_unfinished():
        batch = [sorted(out.request_id for out in llm.step()) for llm in (compiled, eager)]
        assert batch[0] == batch[1]
        for group in ("token_ids", "num_tokens", "num_computed_tokens"):
            tables = [llm.programs.state.table.tensors()[group] for llm in (compiled, eager)]
            assert torch.equal(tables[0][1:], tables[1][1:])
        for mine, other in zip(
            compiled.programs.state.pools, eager.programs.state.pools, strict=True
        ):
            for role, pool in mine.items():
                rows = slice(eager.plan.groups[0].page_rows, None)  # the null page differs
                scale = float(other[role].abs().max()) or 1.0
                assert float((pool[rows] - other[role][rows]).abs().max()) / scale < 1e-4
    result = [program(llm, Mode.PREFILL).run([], [], 0, False).logits for llm in (compiled, eager)]
    assert relative_error(result[0], result[1]) < 1e-4


def test_fifty_requests_recompile_nothing(compiled: LLMEngine, eager: LLMEngine) -> None:
    """Every variant runs: the rounds of random, ruled and told requests."""
    rng = random.Random(1)
    names = {"greedy", "sample", "processed", "sample+logprobs", "processed+logprobs"}
    assert set(program(compiled, Mode.DECODE).calls_per_step()) == names
    for i in range(50):
        ids = [rng.randrange(2, 96) for _ in range(rng.randrange(1, 90))]
        ruled, told = i % 5 == 3, i % 7 == 2
        params = SamplingParams(
            max_tokens=rng.randrange(1, 20),
            temperature=rng.choice((0.0, 0.7)),
            seed=i,
            frequency_penalty=0.5 * ruled,
            bad_words=((7,), (5, 6)) if ruled else (),
            logprobs=3 if told else None,
        )
        for llm in (compiled, eager):
            llm.add_request(f"r{i}", ids, params)
    out: list[dict[str, list[int]]] = [{}, {}]
    logprobs: list[list[float]] = [[], []]
    for got, llm in zip(out, (compiled, eager), strict=True):
        while llm.has_unfinished():
            for step in llm.step():
                got.setdefault(step.request_id, []).extend(step.token_ids)
                for entry in step.logprobs or ():
                    logprobs[llm is eager].append(entry.logprob)
    assert out[0] == out[1]
    assert logprobs[0]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    stats = compiled.programs.compiler.stats
    assert len(stats) == sum(
        len(s.regions) for p in compiled.programs.programs.values() for s in p.stages
    )
    assert {s.compilations for s in stats.values()} == {1}
    assert compiled.programs.compiler.recompilations == 0


def test_a_recompilation_while_serving_is_an_error(compiled: LLMEngine) -> None:
    """Another shape behind a sealed region."""
    step = program(compiled, Mode.DECODE)
    stage = step.stages[0]
    with torch.no_grad(), pytest.raises(Exception, match="recompiled while serving"):
        stage.settle(step.host, torch.zeros(3, 7), Variant(), torch.ones(3, dtype=torch.bool))


def test_warm_up_leaves_no_trace(compiled: LLMEngine) -> None:
    """Warming up again changes neither the table nor any page but the null page."""
    state = compiled.programs.state
    before = {k: v.clone() for k, v in state.table.tensors().items()}
    pools = [{k: v.clone() for k, v in layer.items()} for layer in state.pools]
    program(compiled, Mode.PREFILL).warm_up()
    for name, values in state.table.tensors().items():
        assert torch.equal(values, before[name]), name
    for old, layer in zip(pools, state.pools, strict=True):
        for role, pool in layer.items():
            assert torch.equal(pool[1:], old[role][1:]), role


def test_dispatch_takes_the_smallest_program(compiled: LLMEngine) -> None:
    assert compiled.programs.dispatch(Mode.DECODE, 2, 2).bucket == Bucket(3, 3, 1)
    with pytest.raises(ProgramError, match="no prefill program"):
        compiled.programs.dispatch(Mode.PREFILL, 25, 1)


def test_a_tape_refuses_temporaries() -> None:
    static, temporary = torch.ones(2), torch.ones(2)
    call = Call("r", lambda a, b: (a + b,), (static, temporary), (torch.zeros(2),))
    with pytest.raises(ProgramError, match="neither static nor made"):
        Tape([call], call.outputs, [static])


def test_a_tape_replays_with_fresh_outputs() -> None:
    static = torch.ones(2)
    first, second = torch.empty(2), torch.empty(2)
    calls = [
        Call("a", lambda x: (x * 2,), (static,), (first,)),
        Call("b", lambda x, y: (x + y,), (first, static), (second,)),
    ]
    tape = Tape(calls, [second], [static])
    assert tape.replay()[0].tolist() == [3.0, 3.0]
    static.fill_(2.0)
    assert tape.replay()[0].tolist() == [6.0, 6.0]
