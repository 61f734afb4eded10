"""Several MTP layers: every draft, accepted count and token equals that of a full recompute."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.support.chain import engine, oracle, params, prompts, spec
from tests.support.speculation import Session, greedy, run
from v4graph.engine import engine as engine_module
from v4graph.engine.request import Request, SamplingParams
from v4graph.errors import PlanError, ProgramError
from v4graph.model.recompute import RecomputeModel
from v4graph.plan.lower import lower
from v4graph.plan.types import GroupPlan, Limits, Plan
from v4graph.plan.verify import verify_plan
from v4graph.spec.model import ModelSpec

NEW = 16
LENGTHS = (1, 2, 3, 9, 26)


@cache
def plain() -> dict[str, list[int]]:
    """Tokens without speculation; the main model is the same for any number of draft layers."""
    return run(engine(1, 0), prompts(*LENGTHS), greedy(NEW)).tokens


def assert_no_gap(num_layers: int, session: Session) -> None:
    assert session.differences(oracle(num_layers)) == []
    assert session.num_accepted > 0


@pytest.mark.parametrize("num_layers", [2, 3])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_no_gap(num_layers: int, k: int) -> None:
    """More requests than slots, prompts from one token on, in chunks that end anywhere."""
    llm = engine(num_layers, k, overlap=(num_layers + k) % 2 == 0)
    session = run(llm, prompts(*LENGTHS), greedy(NEW))
    assert session.tokens == plain()
    assert_no_gap(num_layers, session)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_chunks_of_any_size(chunk: int) -> None:
    """A chunk may end within a prompt's last tokens, where only some layers have final rows."""
    many = prompts(3, 8, 13)
    assert_no_gap(3, run(engine(3, 4, max_num_batched_tokens=chunk), many, greedy(NEW)))


@pytest.mark.parametrize("overlap", [False, True])
def test_through_preemptions_and_aborts(overlap: bool) -> None:
    llm = engine(3, 4, overlap=overlap, prefix_cache=False)
    for pool in llm.pages.pools.values():
        keep = pool.group.pages_per_seq + 2
        del pool._free[: pool.num_free - keep]
        pool.group = replace(pool.group, num_pages=keep + 1)
    many = prompts(20, 30, 40, 50)
    session = run(llm, many, greedy(NEW), join={"40": 5}, abort={"30": 12})
    assert llm.metrics["num_preemptions"] > 0
    assert_no_gap(3, session)


@pytest.mark.parametrize("overlap", [False, True])
def test_behind_cached_prefixes(overlap: bool) -> None:
    """A hit brings every layer's rows, and ends before the first that would rest on a draft."""
    base = prompts(48)["48"]
    many = {f"{n}": base[:n] for n in (48, 47, 33, 34, 35, 17, 18, 19)}
    llm = engine(3, 4, overlap=overlap)
    session = run(llm, many, greedy(NEW), join={name: 5 * i for i, name in enumerate(many)})
    assert llm.metrics["prefix_hit_tokens"] > 0
    assert_no_gap(3, session)


def test_forced_drafts_do_not_reach_later_rounds() -> None:
    """Every second round verifies other drafts than those that chained rows were made with."""
    llm, forced = engine(3, 4, overlap=False), set()

    def inject(request: Request) -> list[int] | None:
        if request.num_tokens % 2:
            return None
        forced.add((request.request_id, request.num_tokens))
        return [2 + (request.num_tokens + i) % 4 for i in range(4)]

    llm.draft_injector = inject
    session = run(llm, prompts(5, 12, 21), greedy(NEW))
    assert forced
    for name, rounds in session.rounds.items():
        session.rounds[name] = [r for r in rounds if (name, r.num_tokens) not in forced]
        assert session.rounds[name]
    assert session.differences(oracle(3)) == []


