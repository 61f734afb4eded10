"""`like: NAME` in entries of `attention` and `ffn`: the keys of the named entry, unless set."""

from __future__ import annotations

from v4graph.spec.source import (
    BrokenNode,
    MapNode,
    Path,
    Problem,
    ScalarNode,
    Source,
    did_you_mean,
    plain,
    shown,
)

BLOCKS = ("attention", "ffn")


def resolve_likes(source: Source) -> list[Problem]:
    """Fill in, in place, what entries inherit; return the faulty `like`s.

    The copy is shallow: a key that the entry sets replaces the whole inherited value. Inherited
    nodes are shared, so that they keep the position of the line that sets them.
    """
    problems: list[Problem] = []
    for block in BLOCKS:
        node = source.root.entries.get(block)
        if isinstance(node, MapNode):
            _Resolver(source, block, node, problems).run()
    return problems


class _Resolver:
    def __init__(self, source: Source, block: str, node: MapNode, problems: list[Problem]) -> None:
        self.source, self.block, self.problems = source, block, problems
        self.entries = node.entries
        self.done: set[str] = set()

    def run(self) -> None:
        for name in self.entries:
            chain: list[str] = []
            # Walk to the end of the chain, then fill in from there: no recursion.
            at: str | None = name
            while at is not None and at not in self.done:
                if at in chain:
                    self._refuse_circle(chain[chain.index(at) :])
                    break
                chain.append(at)
                at = self._base_of(at)
            for link in reversed(chain):
                self._inherit(link)

    def _base_of(self, name: str) -> str | None:
        entry = self.entries[name]
        like = entry.entries.get("like") if isinstance(entry, MapNode) else None
        if isinstance(like, ScalarNode) and like.value in self.entries:
            return str(like.value)
        return None

    def _inherit(self, name: str) -> None:
        entry = self.entries[name]
        if name in self.done:
            return
        self.done.add(name)
        if not isinstance(entry, MapNode) or "like" not in entry.entries:
            return
        base = self.entries.get(self._base_of(name) or "")
        like = entry.entries.pop("like")
        if isinstance(base, MapNode) and base is not entry:
            entry.base = base
            entry.incomplete = base.incomplete
            new = {k: v for k, v in base.entries.items() if k not in entry.entries}
            entry.inherited = frozenset(new)
            entry.entries = {**new, **entry.entries}
            entry.marks = {**{k: base.marks[k] for k in new}, **entry.marks}
            return
        entry.incomplete = True
        if base is None and not isinstance(like, BrokenNode):
            value = plain(like)
            others = [other for other in self.entries if other != name]
            names = f"expected one of {', '.join(others)}" if others else "there is no other entry"
            hint = did_you_mean(value, others)
            path = (self.block, name, "like")
            mark = like.mark if isinstance(like, ScalarNode) else entry.marks["like"]
            message = f"no such {self.block} entry (got {shown(value)}; {names}){hint}"
            self.problems.append(Problem(mark, path, message))

    def _refuse_circle(self, circle: list[str]) -> None:
        path: Path = (self.block, circle[0], "like")
        text = " -> ".join([*circle, circle[0]])
        self.problems.append(Problem(self.source.locate(path), path, f"a circle: {text}"))
        for name in circle:
            entry = self.entries[name]
            if isinstance(entry, MapNode):
                entry.entries.pop("like", None)
                entry.incomplete = True
            self.done.add(name)
