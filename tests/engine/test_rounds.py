"""Rounds from the outside: overlap, host synchronisations, ends of requests inside a round, and
bytes around every pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine import test_dspark as dspark
from tests.ops.test_ngram import search
from tests.support import chain, nano
from tests.support.speculation import Session, greedy, run
from tests.support.tiny import Tiny
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import FinishReason, SamplingParams
from v4graph.engine.rounds import Readback, Round
from v4graph.engine.scheduler import ScheduledBatch
from v4graph.errors import PlanError
from v4graph.model.params import random_params
from v4graph.plan.types import Mode

TINY = Tiny(
    kinds=("csa", "hca"),
    window=8,
    topk=4,
    head_dim=16,
    rope_dim=8,
    index_heads=16,
    index_dim=16,
    hash_layers=1,
    hidden=32,
    experts=4,
    vocab=64,
    page_tokens=8,
    max_len=96,
)


def tiny_engine(k: int, **more: Any) -> LLMEngine:
    spec = TINY.spec()
    config: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "compile": False,
        "device": "cpu",
        "speculative": "mtp" if k else "none",
        "num_draft_tokens": k or None,
        **more,
    }
    return LLMEngine.from_params(spec, random_params(spec, 5), EngineConfig(**config))


def nano_engine(k: int, **more: Any) -> LLMEngine:
    config: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 48,
        "max_model_len": 96,
        "compile": False,
        "device": "cpu",
        "speculative": "mtp" if k else "none",
        "num_draft_tokens": k or None,
        **more,
    }
    return LLMEngine.from_params(nano.spec(), dict(nano.params()), EngineConfig(**config))


def prompts() -> dict[str, list[int]]:
    return {str(len(ids)): ids for ids in nano.prompts(5, 40, 33, 18)}


# Overlap -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [1, 4])
def test_overlap_changes_no_token(k: int, temperature: float) -> None:
    """Rounds too: the same drafts, accepted alike."""
    params = {
        name: SamplingParams(max_tokens=24, temperature=temperature, seed=i, ignore_eos=True)
        for i, name in enumerate(prompts())
    }
    sessions = [
        run(nano_engine(k, overlap=overlap), prompts(), params, join={"18": 3})
        for overlap in (False, True)
    ]
    assert sessions[0].tokens == sessions[1].tokens
    assert sessions[0].rounds.keys() == sessions[1].rounds.keys()
    for name, records in sessions[0].rounds.items():
        # The last round of a request may have been launched before its end was known.
        assert sessions[1].rounds[name][: len(records)] == records


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [0, 3])
def test_a_preemption_while_a_round_is_unread(k: int, temperature: float) -> None:
    """Recomputing before the round's tokens are known would write them twice."""
    ids = {"a": [3, 4, 5], "b": list(range(2, 30))}
    params = SamplingParams(max_tokens=20, temperature=temperature, ignore_eos=True, seed=1)
    expected = run(tiny_engine(k), ids, params).tokens
    for period in (1, 2, 3, 5):
        llm = tiny_engine(k)
        count = 0

        def disturb(step: int, llm: LLMEngine = llm, period: int = period) -> None:
            nonlocal count
            # A few times only: a request that is always preempted never ends.
            if step % period == 0 and count < 8 and llm.scheduler.running:
                llm.scheduler.preempt(llm.scheduler.running[step % len(llm.scheduler.running)])
                count += 1

        assert run(llm, ids, params, every_step=disturb).tokens == expected, period
        assert count > 2


