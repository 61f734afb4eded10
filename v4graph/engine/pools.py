"""One page pool of a cache group: which pages are free, in use, or kept by the prefix cache."""

from __future__ import annotations

from v4graph.errors import V4GraphError
from v4graph.plan.types import GroupPlan


class IntegrityError(V4GraphError):
    """The page accounts contradict each other: a fault of the engine, never of a user."""


class PagePool:
    """Pages 1..num_pages-1 of one group; page 0 is the null page and is never handed out.

    A page has any number of holders (requests) and of references by the prefix cache; it is free
    when it has neither.
    """

    def __init__(self, group: GroupPlan) -> None:
        self.group = group
        # Taken from the end: page 1 first.
        self._free = list(range(group.num_pages - 1, 0, -1))
        self._holders: dict[int, set[str]] = {}
        self._cached: dict[int, int] = {}
        self._num_idle = 0

    @property
    def num_free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that requests hold."""
        return len(self._holders)

    @property
    def num_cached(self) -> int:
        """Pages that nothing but the prefix cache keeps: evicted when a request needs them."""
        return self._num_idle

    @property
    def num_available(self) -> int:
        """Pages that a request can have."""
        return len(self._free) + self._num_idle

    def take(self, holder: str) -> int:
        """Hand out a free page."""
        page = self._free.pop()
        if page in self._holders or page in self._cached:
            raise IntegrityError(f"{self.group.name}: page {page} handed out twice")
        self._holders[page] = {holder}
        return page

    def share(self, page: int, holder: str) -> None:
        """Let `holder` read a page that the prefix cache keeps."""
        if page not in self._cached:
            raise IntegrityError(
                f"{self.group.name}: {holder!r} shares page {page}, which is not cached"
            )
        if page not in self._holders:
            self._num_idle -= 1
        holders = self._holders.setdefault(page, set())
        if holder in holders:
            raise IntegrityError(f"{self.group.name}: {holder!r} holds page {page} twice")
        holders.add(holder)

    def give_back(self, page: int, holder: str) -> None:
        """Let go of a page; it is free again unless others hold it or the cache keeps it."""
        holders = self._holders.get(page, set())
        if holder not in holders:
            raise IntegrityError(
                f"{self.group.name}: {holder!r} frees page {page}, held by {sorted(holders)}"
            )
        holders.remove(holder)
        if holders:
            return
        del self._holders[page]
        if page in self._cached:
            self._num_idle += 1
        else:
            self._free.append(page)

    def keep(self, page: int) -> None:
        """One more reference by the prefix cache, to a page that somebody holds or it keeps."""
        if page not in self._cached and page not in self._holders:
            raise IntegrityError(f"{self.group.name}: page {page} is cached, but free")
        self._cached[page] = self._cached.get(page, 0) + 1

    def let_go(self, page: int) -> bool:
        """One reference less; True if the page is free now."""
        self._cached[page] -= 1
        if self._cached[page]:
            return False
        del self._cached[page]
        if page in self._holders:
            return False
        self._num_idle -= 1
        self._free.append(page)
        return True

    def is_held(self, page: int) -> bool:
        """Whether a request holds the page."""
        return page in self._holders

    def holders(self) -> dict[int, frozenset[str]]:
        """Who holds each page in use."""
        return {page: frozenset(names) for page, names in self._holders.items()}

    def check(self, cached: dict[int, int]) -> None:
        """Compare the account with itself and with the cache's own references.

        Args:
            cached: references of each page, counted by the cache.

        Raises:
            IntegrityError: a page free twice, free and in use, lost, or counted wrongly.
        """
        name, free = self.group.name, set(self._free)
        if cached != self._cached:
            raise IntegrityError(f"{name}: pages and the prefix cache disagree")
        if len(free) != len(self._free):
            raise IntegrityError(f"{name}: a page is free twice")
        idle = self._cached.keys() - self._holders.keys()
        if len(idle) != self._num_idle:
            raise IntegrityError(f"{name}: {self._num_idle} idle cached pages, counted {len(idle)}")
        if free & (self._holders.keys() | idle):
            raise IntegrityError(f"{name}: a page is both free and in use")
        if len(free) + len(idle) + len(self._holders) != self.group.num_pages - 1:
            raise IntegrityError(f"{name}: free, used and cached pages do not add up")
