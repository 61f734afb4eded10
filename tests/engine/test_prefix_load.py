"""The prefix cache under load: full pools, aborts, preemptions, rejected drafts, random traffic."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.support.prefix import SHAPES, ask, ids, shrink, tiny_engine
from tests.support.speculation import greedy
from v4graph.engine.engine import LLMEngine
from v4graph.engine.request import Request, SamplingParams


@cache
def cold_engine() -> LLMEngine:
    return tiny_engine(prefix_cache=False, overlap=False)


@cache
def cold(prompt: tuple[int, ...], new: int) -> list[int]:
    """Plain decoding without a cache."""
    return ask(cold_engine(), prompt, new).tokens


def cached_rows(llm: LLMEngine) -> dict[tuple[str, str, int, int], Tensor]:
    """Every final row that the cache keeps, of every layer's pool, as bits."""
    prefix = llm.pages.prefix
    assert prefix is not None
    last: dict[tuple[str, int], int] = {}
    for node in prefix.nodes.values():
        end = (node.index + 1) * prefix.unit
        for pages in (node.history, node.carried or {}):
            for name, own in pages.items():
                size = llm.plan.group(name).page_tokens
                for block, page in own.items():
                    rows = min(end - block * size, size) // llm.plan.group(name).ratio
                    last[name, page] = max(last.get((name, page), 0), rows)
    out = {}
    for block, layer, role, name, pool in llm.programs.state.all_pools():
        pages = pool.unflatten(0, (-1, llm.plan.group(name).page_rows)).view(torch.int32)
        for (group, page), rows in last.items():
            if group == name:
                out[f"{block}.{layer.index}", role, page, rows] = pages[page, :rows].clone()
    return out