class Synchronisations(TorchDispatchMode):
    """Counts what would wait for a device: reading a value of a tensor in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_local_scalar_dense" in name or "nonzero" in name or name.split(".")[1] == "equal":
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_engine(0),
        lambda: tiny_engine(1),
        lambda: tiny_engine(4),
        lambda: chain.engine(3, 4, checked=False, greedy_only=False),
        lambda: dspark.engine(checked=False, greedy_only=False),
    ],
    ids=["none", "k = 1", "k = 4", "chain", "dspark"],
)
def test_nothing_waits_for_the_device_but_the_read_back(
    make: Callable[[], LLMEngine], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make()
    waits, rounds = Readback.num_waits, 0
    modes: list[Mode] = []
    launch = llm._launch

    def noted(batch: ScheduledBatch) -> Round:
        modes.append(batch.mode)
        return launch(batch)

    monkeypatch.setattr(llm, "_launch", noted)
    ids = {"a": [3, 4, 5], "b": [2 + i % 4 for i in range(28)]}
    params = SamplingParams(max_tokens=12, temperature=temperature, ignore_eos=True, seed=1)
    for name, prompt in ids.items():
        llm.add_request(name, prompt, params)
    with Synchronisations() as seen:
        while llm.has_unfinished():
            before = len(modes)
            llm.step()
            rounds += len(modes) - before
    assert seen.found == []
    assert Readback.num_waits - waits == rounds
    assert set(modes) == {Mode.PREFILL, llm.plan.decode_mode}


def test_a_round_is_launched_before_the_last_one_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = tiny_engine(3)
    order: list[str] = []

    def noting(name: str) -> None:
        inner = getattr(llm, name)

        def noted(argument: Any) -> Any:
            order.append(name)
            return inner(argument)

        monkeypatch.setattr(llm, name, noted)

    noting("_launch")
    noting("_read")
    run(llm, {"a": [3, 4, 5]}, greedy(6), record=False)
    assert order[:5] == ["_launch", "_launch", "_read", "_launch", "_read"]
    assert order.count("_launch") == order.count("_read")


# Ends inside a round ---------------------------------------------------------------------------


@cache
def free() -> Session:
    """What v4-nano writes when nothing stops it."""
    return run(nano_engine(0), prompts(), greedy(24))


@cache
def eight() -> LLMEngine:
    return nano_engine(8)


@pytest.mark.parametrize("limit", range(1, 13))
def test_max_tokens_ends_inside_a_round(limit: int) -> None:
    """k = 8 exceeds what remains."""
    session = run(eight(), prompts(), greedy(limit))
    assert session.tokens == {name: ids[:limit] for name, ids in free().tokens.items()}
    assert set(session.reasons.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("place", range(9))
def test_a_stop_token_ends_inside_a_round(place: int) -> None:
    params = {name: greedy(24, (ids[place],)) for name, ids in free().tokens.items()}
    session = run(eight(), prompts(), params)
    for name, ids in free().tokens.items():
        assert session.tokens[name] == ids[: ids.index(ids[place]) + 1]
        assert session.reasons[name] is FinishReason.STOP


def test_end_of_text_ends_inside_a_round() -> None:
    """The spec's own end: an engine whose end of text is a token that the model writes."""
    for place in (2, 5, 7):
        ids = free().tokens["40"]
        spec = nano.spec().model_copy(update={"eos_token_id": ids[place]})
        llm = nano_engine(8)
        llm._eos = frozenset(spec.eos_token_ids)
        params = SamplingParams(max_tokens=24, temperature=0.0)
        session = run(llm, {"40": prompts()["40"]}, params)
        assert session.tokens["40"] == ids[: ids.index(ids[place]) + 1]
        assert session.reasons["40"] is FinishReason.STOP


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_context_limit_inside_a_round(k: int) -> None:
    """Drafts that have no place in the sequence are not verified; nothing is written behind it."""
    lengths = (95, 94, 90, 89, 87, 86, 80)
    many = {str(len(ids)): ids for ids in nano.prompts(*lengths)}
    plain = run(nano_engine(0), many, greedy(100))
    session = run(nano_engine(k, checked=True), many, greedy(100))
    assert session.tokens == plain.tokens
    for name, tokens in session.tokens.items():
        assert int(name) + len(tokens) == 96
        assert session.reasons[name] is FinishReason.LENGTH
    for records in session.rounds.values():
        assert all(r.num_tokens + len(r.drafts) <= 95 for r in records)


# Prompt lookup ---------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_lookup_changes_no_greedy_token(k: int, overlap: bool) -> None:
    """Drafts are what the rule says, accepted where they are the model's own choices."""
    llm = nano_engine(k, speculative="ngram", overlap=overlap, checked=True)
    session = run(llm, prompts(), greedy(24))
    assert session.tokens == free().tokens
    assert session.num_accepted > 0
    for name, records in session.rounds.items():
        full = [*prompts()[name], *session.tokens[name]]
        for r in records:
            known = full[: r.num_tokens]
            if len(known) == r.num_tokens:
                assert r.drafts == search(known, k, 1, 3)[: 95 - r.num_tokens]
    counts = llm.draft_counts
    assert (counts.drafts, counts.accepted) == (session.num_drafts, session.num_accepted)


