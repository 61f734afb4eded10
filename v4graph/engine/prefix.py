"""The prefix cache: pages of every cache group, found again by the tokens that made them.

A sequence is cut into *units* of equal length. A unit's key is a hash over its parent's key and its
tokens, so that equal keys mean equal histories; a `Node` says in which pages the unit's rows lie.
A request may start behind any unit whose node still has *carried* pages: the rows before that
boundary which later tokens read from groups that slide (windows, draft layers' ones included, and
states of compression windows that stay open). Rows of history groups are in the nodes up to it.

An MTP layer's row depends on its own token and the next one; a key then covers the first token
behind its unit too.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import lcm

from v4graph.engine.pools import IntegrityError, PagePool
from v4graph.engine.request import Request
from v4graph.plan.types import GroupPlan, Plan

Pages = dict[str, dict[int, int]]
"""Page of each block (absolute block index) by group."""


def unit_tokens(plan: Plan) -> int:
    """Tokens of a unit: whole compression windows, and where these are short as many as fill the
    smallest page; state pages, which are small, do not count."""
    windows = lcm(*(g.closes_every for g in plan.groups))
    pages = [g.page_tokens for g in plan.groups if g.kind != "compressor_state"]
    return windows * max(min(pages) // windows, 1)


@dataclass(eq=False)
class Node:
    """One unit of a cached sequence."""

    key: bytes
    parent: Node | None
    index: int
    """Units before it."""
    number: int
    """Serial number; breaks ties between nodes used at the same time."""
    history: Pages
    """Pages of history groups that the unit lies in."""
    used: int
    carried: Pages | None = None
    """Pages of sliding groups that a request which starts behind the unit reads; None if they are
    not cached (any more)."""
    carried_used: int = 0
    worth: int = 0
    """1 where sequences probably start: a prompt's end, a fork, an earlier hit; 0 in between."""
    num_children: int = 0


@dataclass(frozen=True)
class Hit:
    """A cached prefix."""

    node: Node
    num_tokens: int
    whole: Pages
    """Pages that a request shares: it never writes to them."""
    partial: Pages
    """Pages that end behind the prefix: a request needs a copy of its own."""


@dataclass(eq=False)
class _Queue:
    """Nodes in the order of `stamp`: (worth, time of last use), None for one that has left."""

    stamp: Callable[[Node], tuple[int, int] | None]
    heap: list[tuple[tuple[int, int], int, Node]] = field(default_factory=list)

    def push(self, node: Node) -> None:
        """Add a node, or note that its stamp has changed."""
        stamp = self.stamp(node)
        if stamp is not None:
            heapq.heappush(self.heap, (stamp, node.number, node))

    def pop(self) -> Node | None:
        """Take out the node with the smallest stamp; None if there is none."""
        while self.heap:
            stamp, _, node = heapq.heappop(self.heap)
            if self.stamp(node) == stamp:
                return node
        return None

    def compact(self, num_nodes: int) -> None:
        """Forget outdated entries once they are in the majority."""
        if len(self.heap) > 2 * num_nodes + 64:
            kept = {n: (stamp, num, n) for stamp, num, n in self.heap if self.stamp(n) == stamp}
            self.heap = list(kept.values())
            heapq.heapify(self.heap)


