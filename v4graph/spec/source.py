"""YAML text to a tree of nodes with positions. Strict where YAML would guess.

A spec uses a small part of YAML: one document of mappings, lists and scalars. Scalars follow YAML
1.2: only `true` and `false` are booleans, `1e-5` is a number, `017` and `1_000` are text. PyYAML
gives the events; the tree is built here, because its composer recurses and drops equal keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeAlias

import yaml

MAX_BYTES = 128 * 1024
MAX_DEPTH = 16
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_KEY = re.compile(r"[\w<-]+")
_WORDS: dict[str, Any] = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "false": False,
    ".inf": float("inf"),
    "-.inf": float("-inf"),
    ".nan": float("nan"),
}
_NO_ANCHORS = "anchors and aliases are not supported; write the values out, or use `like`"
_YAML_HINTS = {
    "mapping values are not allowed here": "a second ':' on this line; quote the value, or check "
    "the indentation",
    "could not find expected ':'": "expected ':' after a key",
    "expected <block end>, but found '<block mapping start>'": "this line is indented further "
    "than the keys beside it",
    "expected the node content, but found '-'": "a list item needs a line of its own",
}


class Mark(NamedTuple):
    """A place in the text, counted from 1."""

    line: int
    column: int


Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, order=True)
class Problem:
    """One fault of a spec."""

    mark: Mark
    path: Path
    message: str

    def render(self, file: str) -> str:
        """The line `file:line:col: path: message`."""
        where = f"{file}:{self.mark.line}:{self.mark.column}: "
        return where + (f"{path_text(self.path)}: " if self.path else "") + self.message


@dataclass(eq=False)
class ScalarNode:
    mark: Mark
    value: str | int | float | bool | None


@dataclass(eq=False)
class ListNode:
    mark: Mark
    items: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class MapNode:
    mark: Mark
    entries: dict[str, Node] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)
    """Where each key stands; an inherited key stands in the entry that it came from."""
    base: MapNode | None = None
    """The entry named by `like`."""
    inherited: frozenset[str] = frozenset()
    incomplete: bool = False
    """A fault already reported (a bad `like`) may be why keys are missing."""


@dataclass(eq=False)
class BrokenNode:
    """A value whose fault is already reported."""

    mark: Mark


Node: TypeAlias = ScalarNode | ListNode | MapNode | BrokenNode


class UnreadableText(Exception):
    """The text ends in a fault after which nothing can be said about the rest."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems)
        self.problems = problems


@dataclass
class Source:
    """A parsed text: its tree and the faults of its YAML."""

    root: MapNode
    problems: list[Problem]

    def locate(self, path: Path, at_key: bool = False) -> Mark:
        """Where a reader should look: a scalar itself, the key of anything else.

        A path that leaves the tree gives the last place on it, e.g. the entry that lacks a key.
        """
        node: Node = self.root
        mark = node.mark
        for part in path:
            if isinstance(node, MapNode) and isinstance(part, str) and part in node.entries:
                mark, node = node.marks[part], node.entries[part]
            elif isinstance(node, ListNode) and isinstance(part, int) and part < len(node.items):
                node = node.items[part]
                mark = node.mark
            else:
                return mark
        return node.mark if isinstance(node, ScalarNode) and not at_key else mark


def path_text(path: Path) -> str:
    """`("layers", 0, "ffn")` as `layers[0].ffn`."""
    keys = (f"[{p}]" if isinstance(p, int) else f".{_bare(p)}" for p in path)
    return "".join(keys).lstrip(".")


def _bare(key: str) -> str:
    return key if _KEY.fullmatch(key) else shown(key)


def shown(value: Any) -> str:
    """A value as a message quotes it: short, on one line, in YAML's words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 60 else text[:56] + "..."


def did_you_mean(word: Any, candidates: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing without a close match."""
    match = closest(word, candidates)
    return f"; did you mean {match!r}?" if match is not None else ""


