"""What the prefix cache keeps and gives up, on page accounts alone; and v4-nano's rounds."""

from __future__ import annotations

import pytest
import torch

from tests.support import nano
from tests.support.prefix import TINY, ask, ids
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.pages import PageManager
from v4graph.engine.pools import IntegrityError
from v4graph.engine.prefix import PrefixCache
from v4graph.engine.request import Request, SamplingParams
from v4graph.errors import PlanError
from v4graph.plan.lower import lower
from v4graph.plan.types import Limits
from v4graph.program.table import RequestTable

UNIT = 8


class Pages:
    """A page manager with a cache, and requests that are computed by decree."""

    def __init__(self, boundaries: int = 8, speculative: str = "none") -> None:
        limits = Limits(
            max_num_seqs=2,
            max_num_batched_tokens=16,
            max_model_len=96,
            cached_boundaries=boundaries,
            speculative=speculative,
        )
        plan = lower(TINY.spec(), limits)
        table = RequestTable(plan, TINY.vocab, torch.device("cpu"))
        self.manager = PageManager(plan, table, salt=b"x", copy=lambda group, pages: None)
        assert self.manager.prefix is not None
        self.cache: PrefixCache = self.manager.prefix
        self.count = 0

    def run(self, tokens: list[int]) -> int:
        """Admit, compute in chunks of 8, publish and end a request; tokens of its hit."""
        r, m = self.request(tokens), self.manager
        hit = m.find_prefix(r)
        if hit is not None:
            m.pin(r, hit)
        r.slot = 1
        while r.num_computed_tokens < len(tokens) or not r.pages:
            count = min(8, len(tokens) - r.num_computed_tokens)
            missing = m.missing(r, count)
            assert m.can_allocate(missing)
            m.allocate(r, missing)
            if hit is not None:
                m.enter(r, hit)
            found, hit = (hit.num_tokens if hit else 0), None
            self.hit = max(self.hit, found) if r.num_computed_tokens > found else found
            r.num_computed_tokens += count
            m.publish(r, r.num_computed_tokens == len(tokens))
            m.free_unreadable(r)
            m.check_integrity([r])
        m.free_all(r)
        m.table.release(1)
        m.check_integrity([])
        return self.hit

    hit = 0

    def request(self, tokens: list[int]) -> Request:
        self.count += 1
        return Request(str(self.count), tokens, len(tokens), SamplingParams(), 0, self.count)

    def cached(self, tokens: list[int]) -> int:
        """Tokens that a prompt would find."""
        hit = self.cache.find(self.request(tokens))
        return hit.num_tokens if hit else 0


def test_history_is_evicted_leaf_first_and_oldest_first() -> None:
    pages = Pages()
    old, new = ids(41, 1), ids(41, 2)
    pages.run(old)
    pages.run(new)
    depth = [n.index for n in pages.cache.nodes.values()]
    assert sorted(depth) == sorted([*range(5), *range(5)])
    pool = pages.manager.pools["csa_kv"]
    for left in (4, 3, 2, 1, 0):
        pages.cache.evict("csa_kv", pool.num_free + 1)
        keys = pages.cache._keys(pages.request(old), 5)
        assert [k in pages.cache.nodes for k in keys] == [i < left for i in range(5)]
        assert pages.cached(new) == 40
        pages.manager.check_integrity([])


def test_a_use_makes_a_sequence_young_again() -> None:
    pages = Pages()
    first, second = ids(41, 1), ids(41, 2)
    pages.run(first)
    pages.run(second)
    pages.run([*first, 5])
    pool = pages.manager.pools["csa_kv"]
    pages.cache.evict("csa_kv", pool.num_free + 5)
    assert pages.cached(first) == 40
    assert pages.cached(second) == 0


def test_ends_and_forks_outlive_what_lies_between() -> None:
    pages = Pages(boundaries=4)
    trunk = ids(48, 1)
    pages.run([*trunk, *ids(8, 2)])
    pool = pages.manager.pools["window"]
    pages.run([*trunk[:24], *ids(9, 3)])
    fork = pages.cache.nodes[pages.cache._keys(pages.request(trunk), 3)[-1]]
    assert fork.worth == 1
    worth = {n.key: n.worth for n in pages.cache.nodes.values() if n.carried is not None}
    between = sum(not w for w in worth.values())
    assert between
    pages.cache.evict("window", pool.num_free + between)
    left = {n.key for n in pages.cache.nodes.values() if n.carried is not None}
    assert left == {key for key, w in worth.items() if w}
    assert pages.cached([*trunk[:24], 3]) == 24


