"""A hit changes no token: prompts that repeat, grow, fork and go on give a cold run's output."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from tests.support.prefix import SHAPES, TINY, Answer, ask, ids, tiny_engine
from v4graph.engine.engine import LLMEngine
from v4graph.engine.prefix import unit_tokens
from v4graph.engine.request import SamplingParams
from v4graph.model.params import random_params

MODES = list(product((0, 3), (False, True)))


@cache
def cold_engine(shape: str, k: int) -> LLMEngine:
    return tiny_engine(SHAPES[shape], k, prefix_cache=False, overlap=False)


@cache
def cold(shape: str, k: int, prompt: tuple[int, ...], new: int = 6) -> Answer:
    """The answer without a cache."""
    return ask(cold_engine(shape, k), prompt, new)


def prompts() -> list[tuple[int, ...]]:
    """Repeat, extend, cut, fork in the middle and near the end."""
    base = ids(60)
    return [
        tuple(p)
        for p in (
            base,
            base,
            base + ids(31, 1),
            base[:47],
            base[:30] + ids(20, 2),
            base[:59] + ids(9, 3),
            ids(8, 4) + base,
            base[:30] + ids(20, 2) + ids(15, 5),
        )
    ]


@pytest.mark.parametrize(
    ("shape", "k", "overlap"),
    [*(("aligned", *mode) for mode in MODES), *((s, 3, True) for s in SHAPES if s != "aligned")],
)
def test_hits_give_the_tokens_of_a_cold_run(shape: str, k: int, overlap: bool) -> None:
    llm = tiny_engine(SHAPES[shape], k, overlap=overlap)
    hits = []
    for prompt in prompts():
        got, want = ask(llm, prompt, 6), cold(shape, k, prompt)
        assert got.tokens == want.tokens, (len(prompt), got.hit_tokens)
        assert (got.rounds, got.accepted) == (want.rounds, want.accepted)
        hits.append(got.hit_tokens)
    unit = unit_tokens(llm.plan)
    assert hits[0] == hits[6] == 0
    whole = [n // unit * unit for n in (59, 60 - min(k, 1), 46, 30 - min(k, 1), 59 - min(k, 1), 50)]
    assert [hits[i] for i in (1, 2, 3, 4, 5, 7)] == whole


@pytest.mark.parametrize(
    ("shape", "k"),
    [("aligned", 0), ("aligned", 2), ("page 12", 0), ("page 12", 2), ("windows only", 2)],
)
def test_every_length_hits_as_far_as_it_can(shape: str, k: int) -> None:
    """B7, B8: prompts that end on, before and behind every edge of a page, a ratio and a window,
    sent again unchanged and with one token more."""
    llm = tiny_engine(SHAPES[shape], k)
    unit, base = unit_tokens(llm.plan), ids(34, 9)
    ask(llm, base, 1)
    for length in range(1, 34):
        prompt = base[:length]
        again = ask(llm, prompt, 3)
        assert again.hit_tokens == (length - 1) // unit * unit
        want = cold(shape, k, tuple(prompt), 3)
        assert again.tokens == want.tokens, length
        # The draft row of a boundary depends on the token behind it, which is another one now.
        forked = [*prompt, (base[length] + 1 - 2) % 62 + 2]
        got = ask(llm, forked, 3)
        at = length - (1 if k else 0)
        assert got.hit_tokens == at // unit * unit, length
        assert got.tokens == cold(shape, k, tuple(forked), 3).tokens, length


@pytest.mark.parametrize(("k", "overlap"), MODES)
def test_turns_of_a_conversation(k: int, overlap: bool) -> None:
    """Each prompt is the one before, its answer and new tokens: the answer is cached too."""
    llm = tiny_engine(k=k, overlap=overlap)
    unit, prompt = unit_tokens(llm.plan), ids(12)
    for turn in range(5):
        got, want = ask(llm, prompt, 11), cold("aligned", k, tuple(prompt), 11)
        assert got.tokens == want.tokens
        assert (got.rounds, got.accepted) == (want.rounds, want.accepted)
        if turn:
            known = len(prompt) - 7 - 1  # the newest token of the answer was never computed
            assert got.hit_tokens >= known // unit * unit - unit
            assert got.hit_tokens > 0
        prompt = [*prompt, *got.tokens, *ids(7, 20 + turn)]


@pytest.mark.parametrize("k", [0, 3])
def test_sampled_output_is_a_cold_run_s(k: int) -> None:
    prompt = ids(41)
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
    want = ask(tiny_engine(k=k, prefix_cache=False), prompt, params=params)
    llm = tiny_engine(k=k)
    assert ask(llm, prompt, params=params).tokens == want.tokens
    again = ask(llm, prompt, params=params)
    assert again.hit_tokens == 40
    assert again.tokens == want.tokens
    assert (again.rounds, again.accepted) == (want.rounds, want.accepted)


def test_requests_that_run_at_once_share_pages() -> None:
    llm = tiny_engine(k=2)
    base = ids(64)
    ask(llm, base, 1)
    alone = {g: pool.num_used for g, pool in llm.pages.pools.items()}
    assert not any(alone.values())
    for i in range(4):
        llm.add_request(str(i), [*base, 5 + i], SamplingParams(max_tokens=20, temperature=0.0))
    llm.step()
    kv = llm.pages.pools["csa_kv"]
    assert sum(len(names) > 1 for names in kv.holders().values()) == 63 // 8
    assert kv.num_used == 7 + 4 * 2  # what the hit brings, and two blocks of each one's own
    llm.check_integrity()
    while llm.has_unfinished():
        llm.step()
        llm.check_integrity()


def test_off_is_off() -> None:
    llm = tiny_engine(prefix_cache=False)
    ask(llm, ids(40))
    ask(llm, ids(40))
    assert "prefix_hit_tokens" not in llm.metrics
    assert all(pool.num_cached == 0 for pool in llm.pages.pools.values())


def test_units_are_no_coarser_than_the_largest_ratio_or_page() -> None:
    for tiny in SHAPES.values():
        plan = tiny_engine(tiny).plan
        unit = unit_tokens(plan)
        ratios = [g.closes_every for g in plan.groups]
        assert unit <= max(*ratios, *(g.page_tokens for g in plan.groups))
        assert all(unit % r == 0 for r in ratios)
        for g in plan.groups:
            assert g.carried_tokens <= max(g.span - 1, 0)


def test_other_weights_have_other_keys() -> None:
    """The salt tells specs and weights apart."""
    from v4graph.engine.prefix_salt import identity

    spec, plan = TINY.spec(), tiny_engine().plan
    first, second = random_params(spec, 1), random_params(spec, 2)
    assert identity(spec, plan, first) == identity(spec, plan, dict(first))
    assert identity(spec, plan, first) != identity(spec, plan, second)
    renamed = spec.model_copy(update={"norm_eps": 1e-5})
    assert identity(renamed, plan, first) != identity(spec, plan, first)