def closest(word: Any, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` is most likely a slip of; None if no one is close."""
    if not isinstance(word, str) or len(word) > 100:
        return None
    by_lower = {c.lower(): c for c in candidates}
    match = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[match[0]] if match else None


def plain(node: Node) -> Any:
    """The tree without its positions."""
    if isinstance(node, MapNode):
        return {key: plain(value) for key, value in node.entries.items()}
    if isinstance(node, ListNode):
        return [plain(item) for item in node.items]
    return node.value if isinstance(node, ScalarNode) else None


def parse(text: str) -> Source:
    """Build the tree of a text.

    Raises:
        UnreadableText: the text is empty, not YAML, several documents, or no mapping at the top.
    """
    tree = _Tree()
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise UnreadableText([Problem(Mark(1, 1), (), f"too large for a spec: {_LIMIT}")])
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(text)
        while loader.check_event():
            tree.feed(loader.get_event())
    except yaml.reader.ReaderError as fault:
        before = text[: fault.position]
        mark = Mark(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
        message = f"character U+{ord(text[fault.position]):04X} is not allowed in YAML"
        raise UnreadableText([*tree.problems, Problem(mark, (), message)]) from None
    except yaml.MarkedYAMLError as fault:
        problem = _syntax_problem(fault, text)
        raise UnreadableText([*tree.problems, problem]) from None
    except (ValueError, OverflowError) as fault:
        # PyYAML passes escapes such as "\U99999999" to chr() unchecked.
        mark = _mark(loader.get_mark()) if loader else Mark(1, 1)
        problem = Problem(mark, (), f"not YAML: {fault}")
        raise UnreadableText([*tree.problems, problem]) from None
    root = tree.root
    if root is None or (isinstance(root, ScalarNode) and root.value is None):
        tree.fail(Mark(1, 1), "empty (expected a mapping that begins with `name:`)")
    if not isinstance(root, MapNode):
        found = "a list" if isinstance(root, ListNode) else "a single value"
        tree.fail(root.mark if root else Mark(1, 1), f"the top is {found} (expected a mapping)")
    return Source(root, tree.problems)


_LIMIT = f"more than {MAX_BYTES // 1024} KiB"


def _mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1)


def _syntax_problem(fault: yaml.MarkedYAMLError, text: str) -> Problem:
    at = fault.problem_mark or fault.context_mark
    if at is None:
        return Problem(Mark(1, 1), (), f"not YAML: {fault.problem}")
    if text[at.index : at.index + 1] == "\t":
        return Problem(_mark(at), (), "a tab; YAML takes only spaces here")
    message = f"not YAML: {_YAML_HINTS.get(fault.problem or '', fault.problem)}"
    began = fault.context_mark
    if fault.context and began is not None and began.line != at.line:
        message += f" ({fault.context}, which began at line {began.line + 1})"
    return Problem(_mark(at), (), message)


def scalar(text: str) -> str | int | float | bool | None:
    """An unquoted scalar by the rules of YAML 1.2, without its octal and hexadecimal forms."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        # int() refuses thousands of digits with an exception of its own.
        return int(text) if len(text) <= 20 else float(text)
    return float(text) if _FLOAT.fullmatch(text) else text


@dataclass(eq=False)
class _Open:
    """A collection that is still being read."""

    node: ListNode | MapNode
    key: str | None = None
    """The last key read."""
    waiting: bool = False
    """Its value comes next."""
    dropped: bool = False
    """The key is at fault, so its value is read but not kept."""


class _Tree:
    """Builds the tree from events, without recursion."""

    def __init__(self) -> None:
        self.root: Node | None = None
        self.problems: list[Problem] = []
        self._stack: list[_Open] = []

    def fail(self, mark: Mark, message: str) -> NoReturn:
        """Give up at `mark`."""
        raise UnreadableText([*self.problems, Problem(mark, self._path(), message)])

    def feed(self, event: Any) -> None:
        if isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            self.fail(_mark(event.start_mark), "a second document (expected one spec a file)")
        if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._stack.pop()
        if not isinstance(event, yaml.NodeEvent):
            return
        mark = _mark(event.start_mark)
        top = self._stack[-1] if self._stack else None
        if top is not None and isinstance(top.node, MapNode) and not top.waiting:
            self._take_key(top, top.node, event, mark)
            return
        node = self._node(event, mark)
        self._place(node)
        if isinstance(node, ListNode | MapNode):
            if len(self._stack) >= MAX_DEPTH:
                self.fail(mark, f"nested deeper than {MAX_DEPTH} levels")
            self._stack.append(_Open(node))

    def _take_key(self, top: _Open, node: MapNode, event: Any, mark: Mark) -> None:
        if not isinstance(event, yaml.ScalarEvent):
            what = "an alias" if isinstance(event, yaml.AliasEvent) else "a collection"
            self.fail(mark, f"a key is {what} (expected a name)")
        self._refuse_decoration(event, mark)
        value = event.value if event.style else scalar(event.value)
        top.key, top.waiting, top.dropped = str(event.value), False, True
        if top.key == "<<" and not event.style:
            self._add(mark, "merge keys are not supported; use `like` or write the values out")
        elif not isinstance(value, str):
            self._add(mark, f"a key is not a name (got {shown(value)}; expected text)")
        elif top.key in node.marks:
            first = node.marks[top.key]
            message = f"duplicate key {shown(top.key)}; first at {first.line}:{first.column}"
            self._add(mark, message)
        else:
            top.dropped = False
            node.marks[top.key] = mark
        top.waiting = True

    def _node(self, event: Any, mark: Mark) -> Node:
        refused = self._refuse_decoration(event, mark)
        if isinstance(event, yaml.MappingStartEvent):
            return MapNode(mark)
        if isinstance(event, yaml.SequenceStartEvent):
            return ListNode(mark)
        if refused:
            return BrokenNode(mark)
        value = event.value if event.style else scalar(event.value)
        if isinstance(value, int | float) and _INT.fullmatch(event.value) and abs(value) >= 2**63:
            self._add(mark, f"too large a number (got {shown(event.value)}; expected 64 bits)")
            return BrokenNode(mark)
        return ScalarNode(mark, value)

    def _refuse_decoration(self, event: Any, mark: Mark) -> bool:
        """Report an alias or a tag, whose value is lost, or an anchor, whose value is not."""
        alias = isinstance(event, yaml.AliasEvent)
        if alias or event.anchor is not None:
            self._add(mark, _NO_ANCHORS)
        tag = None if alias else event.tag
        if tag is not None:
            tag = tag.replace("tag:yaml.org,2002:", "!!")
            self._add(mark, f"tags are not supported (got {shown(tag)})")
        return alias or tag is not None

    def _place(self, node: Node) -> None:
        if not self._stack:
            self.root = node
            return
        top = self._stack[-1]
        if isinstance(top.node, ListNode):
            top.node.items.append(node)
        elif top.key is not None:
            if not top.dropped:
                top.node.entries[top.key] = node
            top.waiting = False

    def _add(self, mark: Mark, message: str) -> None:
        self.problems.append(Problem(mark, self._path(), message))

    def _path(self) -> Path:
        """Path of the value, or the key, that is being read."""
        out: list[str | int] = []
        for depth, level in enumerate(self._stack):
            inside = depth + 1 < len(self._stack)  # the child is already in the list
            if isinstance(level.node, ListNode):
                out.append(len(level.node.items) - inside)
            elif level.key is not None:
                out.append(level.key)
        return tuple(out)
