"""Page accounts: an allocator fuzz, ranges that stay mapped, and what the checks refuse."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.support.tiny import Tiny, with_pages
from tests.support.world import SMALL
from v4graph.engine.pages import PageManager
from v4graph.engine.pools import IntegrityError, PagePool
from v4graph.engine.request import Request, SamplingParams
from v4graph.plan.lower import lower
from v4graph.plan.types import Limits, Plan
from v4graph.program.table import RequestTable

OPERATIONS = 10_000


def plan_of(tiny: Tiny = SMALL, **limits: int) -> Plan:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 160} | limits
    return lower(tiny.spec(), Limits(**sizes, speculative="none"))


def manager(plan: Plan) -> PageManager:
    return PageManager(plan, RequestTable(plan, SMALL.vocab, torch.device("cpu")))


def request(number: int, slot: int) -> Request:
    new = Request(f"r{number}", [2], 1, SamplingParams(), 0, number)
    new.slot = slot
    return new


def assert_sound(pages: PageManager, live: list[Request]) -> None:
    """The invariants, stated apart from `check_integrity`."""
    pages.check_integrity(live)
    for name, pool in pages.pools.items():
        free, holders = pool._free, pool.holders()
        assert len(free) == len(set(free)), "a page is free twice"
        assert not set(free) & holders.keys()
        assert set(free) | holders.keys() == set(range(1, pool.group.num_pages))
        assert all(len(names) == 1 for names in holders.values())
        held = [p for r in live for p in r.pages.get(name, {}).values()]
        assert len(held) == len(set(held)) == len(holders)
        assert 0 not in held


def assert_readable(pages: PageManager, r: Request) -> None:
    """B16, B25: every row that the next query may list is mapped, in the table as well."""
    for g in pages.plan.groups:
        last = r.num_computed_tokens - 1
        first = max(r.num_computed_tokens - g.span + 1, 0) if g.kept_tokens else 0
        for position in range(first, last + 1):
            block = position // g.page_tokens
            page = r.pages[g.name][block]
            assert int(pages.table.block_tables[g.name][r.slot, block % g.table_width]) == page


def assert_mapped_to(pages: PageManager, r: Request, end: int) -> None:
    """Every row that a round may write is mapped, draft rows behind its tokens included."""
    for g in pages.plan.groups:
        last = min(end + g.draft_ahead, pages.plan.max_model_len) - 1
        assert last // g.page_tokens in r.pages[g.name], g.name


def test_ten_thousand_operations() -> None:
    """B17, B20: advance, free and drop in any order, with pools that run out."""
    rng = random.Random(3)
    plan = plan_of(max_num_seqs=6)
    pages = manager(plan)
    for pool in pages.pools.values():  # room for two or three of the six
        keep = min(pool.num_free, 2 * pool.group.pages_per_seq + 1)
        del pool._free[: pool.num_free - keep]
        pool.group = replace(pool.group, num_pages=keep + 1)
    live: list[Request] = []
    slots = list(range(6, 0, -1))
    count = refused = wrapped = 0
    for operation in range(OPERATIONS):
        if len(live) < 6 and rng.random() < 0.2:
            count += 1
            live.append(request(count, slots.pop()))
        if not live:
            continue
        r = rng.choice(live)
        if rng.random() < 0.06 or r.num_computed_tokens >= plan.max_model_len:
            pages.free_all(r)
            pages.table.release(r.slot)
            slots.append(r.slot)
            live.remove(r)
            continue
        tokens = min(rng.choice((1, 1, 1, 7, 32)), plan.max_model_len - r.num_computed_tokens)
        missing = pages.missing(r, tokens)
        if not pages.can_allocate(missing):
            refused += 1
            continue
        pages.allocate(r, missing)
        assert not any(pages.missing(r, tokens).values())
        r.num_computed_tokens += tokens
        pages.free_unreadable(r)
        wrapped = max(wrapped, r.num_computed_tokens)
        if operation % 10 == 0:
            assert_readable(pages, r)
        if operation % 50 == 0:
            assert_sound(pages, live)
    assert refused > 100
    assert wrapped == plan.max_model_len
    for r in live:
        pages.free_all(r)
    assert_sound(pages, [])
    assert all(pool.num_used == 0 for pool in pages.pools.values())


@pytest.mark.parametrize("page_tokens", [4, 8, 16, 64])
@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_the_kept_range_covers_every_read(page_tokens: int, chunk: int) -> None:
    plan = plan_of(with_pages(SMALL, page_tokens))
    pages = manager(plan)
    r = request(1, 1)
    while r.num_computed_tokens + chunk <= plan.max_model_len:
        pages.allocate(r, pages.missing(r, chunk))
        # In flight: each of the chunk's queries sees its own range.
        for g in plan.groups:
            first = r.num_computed_tokens - g.span + 1 if g.kept_tokens else 0
            blocks = range(
                max(first, 0) // g.page_tokens, r.num_computed_tokens // g.page_tokens + 1
            )
            assert set(blocks) <= r.pages[g.name].keys()
            assert r.pages[g.name].keys() >= {(r.num_computed_tokens + chunk - 1) // g.page_tokens}
            columns = [b % g.table_width for b in r.pages[g.name]]
            assert len(columns) == len(set(columns)), "two blocks share a column"
            assert len(columns) <= g.pages_per_seq
        r.num_computed_tokens += chunk
        pages.free_unreadable(r)
        assert_readable(pages, r)
    for g in plan.groups:
        if g.kept_tokens:  # no more than the range and the page that it begins in
            assert len(r.pages[g.name]) <= g.touched_pages(g.kept_tokens)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
def test_rejected_drafts_lose_no_row(drafts: int, overlap: bool) -> None:
    """R3: setting the length back by up to k tokens finds every earlier row still mapped.

    With overlap a round is placed while up to k accepted tokens of the last are unknown.
    """
    spec = replace(SMALL, page_tokens=4).spec()
    plan = lower(
        spec,
        Limits(
            max_num_seqs=1,
            max_num_batched_tokens=16,
            max_model_len=128,
            speculative="mtp" if drafts else "none",
            num_draft_tokens=drafts,
            overlap=overlap,
        ),
    )
    pages = manager(plan)
    r, rng, width = request(1, 1), random.Random(drafts), drafts + 1
    unread: int | None = None
    while r.num_computed_tokens + 2 * width <= 128:
        pages.allocate(r, pages.missing(r, width))
        assert_mapped_to(pages, r, r.num_computed_tokens + r.num_unread_drafts + width)
        r.num_computed_tokens += 1
        r.num_unread_drafts += drafts
        if overlap and unread is None:
            unread = rng.randint(0, drafts)
            continue
        accepted = rng.randint(0, drafts) if unread is None else unread
        unread = rng.randint(0, drafts) if overlap else None
        r.num_computed_tokens += accepted
        r.num_unread_drafts -= drafts
        pages.free_unreadable(r)
        assert_readable(pages, r)
        assert_sound(pages, [r])


def test_every_sequence_at_its_longest_fits_the_default_pools() -> None:
    """B22, B24: what the plan promises is what can be allocated."""
    for page_tokens in (8, 16):
        for longest in (63, 64, 65, 160):
            plan = plan_of(with_pages(SMALL, page_tokens), max_model_len=longest)
            pages = manager(plan)
            live = [request(i, i) for i in range(1, 5)]
            for start in range(0, longest, 8):
                for r in live:  # a step's tokens are shared: 4 x 8
                    count = min(8, longest - start)
                    missing = pages.missing(r, count)
                    assert pages.can_allocate(missing), (longest, start)
                    pages.allocate(r, missing)
                for r in live:
                    r.num_computed_tokens += min(8, longest - start)
                    pages.free_unreadable(r)
            assert_sound(pages, live)
            for g in plan.groups:
                if not g.kept_tokens:
                    used = pages.pools[g.name].num_used
                    assert used == 4 * g.pages_for(longest)
                    assert used >= 0.9 * (g.num_pages - 1)


def test_a_group_that_runs_out_is_told_before_anything_is_taken() -> None:
    plan = plan_of()
    for name in [g.name for g in plan.groups]:
        pages = manager(plan)
        pages.pools[name]._free.clear()
        r = request(1, 1)
        assert not pages.can_allocate(pages.missing(r, 1))
        assert r.pages == {}
        assert all(pool.num_used == 0 for pool in pages.pools.values())


def test_new_pages_are_poisoned_by_group() -> None:
    """B28: groups page independently; their page ids differ."""
    plan = plan_of()
    seen: dict[str, list[int]] = {}
    table = RequestTable(plan, SMALL.vocab, torch.device("cpu"))
    pages = PageManager(plan, table, lambda group, ids: seen.setdefault(group, []).extend(ids))
    r = request(1, 1)
    pages.allocate(r, pages.missing(r, 32))
    assert seen == {name: list(held.values()) for name, held in r.pages.items()}
    assert len({tuple(ids) for ids in seen.values()}) > 1


def corrupt_column(pages: PageManager, r: Request) -> None:
    pages.table.block_tables["csa_kv"][r.slot, 0] += 1


def corrupt_leak(pages: PageManager, r: Request) -> None:
    r.pages["hca_kv"].popitem()


def corrupt_share(pages: PageManager, r: Request) -> None:
    held = r.pages["csa_kv"]
    held[1] = held[0]
    pages.table.block_tables["csa_kv"][r.slot, 1] = held[0]


def corrupt_lost(pages: PageManager, r: Request) -> None:
    pages.pools["window"]._free.pop()


def corrupt_holder(pages: PageManager, r: Request) -> None:
    page = next(iter(r.pages["window"].values()))
    pages.pools["window"]._holders[page] = {"somebody else"}


def corrupt_cached(pages: PageManager, r: Request) -> None:
    pages.pools["window"].keep(next(iter(r.pages["window"].values())))


@pytest.mark.parametrize(
    "corrupt",
    [
        corrupt_column,
        corrupt_leak,
        corrupt_share,
        corrupt_lost,
        corrupt_holder,
        corrupt_cached,
    ],
)
def test_integrity_faults_are_found(corrupt: object) -> None:
    pages = manager(plan_of())
    r = request(1, 1)
    pages.allocate(r, pages.missing(r, 20))
    pages.check_integrity([r])
    corrupt(pages, r)  # type: ignore[operator]
    with pytest.raises(IntegrityError):
        pages.check_integrity([r])


def test_a_pool_refuses_contradictions() -> None:
    pool = PagePool(plan_of().group("csa_kv"))
    page = pool.take("a")
    assert page == 1
    with pytest.raises(IntegrityError, match=r"'b' frees page 1, held by \['a'\]"):
        pool.give_back(page, "b")
    with pytest.raises(IntegrityError, match="'b' shares page 1, which is not cached"):
        pool.share(page, "b")
    pool.give_back(page, "a")
    with pytest.raises(IntegrityError, match=r"held by \[\]"):
        pool.give_back(page, "a")
    with pytest.raises(IntegrityError, match="page 1 is cached, but free"):
        pool.keep(page)
    pool.take("a")
    pool._free.append(page)
    with pytest.raises(IntegrityError, match="handed out twice"):
        pool.take("b")


def test_a_cached_page_outlives_its_requests() -> None:
    pool = PagePool(plan_of().group("csa_kv"))
    all_pages = pool.num_free
    page = pool.take("a")
    pool.keep(page)
    pool.keep(page)
    assert (pool.num_used, pool.num_cached, pool.num_available) == (1, 0, all_pages - 1)
    pool.share(page, "b")
    with pytest.raises(IntegrityError, match="'b' holds page 1 twice"):
        pool.share(page, "b")
    pool.give_back(page, "a")
    assert pool.num_used == 1
    pool.give_back(page, "b")
    assert (pool.num_used, pool.num_cached, pool.num_available) == (0, 1, all_pages)
    pool.check({page: 2})
    assert not pool.let_go(page)
    assert pool.let_go(page)
    assert (pool.num_free, pool.num_cached) == (all_pages, 0)
    pool.check({})


def test_releasing_a_slot_points_its_tables_at_the_null_page() -> None:
    pages = manager(plan_of())
    r = request(1, 3)
    pages.allocate(r, pages.missing(r, 32))
    assert all((table[3] != 0).any() for table in pages.table.block_tables.values())
    pages.free_all(r)
    pages.table.release(3)
    assert all((table == 0).all() for table in pages.table.block_tables.values())
    assert all((values[3] == 0) for values in pages.table.scalars.values())