def test_a_boundary_without_its_windows_is_no_place_to_start() -> None:
    pages = Pages()
    tokens = ids(41, 1)
    pages.run(tokens)
    node = pages.cache.nodes[pages.cache._keys(pages.request(tokens), 5)[-1]]
    pages.cache._drop_carried(node)
    assert pages.cached(tokens) == 32
    pages.hit = 0
    assert pages.run(tokens) == 32
    assert pages.cached(tokens) == 40  # computed again, it is one again


def test_what_is_pinned_is_not_evicted() -> None:
    pages = Pages()
    tokens = ids(41, 1)
    pages.run(tokens)
    r, m = pages.request(tokens), pages.manager
    hit = m.find_prefix(r)
    assert hit is not None
    m.pin(r, hit)
    before = {g: dict(own) for g, own in hit.whole.items()}
    for name, pool in m.pools.items():
        with pytest.raises(IntegrityError, match="cannot be evicted"):
            pages.cache.evict(name, pool.num_available + 1)
    assert r.pages == before
    assert all(m.pools[g].is_held(p) for g, own in before.items() for p in own.values())
    m.unpin(r, hit)
    m.check_integrity([])
    assert all(pool.num_used == 0 for pool in m.pools.values())


def test_keys_depend_on_all_tokens_before_and_on_the_salt() -> None:
    pages = Pages()
    cache = pages.cache
    tokens = ids(40, 1)
    keys = cache._keys(pages.request(tokens), 5)
    for place in (0, 7, 8, 39):
        changed = list(tokens)
        changed[place] = (changed[place] + 1) % 64
        others = cache._keys(pages.request(changed), 5)
        assert [a == b for a, b in zip(keys, others, strict=True)] == [
            i < place // UNIT for i in range(5)
        ]
    other = PrefixCache(pages.manager.plan, pages.manager.pools, b"y")
    assert not set(other._keys(pages.request(tokens), 5)) & set(keys)


def test_with_draft_layers_a_key_covers_the_next_token() -> None:
    pages = Pages(speculative="mtp")
    tokens = ids(41, 1)
    keys = pages.cache._keys(pages.request(tokens), 5)
    changed = [*tokens[:16], (tokens[16] + 1) % 64, *tokens[17:]]
    others = pages.cache._keys(pages.request(changed), 5)
    assert [a == b for a, b in zip(keys, others, strict=True)] == [True, False, False, False, False]


def test_clear_gives_everything_back() -> None:
    pages = Pages()
    pages.run(ids(41, 1))
    pages.cache.clear()
    pages.manager.check_integrity([])
    assert all(p.num_free == p.group.num_pages - 1 for p in pages.manager.pools.values())
    assert pages.cached(ids(41, 1)) == 0


def test_boundaries_take_at_most_an_eighth_of_given_memory() -> None:
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 96}
    plain = lower(TINY.spec(), Limits(**limits))
    memory = 2 * sum(g.num_pages * g.page_bytes for g in plain.groups)
    plan = lower(TINY.spec(), Limits(**limits, kv_memory_bytes=memory, cached_boundaries=10_000))
    more = sum(
        (plan.group(g.name).num_pages - g.num_pages) * g.page_bytes
        for g in plain.groups
        if g.kept_tokens
    )
    assert 0 < more <= memory // 8
    assert sum(g.num_pages * g.page_bytes for g in plan.groups) <= memory
    with pytest.raises(PlanError, match="cached_boundaries -1: expected 0 or more"):
        lower(TINY.spec(), Limits(**limits, cached_boundaries=-1))


@pytest.mark.parametrize("overlap", [False, True])
def test_v4_nano_accepts_the_same_drafts_after_a_hit(overlap: bool) -> None:
    """Trained weights accept drafts: a hit brings the draft layer's right rows."""

    def engine(prefix_cache: bool) -> LLMEngine:
        config = EngineConfig(
            max_num_seqs=2,
            max_num_batched_tokens=96,
            max_model_len=256,
            compile=False,
            checked=True,
            device="cpu",
            overlap=overlap,
            prefix_cache=prefix_cache,
        )
        return LLMEngine.from_params(nano.spec(), dict(nano.params()), config)

    cold, warm = engine(False), engine(True)
    accepted = 0
    for prompt in nano.prompts(130, 193):
        for p, hit in ((prompt, 0), (prompt, 128), ([*prompt[:129], *prompt[:20]], 128)):
            if len(prompt) == 193 and hit and len(p) == 193:
                hit = 192
            want, got = ask(cold, p, 16), ask(warm, p, 16)
            assert got.hit_tokens == hit
            assert (got.tokens, got.rounds, got.accepted) == (
                want.tokens,
                want.rounds,
                want.accepted,
            )
            accepted += got.accepted
    assert accepted > 10