@pytest.mark.parametrize("k", [0, 3])
def test_cached_rows_are_never_written_again(k: int) -> None:
    """Nor moved: the rows of what stays in the cache are the same bits after others have used and
    continued them. Pages of 12 tokens are cut by units of 8, so some are copied."""
    llm = tiny_engine(SHAPES["page 12"], k, max_num_seqs=2)
    base = ids(56)
    ask(llm, base, 8)
    before = cached_rows(llm)
    assert before
    for cut in (20, 33, 40, 55):
        assert ask(llm, [*base[:cut], *ids(9, cut)], 12).hit_tokens > 0
    after = cached_rows(llm)
    same = [key for key in before if key in after]
    assert len(same) > len(before) // 2
    for key in same:
        assert torch.equal(before[key], after[key]), key


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts_are_never_published(overlap: bool) -> None:
    """Every key in the cache is one of a sequence that was committed, at every step; random weights
    make nearly every draft a wrong one."""
    llm = tiny_engine(k=4, overlap=overlap)
    prefix = llm.pages.prefix
    assert prefix is not None
    prompts = {str(n): ids(n, n) for n in (5, 14, 15, 30)}
    committed = {name: [*p, *cold(tuple(p), 30)] for name, p in prompts.items()}
    good: set[bytes] = set()
    for name, tokens in committed.items():
        whole = Request(name, tokens, len(tokens), SamplingParams(), 0, 0)
        good |= set(prefix._keys(whole, (len(tokens) - 1) // prefix.unit))
    for name, p in prompts.items():
        llm.add_request(name, p, greedy(30))
    while llm.has_unfinished():
        llm.step()
        llm.check_integrity()
        assert prefix.nodes.keys() <= good
        for r in llm.scheduler.running:
            known = r.num_tokens - prefix.ahead
            assert r.num_published_units * prefix.unit <= min(known, r.num_computed_tokens)
    assert llm.draft_counts.accepted < llm.draft_counts.drafts / 2
    # The last unit's row may wait for a token that never comes.
    assert len(good) - len(prefix.nodes) <= len(prompts)


@pytest.mark.parametrize("k", [0, 3])
def test_eviction_under_pressure(k: int) -> None:
    llm = tiny_engine(k=k, max_num_seqs=2, cached_boundaries=0)
    shrink(llm, 3)
    rng = random.Random(k)
    trunks = [ids(48, 100 + i) for i in range(4)]
    hits = 0
    for i in range(14):
        prompt = [*rng.choice(trunks)[: rng.randint(20, 48)], *ids(rng.randint(1, 12), i)]
        got = ask(llm, prompt, 5)
        assert got.tokens == cold(tuple(prompt), 5)
        hits += got.hit_tokens > 0
    assert llm.metrics["prefix_evicted_pages"] > 10
    assert hits > 1


def test_an_aborted_request_leaves_the_cache_intact() -> None:
    llm = tiny_engine(k=3)
    prompt = ids(57)
    llm.add_request("gone", prompt, greedy(30))
    for _ in range(5):
        llm.step()
    llm.abort("gone")
    llm.check_integrity()
    assert all(pool.num_used == 0 for pool in llm.pages.pools.values())
    got = ask(llm, prompt, 12)
    assert got.hit_tokens == 56
    assert got.tokens == cold(tuple(prompt), 12)
    queued = ids(20, 3)
    llm.add_request("never", queued, greedy(3))
    llm.abort("never")
    llm.check_integrity()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_a_preempted_request_hits_its_own_pages(k: int, overlap: bool) -> None:
    llm = tiny_engine(k=k, overlap=overlap)
    prompt = ids(44)
    llm.add_request("a", prompt, greedy(20))
    tokens: list[int] = []
    steps = 0
    while llm.has_unfinished():
        if steps in (8, 14):
            before = llm.metrics["prefix_hit_tokens"]
            llm.scheduler.preempt(llm.scheduler.running[0])
            llm.check_integrity()
        for out in llm.step():
            tokens += out.token_ids
        llm.check_integrity()
        steps += 1
        if steps in (11, 17):
            assert llm.metrics["prefix_hit_tokens"] >= before + 40
    assert tokens == cold(tuple(prompt), 20)
    assert llm.metrics["num_preemptions"] == 2


@pytest.mark.parametrize("seed", [1, 2])
def test_random_traffic(seed: int) -> None:
    """Forks of a few trunks, several at once, aborts, pools of little more than one sequence: every
    output is a cold run's, every account right after every step."""
    rng = random.Random(seed)
    llm = tiny_engine(
        k=(0, 3)[seed % 2], max_num_seqs=3, cached_boundaries=2, overlap=rng.random() < 0.7
    )
    shrink(llm, 6)
    trunks = [ids(40, 200 + i) for i in range(3)]
    wanted: dict[str, tuple[tuple[int, ...], int]] = {}
    got: dict[str, list[int]] = {}
    ended: set[str] = set()
    for step in range(260):
        if len(wanted) < 24 and rng.random() < 0.25:
            prompt = [*rng.choice(trunks)[: rng.randint(4, 40)], *ids(rng.randint(1, 9), step)]
            name = str(len(wanted))
            wanted[name] = (tuple(prompt), rng.randint(1, 16))
            got[name] = []
            llm.add_request(name, prompt, greedy(wanted[name][1]))
        if rng.random() < 0.03 and llm.scheduler.running:
            llm.abort(rng.choice(llm.scheduler.running).request_id)
        if rng.random() < 0.03 and llm.scheduler.running:
            llm.scheduler.preempt(rng.choice(llm.scheduler.running))
        for out in llm.step():
            got[out.request_id] += out.token_ids
            if out.finish_reason is not None:
                ended.add(out.request_id)
        llm.check_integrity()
    while llm.has_unfinished():
        for out in llm.step():
            got[out.request_id] += out.token_ids
            if out.finish_reason is not None:
                ended.add(out.request_id)
    llm.check_integrity()
    assert len(ended) > 12
    for name, (prompt, new) in wanted.items():
        want = cold(prompt, new)
        assert got[name] == (want if name in ended else want[: len(got[name])]), name
    assert llm.metrics["prefix_hit_tokens"] > 100
    assert llm.metrics["prefix_evicted_pages"] > 10


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_pools_are_used_to_the_last_page(k: int) -> None:
    """Pools of one full sequence, overlap, sequences that grow to the end of the context: they take
    turns by preemption, the last page is in use at some time, and nothing fails."""
    longest = 56
    llm = tiny_engine(k=k, max_num_seqs=4, max_model_len=longest, overlap=True, cached_boundaries=0)
    shrink(llm, 2)
    prompts = {str(n): ids(n, n) for n in (7, 12, 15)}
    for name, p in prompts.items():
        llm.add_request(name, p, greedy(longest))
    got: dict[str, list[int]] = {name: [] for name in prompts}
    fullest = dict.fromkeys(llm.pages.pools, 1 << 30)
    while llm.has_unfinished():
        for out in llm.step():
            got[out.request_id] += out.token_ids
        for name, pool in llm.pages.pools.items():
            fullest[name] = min(fullest[name], pool.num_available)
        if llm.metrics["num_steps"] % 5 == 0:
            llm.check_integrity()
    llm.check_integrity()
    for name, p in prompts.items():
        assert len(p) + len(got[name]) == longest
        assert got[name] == cold(tuple(p), longest - len(p))
    assert llm.metrics["num_preemptions"] > 0
    assert min(fullest.values()) == 0