def test_lookup_samples_with_seeds() -> None:
    """Certain drafts: the same seeds give the same tokens alone and in a batch."""
    params = {
        name: SamplingParams(max_tokens=20, temperature=0.6, seed=i, ignore_eos=True)
        for i, name in enumerate(prompts())
    }
    together = run(nano_engine(3, speculative="ngram"), prompts(), params).tokens
    for name, ids in prompts().items():
        alone = run(nano_engine(3, speculative="ngram"), {name: ids}, {name: params[name]}).tokens
        assert alone[name] == together[name]


# Injected drafts -------------------------------------------------------------------------------


def test_injection_needs_an_engine_without_overlap() -> None:
    llm = tiny_engine(2)
    llm.draft_injector = lambda r: [1, 1]
    llm.add_request("a", [2, 3], greedy(8))
    llm.step()
    with pytest.raises(PlanError, match="overlap off"):
        llm.step()


def test_an_injector_may_leave_drafts_alone() -> None:
    """None keeps the model's own; fewer than k are as many as given; none at all is decoding."""
    expected = run(tiny_engine(0), {"a": [2, 3, 4]}, greedy(20)).tokens
    for forced in (None, [], [5], [5, 6]):
        llm = tiny_engine(3, overlap=False)
        llm.draft_injector = lambda r, f=forced: f
        session = run(llm, {"a": [2, 3, 4]}, greedy(20))
        assert session.tokens == expected
        if forced is not None:
            assert all(r.drafts == forced for r in session.rounds["a"])


# Bytes around the pools --------------------------------------------------------------------------


class Fences:
    """Every pool, and what commits write of the table, lies between rows that nothing may write."""

    GUARD = 64

    def __init__(self, llm: LLMEngine) -> None:
        self.guards: list[Tensor] = []
        state = llm.programs.state
        for pools in (*state.pools, *state.draft_pools):
            for role, pool in pools.items():
                pools[role] = self.fence(pool)
        table = state.table
        table.token_ids = self.fence(table.token_ids)
        table.draft_tokens = self.fence(table.draft_tokens)
        table.draft_probs = self.fence(table.draft_probs)
        table.scalars = {name: self.fence(t) for name, t in table.scalars.items()}
        for program in llm.programs.programs.values():
            program._table.update(table.tensors())
            for stage in program.stages:
                stage._table.update(table.tensors())

    def fence(self, tensor: Tensor) -> Tensor:
        guard, size = self.GUARD, tensor.numel()
        whole = torch.full((size + 2 * guard,), 77, dtype=tensor.dtype)
        inner = whole[guard : guard + size].view(tensor.shape)
        inner.copy_(tensor)
        self.guards += [whole[:guard], whole[guard + size :]]
        return inner

    def whole(self) -> bool:
        return all(bool((g == 77).all()) for g in self.guards)


def test_nothing_is_written_beside_the_pools_in_a_thousand_rounds() -> None:
    """Padded rows, -1 slots, rounds at the end of the context, requests that come and go."""
    llm = tiny_engine(4)
    fences = Fences(llm)
    gen = torch.Generator().manual_seed(0)
    count = 0
    while llm.draft_counts.rounds < 1000:
        while len(llm.scheduler.running) + len(llm.scheduler.waiting) < 4:
            count += 1
            length = int(torch.randint(1, 95, (1,), generator=gen))
            ids = torch.randint(0, TINY.vocab, (length,), generator=gen).tolist()
            new = int(torch.randint(1, 60, (1,), generator=gen))
            warm = (0.0, 1.0)[count % 2]
            llm.add_request(
                str(count), ids, SamplingParams(max_tokens=new, temperature=warm, ignore_eos=True)
            )
        llm.step()
        assert fences.whole()
    llm.check_integrity()
    rows = llm.plan.group("window").page_rows
    for pools in (*llm.programs.state.pools, *llm.programs.state.draft_pools):
        # Padding went to the null page, real rows beside it.
        assert all(bool((p[:rows] != 0).any() and (p[rows:] != 0).any()) for p in pools.values())
    expected = run(tiny_engine(0), {"a": [2, 3, 4]}, greedy(30)).tokens
    while llm.has_unfinished():
        llm.step()
    assert run(llm, {"a": [2, 3, 4]}, greedy(30)).tokens == expected
