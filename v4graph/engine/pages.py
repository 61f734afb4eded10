"""Pages of requests: which blocks a step needs, and the block-to-page map of every request."""

from __future__ import annotations

from collections.abc import Callable

from v4graph.engine.pools import IntegrityError, PagePool
from v4graph.engine.prefix import Hit, PrefixCache
from v4graph.engine.request import Request
from v4graph.plan.types import NULL_PAGE, Plan
from v4graph.program.table import RequestTable


class PageManager:
    """Gives requests the pages that a step needs and takes back what no later step can read."""

    def __init__(
        self,
        plan: Plan,
        table: RequestTable,
        poison: Callable[[str, list[int]], None] | None = None,
        *,
        salt: bytes | None = None,
        copy: Callable[[str, list[tuple[int, int]]], None] | None = None,
    ) -> None:
        """`poison` is called with (group, pages) whenever pages are handed out (checked mode).

        A `salt` turns the prefix cache on; `copy` then copies pages (from, to) of a group.
        """
        self.plan, self.table, self._poison = plan, table, poison
        self.pools = {g.name: PagePool(g) for g in plan.groups}
        self._copy = copy
        self.prefix = None if salt is None else PrefixCache(plan, self.pools, salt)

    def missing(self, request: Request, num_tokens: int) -> dict[str, list[int]]:
        """Blocks, by group, that a step of `num_tokens` tokens needs beyond those held.

        They reach from the oldest row that it may read to the last that it may write: accepted
        drafts that the host has not read yet and the guesses of drafting count.
        """
        first = request.num_computed_tokens
        end = first + request.num_unread_drafts + num_tokens
        out = {}
        for g in self.plan.groups:
            begin = max(first - g.kept_tokens + 1, 0) if g.kept_tokens else 0
            last = min(end + g.draft_ahead, self.plan.max_model_len) - 1
            held = request.pages.get(g.name, {})
            blocks = range(begin // g.page_tokens, last // g.page_tokens + 1)
            out[g.name] = [b for b in blocks if b not in held]
        return out

    def can_allocate(self, missing: dict[str, list[int]]) -> bool:
        """Whether every group has the pages, cached ones that nobody uses included."""
        return all(
            self.pools[name].num_available >= len(blocks) for name, blocks in missing.items()
        )

    def allocate(self, request: Request, missing: dict[str, list[int]]) -> None:
        """Take the pages and write them into the request's block tables."""
        entries: dict[str, dict[int, int]] = {}
        for name, blocks in missing.items():
            if not blocks:
                continue
            pool, width = self.pools[name], self.pools[name].group.table_width
            if self.prefix is not None and pool.num_free < len(blocks):
                self.prefix.evict(name, len(blocks))
            pages = [pool.take(request.request_id) for _ in blocks]
            if self._poison is not None:
                self._poison(name, pages)
            request.pages.setdefault(name, {}).update(zip(blocks, pages, strict=True))
            columns = [b % width for b in blocks]
            entries[name] = dict(zip(columns, pages, strict=True))
        self.table.set_pages(request.slot, entries)

    def free_unreadable(self, request: Request) -> None:
        """Free pages of sliding groups whose rows lie before every later query's range."""
        for g in self.plan.groups:
            if not g.kept_tokens:
                continue
            held = request.pages.get(g.name, {})
            oldest = (request.num_computed_tokens - g.kept_tokens + 1) // g.page_tokens
            gone = [b for b in held if b < oldest]
            for block in gone:
                self.pools[g.name].give_back(held.pop(block), request.request_id)
            if gone and self._poison is not None:
                # Else a row that nobody placed would go to a page that others may own by now.
                live = {b % g.table_width for b in held}
                columns = {b % g.table_width for b in gone} - live
                self.table.set_pages(request.slot, {g.name: dict.fromkeys(columns, NULL_PAGE)})

    def free_all(self, request: Request) -> None:
        """Free everything that the request holds."""
        for name, held in request.pages.items():
            for page in held.values():
                self.pools[name].give_back(page, request.request_id)
        request.pages = {}

    # The prefix cache --------------------------------------------------------------------------

    def find_prefix(self, request: Request) -> Hit | None:
        """The longest cached prefix of a request's tokens."""
        return None if self.prefix is None else self.prefix.find(request)

    def pin(self, request: Request, hit: Hit) -> None:
        """Give a waiting request the pages of a cached prefix; none is evicted from now on.

        Pages that the prefix fills are the request's at once; of the others it gets copies, once it
        has pages for them (`enter`).
        """
        for name, own in hit.whole.items():
            for page in own.values():
                self.pools[name].share(page, request.request_id)
            request.pages.setdefault(name, {}).update(own)
        for name, own in hit.partial.items():
            for page in own.values():
                self.pools[name].share(page, request.request_id)
        request.num_computed_tokens = hit.num_tokens

    def unpin(self, request: Request, hit: Hit) -> None:
        """Undo `pin`."""
        self._give_back_partial(request, hit)
        self.free_all(request)
        request.num_computed_tokens = 0

    def enter(self, request: Request, hit: Hit | None) -> None:
        """After `allocate` on admission: fill in what a hit brought along."""
        if self.prefix is None:
            return
        self.prefix.count(request, hit)
        if hit is None:
            return
        for name, own in hit.partial.items():
            pairs = [(page, request.pages[name][block]) for block, page in own.items()]
            assert self._copy is not None  # noqa: S101 (comes with the cache)
            self._copy(name, pairs)
        self._give_back_partial(request, hit)
        entries = {
            name: {b % self.pools[name].group.table_width: page for b, page in own.items()}
            for name, own in hit.whole.items()
        }
        self.table.set_pages(request.slot, entries)
        request.num_published_units = hit.num_tokens // self.prefix.unit

    def _give_back_partial(self, request: Request, hit: Hit) -> None:
        for name, own in hit.partial.items():
            for page in own.values():
                self.pools[name].give_back(page, request.request_id)

    def publish(self, request: Request, ended: bool = False) -> None:
        """Offer a running request's final pages to the prefix cache."""
        if self.prefix is not None and request.slot:
            self.prefix.publish(request, ended)

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a request of this length could run with the pools to itself."""
        behind = self.plan.speculation.verify_width + self.plan.unknown_tokens
        return all(
            g.kept_tokens
            or g.num_pages - 1
            >= g.pages_for(min(num_tokens + behind + g.draft_ahead, self.plan.max_model_len))
            for g in self.plan.groups
        )

    def check_integrity(self, running: list[Request]) -> None:
        """Compare pools, requests, block tables and the prefix cache.

        Raises:
            IntegrityError: a page leaked, held by no running request, shared while somebody may
                still write to it, or a block-table entry that differs from the request's own map.
        """
        cached = {} if self.prefix is None else self.prefix.references()
        if self.prefix is not None:
            self.prefix.check()
        for name, pool in self.pools.items():
            claimed: dict[int, dict[str, tuple[int, Request]]] = {}
            for r in running:
                for block, page in r.pages.get(name, {}).items():
                    holders = claimed.setdefault(page, {})
                    if r.request_id in holders:
                        raise IntegrityError(f"{name}: page {page} held twice")
                    holders[r.request_id] = block, r
                    column = block % pool.group.table_width
                    entry = int(self.table.block_tables[name][r.slot, column])
                    if entry != page:
                        raise IntegrityError(
                            f"{name}: table of {r.request_id!r} has page {entry} for block "
                            f"{block}, expected {page}"
                        )
            if {page: frozenset(own) for page, own in claimed.items()} != pool.holders():
                raise IntegrityError(f"{name}: holders and requests disagree")
            for page, own in claimed.items():
                if len(own) > 1:
                    self._check_shared(name, page, list(own.values()))
            pool.check(cached.get(name, {}))

    def _check_shared(self, name: str, page: int, holders: list[tuple[int, Request]]) -> None:
        """All see the same block in it, and all have computed it to its end."""
        size = self.pools[name].group.page_tokens
        blocks = {block for block, _ in holders}
        if len(blocks) > 1 or any((b + 1) * size > r.num_computed_tokens for b, r in holders):
            raise IntegrityError(
                f"{name}: page {page} is shared by {[r.request_id for _, r in holders]} as blocks "
                f"{sorted(blocks)}, and not by all as a finished one"
            )
