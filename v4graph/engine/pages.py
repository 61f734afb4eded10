"""Page ownership: one free list per cache group and the block-to-page map of every request."""

from __future__ import annotations

from collections.abc import Callable

from v4graph.engine.request import Request
from v4graph.errors import V4GraphError
from v4graph.plan.types import NULL_PAGE, GroupPlan, Plan
from v4graph.program.table import RequestTable


class IntegrityError(V4GraphError):
    """The page accounts contradict each other: a fault of the engine, never of a user."""


class PagePool:
    """Pages 1..num_pages-1 of one group; page 0 is the null page and is never handed out."""

    def __init__(self, group: GroupPlan) -> None:
        self.group = group
        # Taken from the end: page 1 first.
        self._free = list(range(group.num_pages - 1, 0, -1))
        self._owner: dict[int, str] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages in use."""
        return len(self._owner)

    def take(self, owner: str) -> int:
        """Hand out a free page to `owner`."""
        page = self._free.pop()
        if page in self._owner:
            raise IntegrityError(f"{self.group.name}: page {page} handed out twice")
        self._owner[page] = owner
        return page

    def give_back(self, page: int, owner: str) -> None:
        """Free a page of `owner`."""
        if self._owner.get(page) != owner:
            raise IntegrityError(
                f"{self.group.name}: {owner!r} frees page {page}, owned by "
                f"{self._owner.get(page)!r}"
            )
        del self._owner[page]
        self._free.append(page)

    def owners(self) -> dict[int, str]:
        """Owner of every page in use."""
        return dict(self._owner)


class PageManager:
    """Gives requests the pages that a step needs and takes back what no later step can read."""

    def __init__(
        self,
        plan: Plan,
        table: RequestTable,
        poison: Callable[[str, list[int]], None] | None = None,
    ) -> None:
        """`poison` is called with (group, pages) whenever pages are handed out (checked mode)."""
        self.plan, self.table, self._poison = plan, table, poison
        self.pools = {g.name: PagePool(g) for g in plan.groups}

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
        """Whether every group has the pages."""
        return all(self.pools[name].num_free >= len(blocks) for name, blocks in missing.items())

    def allocate(self, request: Request, missing: dict[str, list[int]]) -> None:
        """Take the pages and write them into the request's block tables."""
        entries: dict[str, dict[int, int]] = {}
        for name, blocks in missing.items():
            if not blocks:
                continue
            pool, width = self.pools[name], self.pools[name].group.table_width
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
        """Compare owners, requests and block tables.

        Raises:
            IntegrityError: a page leaked, shared, owned by no running request, or a block-table
                entry that differs from the request's own map.
        """
        for name, pool in self.pools.items():
            claimed: dict[int, str] = {}
            for r in running:
                for block, page in r.pages.get(name, {}).items():
                    if page in claimed:
                        raise IntegrityError(f"{name}: page {page} held twice")
                    claimed[page] = r.request_id
                    column = block % pool.group.table_width
                    entry = int(self.table.block_tables[name][r.slot, column])
                    if entry != page:
                        raise IntegrityError(
                            f"{name}: table of {r.request_id!r} has page {entry} for block "
                            f"{block}, expected {page}"
                        )
            if claimed != pool.owners():
                raise IntegrityError(f"{name}: owners and requests disagree")
            if pool.num_free + pool.num_used != pool.group.num_pages - 1:
                raise IntegrityError(f"{name}: free and used pages do not add up")