@pytest.mark.parametrize("k", [2, 4])
def test_sampled_requests_keep_their_company(k: int) -> None:
    """The sampling variants run the same chain: greedy requests beside sampled ones."""
    many = prompts(7, 16)
    wild = SamplingParams(max_tokens=NEW, temperature=1.0, ignore_eos=True, seed=7)
    llm = engine(2, k, greedy_only=False)
    session = run(llm, many, {"7": greedy(NEW), "16": wild})
    assert session.tokens["7"] == run(engine(2, 0), many, greedy(NEW)).tokens["7"]
    del session.rounds["16"]
    assert_no_gap(2, session)


def test_fewer_drafts_than_layers_use_fewer_layers() -> None:
    state = engine(3, 2).programs.state
    assert len(state.draft_layers) == len(state.draft_pools) == 2
    assert list(state.table.carried_streams) == ["carried_streams.1"]


def test_the_oracle_is_a_loop_over_whole_sequences() -> None:
    """Layer after layer over one sequence, then rows of the last one, without batches."""
    ids, k = prompts(24)["24"], 5
    model, mode = RecomputeModel(spec(3), params(3)), oracle(3).mode
    expected, known = [], [2, 3, 4, 11, 24]
    with torch.no_grad():
        for n in known:
            tokens, drafts = list(ids[:n]), []
            x = model.forward(torch.tensor([ids])).streams[:, : n - 1]
            for layer in range(3):
                behind = tokens[layer + 1 : layer + n]
                out = model.draft(x, torch.tensor([behind]), mode, layer)
                last, x = (x, out.streams)
                tokens.append(int(out.logits[0, -1].argmax()))
                drafts.append(tokens[-1])
            while len(drafts) < k:
                last = torch.cat((last, x[:, -1:]), dim=1)
                out = model.draft(last, torch.tensor([tokens[3 : 3 + last.shape[1]]]), mode, 2)
                x = out.streams
                tokens.append(int(out.logits[0, -1].argmax()))
                drafts.append(tokens[-1])
            expected.append(drafts)
    assert oracle(3).drafts(ids, known, k) == expected


# The kept range and the ring -----------------------------------------------------------------


@pytest.mark.parametrize(("num_layers", "k"), [(2, 2), (2, 5), (3, 2), (3, 3), (3, 5)])
def test_a_round_may_need_every_row_of_the_ring(num_layers: int, k: int) -> None:
    """From the oldest row that a chained layer's first query reads to the last guess."""
    llm = engine(num_layers, k, page_tokens=1, overlap=False, max_num_batched_tokens=1)
    longest, allocate = 0, llm.pages.allocate

    def spy(request: Request, missing: dict[str, list[int]]) -> None:
        nonlocal longest
        allocate(request, missing)
        held = request.pages["window"]
        longest = max(longest, max(held) - min(held) + 1)

    llm.pages.allocate = spy  # type: ignore[method-assign]
    run(llm, prompts(9), greedy(NEW))
    window, used = 8, min(num_layers, k)
    assert longest == window - 1 + (used - 1) + (k + 1) + (k - used)
    assert longest == llm.plan.group("window").table_width


@pytest.mark.parametrize(("num_layers", "k"), [(2, 3), (3, 3)])
def test_a_kept_range_of_one_row_less(
    num_layers: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused; unverified, checked mode finds a read of a row that is gone."""

    def shorter(g: GroupPlan) -> GroupPlan:
        return replace(g, kept_tokens=g.kept_tokens - 1) if g.name == "window" else g

    def short(spec: ModelSpec, limits: Limits) -> Plan:
        plan = lower(spec, limits)
        return replace(plan, groups=tuple(map(shorter, plan.groups)))

    honest = engine(num_layers, k, page_tokens=1).plan
    back = f"from a row that lies {num_layers - 1} back on"
    with pytest.raises(PlanError, match=back):
        verify_plan(short(spec(num_layers, 1), honest.limits))
    monkeypatch.setattr(engine_module, "lower", short)
    with pytest.raises(ProgramError, match=r"draft_chain: group window lists a row of the null"):
        run(engine(num_layers, k, page_tokens=1, overlap=False), prompts(9), greedy(NEW))