class PrefixCache:
    """Nodes by key, and the pages that they keep in the pools."""

    def __init__(self, plan: Plan, pools: Mapping[str, PagePool], salt: bytes) -> None:
        """`salt` tells models apart: other weights make other rows from the same tokens."""
        self._pools = pools
        self._history = [g for g in plan.groups if not g.kept_tokens]
        self._sliding = [g for g in plan.groups if g.kept_tokens]
        self._root = hashlib.sha256(salt).digest()
        self._clock = self._count = 0
        self._leaves = _Queue(self._leaf_stamp)
        self._carried = _Queue(self._carried_stamp)
        self.unit = unit_tokens(plan)
        self.ahead = plan.speculation.tokens_ahead
        """Tokens behind a unit that its rows depend on."""
        self.nodes: dict[bytes, Node] = {}
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_evicted_pages = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Tokens of admitted requests and those that hits brought; pages freed by eviction."""
        return {
            "prefix_query_tokens": self.num_query_tokens,
            "prefix_hit_tokens": self.num_hit_tokens,
            "prefix_evicted_pages": self.num_evicted_pages,
        }

    # Lookup ------------------------------------------------------------------------------------

    def find(self, request: Request) -> Hit | None:
        """The longest cached prefix that leaves at least one token to prefill."""
        known = max(request.num_tokens - self.ahead, 0)
        keys = self._keys(request, min(request.num_prefill_tokens - 1, known) // self.unit)
        chain: list[Node] = []
        for key in keys:
            node = self.nodes.get(key)
            if node is None:
                break
            chain.append(node)
        while chain and chain[-1].carried is None:
            chain.pop()
        if not chain:
            return None
        pages: Pages = {}
        for node in chain:  # a later unit's page holds the earlier rows of the same block too
            for name, own in node.history.items():
                pages.setdefault(name, {}).update(own)
        pages |= chain[-1].carried or {}
        num_tokens = len(chain) * self.unit
        whole: Pages = {}
        partial: Pages = {}
        for name, own in pages.items():
            size = self._pools[name].group.page_tokens
            for block, page in own.items():
                kind = whole if (block + 1) * size <= num_tokens else partial
                kind.setdefault(name, {})[block] = page
        return Hit(chain[-1], num_tokens, whole, partial)

    def count(self, request: Request, hit: Hit | None) -> None:
        """Note that a request has been admitted with `hit`."""
        self.num_query_tokens += request.num_tokens
        if hit is None:
            return
        self.num_hit_tokens += hit.num_tokens
        self._clock += 1
        node: Node | None = hit.node
        while node is not None:
            node.used = self._clock
            node = node.parent
        hit.node.carried_used = self._clock
        self._leaves.push(hit.node)
        self._promote(hit.node)

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """Keys of the request's first units, as many as were ever asked for, at least `count`."""
        keys, unit = request.unit_keys, self.unit
        while len(keys) < count:
            start = len(keys) * unit
            tokens = request.token_ids[start : start + unit + self.ahead]
            parent = keys[-1] if keys else self._root
            keys.append(hashlib.sha256(parent + struct.pack(f"<{len(tokens)}q", *tokens)).digest())
        return keys[:count]

    # Publishing --------------------------------------------------------------------------------

    def publish(self, request: Request, ended: bool = False) -> None:
        """Keep the pages of the request's units that are final.

        Final are rows of tokens that surely are (or by a launched step will be) computed, and whose
        tokens, the `ahead` ones included, the host has read: a draft never counts.

        Args:
            ended: the request has all of its tokens; others are likely to go on from here.
        """
        known = max(request.num_tokens - self.ahead, 0)
        end = min(request.num_computed_tokens, known) // self.unit
        if end > request.num_published_units:
            self._publish_units(request, end)
        last = self.nodes.get(self._keys(request, end)[-1]) if ended and end else None
        if last is not None:
            self._promote(last)

    def _publish_units(self, request: Request, end: int) -> None:
        start, keys = request.num_published_units, self._keys(request, end)
        while start and keys[start - 1] not in self.nodes:
            start -= 1  # evicted meanwhile; the request still holds its history
        parent = self.nodes[keys[start - 1]] if start else None
        prompt_end = (request.num_prompt_tokens - 1) // self.unit
        self._clock += 1
        for index in range(start, end):
            node = self.nodes.get(keys[index])
            if node is None:
                if parent is not None and parent.num_children:
                    self._promote(parent)  # a fork: what follows differs, others may follow too
                node = self._add(keys[index], parent, index, request)
            if node.carried is None:
                self._carry(node, request)
            if index + 1 == prompt_end:
                self._promote(node)
            parent = node
        request.num_published_units = end
        self._leaves.compact(len(self.nodes))
        self._carried.compact(len(self.nodes))

    def _promote(self, node: Node) -> None:
        node.worth = 1
        self._carried.push(node)

    def _add(self, key: bytes, parent: Node | None, index: int, request: Request) -> Node:
        history: Pages = {}
        for g in self._history:
            blocks = self._blocks(g, index * self.unit, (index + 1) * self.unit)
            history[g.name] = {b: request.pages[g.name][b] for b in blocks}
        self._count += 1
        node = Node(key, parent, index, self._count, history, self._clock)
        self._keep(history)
        if parent is not None:
            parent.num_children += 1
        self.nodes[key] = node
        self._leaves.push(node)
        return node

    def _carry(self, node: Node, request: Request) -> None:
        """Keep the sliding pages behind a node, if the request still holds all of them."""
        end = (node.index + 1) * self.unit
        carried: Pages = {}
        for g in self._sliding:
            blocks = self._blocks(g, max(end - g.carried_tokens, 0), end)
            held = request.pages.get(g.name, {})
            if any(b not in held for b in blocks):
                return
            carried[g.name] = {b: held[b] for b in blocks}
        self._keep(carried)
        node.carried, node.carried_used = carried, self._clock
        self._carried.push(node)

    def _keep(self, pages: Pages) -> None:
        for name, own in pages.items():
            for page in own.values():
                self._pools[name].keep(page)

    @staticmethod
    def _blocks(group: GroupPlan, begin: int, end: int) -> range:
        """Blocks that the tokens `begin..end - 1` lie in."""
        return range(begin // group.page_tokens, -(-end // group.page_tokens) if end > begin else 0)

    # Eviction ----------------------------------------------------------------------------------

    def evict(self, group: str, count: int) -> None:
        """Free cached pages of a group until `count` are free, least recently used first.

        History goes leaf by leaf, so that what is left of a sequence is always a prefix of it;
        what a sliding group needs back takes single boundaries.

        Raises:
            IntegrityError: there are not that many; ask `PagePool.num_available` before.
        """
        pool = self._pools[group]
        history = not pool.group.kept_tokens
        queue = self._leaves if history else self._carried
        remove = self._remove_leaf if history else self._drop_carried
        aside: list[Node] = []
        try:
            while pool.num_free < count:
                node = queue.pop()
                if node is None:
                    # In use all over, but behind these lie pages that nobody uses.
                    live = [n for n in aside if queue.stamp(n) is not None]
                    if not live:
                        raise IntegrityError(f"{group}: {count} pages cannot be evicted")
                    aside = live[1:]
                    remove(live[0])
                elif self._idle(node, group, history):
                    remove(node)
                else:
                    aside.append(node)
        finally:
            for node in aside:
                queue.push(node)

    def _idle(self, node: Node, group: str, history: bool) -> bool:
        """Whether some page of the node in this group is used by no request."""
        pages = node.history if history else node.carried or {}
        return any(not self._pools[group].is_held(p) for p in pages[group].values())

    def _remove_leaf(self, node: Node) -> None:
        self._let_go(node.carried or {})
        node.carried = None
        self._let_go(node.history)
        del self.nodes[node.key]
        if node.parent is not None:
            node.parent.num_children -= 1
            self._leaves.push(node.parent)

    def _drop_carried(self, node: Node) -> None:
        self._let_go(node.carried or {})
        node.carried = None
        # Without history, a node that nothing can start or go on from is good for nothing.
        last: Node | None = node
        while last and not self._history and last.carried is None and not last.num_children:
            self._remove_leaf(last)
            last = last.parent

    def _let_go(self, pages: Pages) -> None:
        for name, own in pages.items():
            freed = [self._pools[name].let_go(page) for page in own.values()]
            self.num_evicted_pages += sum(freed)

    def clear(self) -> None:
        """Forget everything; pages that requests hold stay theirs."""
        for node in self.nodes.values():
            self._let_go(node.history)
            self._let_go(node.carried or {})
            node.carried = None
        self.nodes = {}

    def _leaf_stamp(self, node: Node) -> tuple[int, int] | None:
        leaf = not node.num_children and self.nodes.get(node.key) is node
        return (0, node.used) if leaf and self._history else None

    def _carried_stamp(self, node: Node) -> tuple[int, int] | None:
        return None if node.carried is None else (node.worth, node.carried_used)

    # Integrity ---------------------------------------------------------------------------------

    def references(self) -> dict[str, dict[int, int]]:
        """Nodes that keep each page, by group, counted anew."""
        out: dict[str, Counter[int]] = {name: Counter() for name in self._pools}
        for name, page in self._all_pages():
            out[name][page] += 1
        return {name: dict(counts) for name, counts in out.items()}

    def _all_pages(self) -> Iterator[tuple[str, int]]:
        for node in self.nodes.values():
            for pages in (node.history, node.carried or {}):
                for name, own in pages.items():
                    for page in own.values():
                        yield name, page

    def check(self) -> None:
        """Compare the tree with itself.

        Raises:
            IntegrityError: a node without its parent, or a wrong number of children.
        """
        children: Counter[bytes] = Counter()
        for node in self.nodes.values():
            parent = node.parent
            if (parent is None) != (node.index == 0):
                raise IntegrityError(f"prefix cache: unit {node.index} has the wrong parent")
            if parent is not None:
                if self.nodes.get(parent.key) is not parent or parent.index != node.index - 1:
                    raise IntegrityError(f"prefix cache: unit {node.index} has lost its parent")
                children[parent.key] += 1
        for node in self.nodes.values():
            if node.num_children != children[node.key]:
                raise IntegrityError(
                    f"prefix cache: unit {node.index} counts {node.num_children} children, has "
                    f"{children[node.key]}"
                )
