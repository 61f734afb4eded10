"""The node tree to models, field by field, so that one fault does not hide another.

Pydantic judges each field; the walk is ours because a discriminated union or a model with a bad
field would otherwise say nothing about the rest. What parsed is kept: a model that lacks some
fields still answers for the others (`check.py` relies on it).
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from v4graph.spec.like import BLOCKS
from v4graph.spec.source import (
    BrokenNode,
    ListNode,
    MapNode,
    Node,
    Path,
    Problem,
    ScalarNode,
    Source,
    closest,
    did_you_mean,
    plain,
    scalar,
    shown,
)

MISSING: Any = object()
_STRICT = ConfigDict(strict=True)
_FAULTS = {
    "literal_error": "unknown value",
    "finite_number": "not a finite number",
    "string_pattern_mismatch": "not a valid name",
    "greater_than": "out of range",
    "greater_than_equal": "out of range",
    "less_than_equal": "out of range",
}
_NUMBER = re.compile(r"[-+]?[0-9][0-9_,]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?")
_SLIPS = {"True": "true", "False": "false", "yes": "true", "no": "false", "on": "true"}
_SLIPS |= {"off": "false", "Null": "null", "NULL": "null", "None": "null"}


def read(model: type[BaseModel], source: Source) -> tuple[Any, list[Problem]]:
    """Read the tree as `model`.

    Returns:
        A `model` without the fields that did not parse, and the faults of those.
    """
    reader = _Reader(source)
    return reader.model(model, source.root, ()), reader.problems


class _Reader:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems: list[Problem] = []

    def fail(self, path: Path, message: str, at_key: bool = False) -> Any:
        mark = self.source.locate(path, at_key)
        self.problems.append(Problem(mark, path, message))
        return MISSING

    def value(self, annotation: Any, node: Node, path: Path) -> Any:
        """The value of `node`, or MISSING once its fault is reported."""
        if isinstance(node, BrokenNode):
            return MISSING
        inner, metadata = _split(annotation)
        if _is_model(inner):
            return self.model(inner, node, path)
        variants = _variants(inner)
        if variants:
            return self.variant(variants, node, path)
        if isinstance(node, MapNode):
            models = [m for m in _members(inner) if _is_model(m)]
            if models:
                return self.model(models[0], node, path)
        origin = get_origin(inner)
        if origin is dict and isinstance(node, MapNode):
            item = get_args(inner)[1]
            read = {k: self.value(item, v, (*path, k)) for k, v in node.entries.items()}
            return {k: v for k, v in read.items() if v is not MISSING}
        if isinstance(node, ListNode):
            lists = [a for a in _members(inner) if get_origin(_split(a)[0]) is list]
            if lists:
                return self.items(lists[0], metadata, node, path)
        if isinstance(node, ScalarNode) and origin in (Union, types.UnionType):
            fitting = [a for a in _members(inner) if get_origin(_split(a)[0]) is not list]
            if len(fitting) < len(_members(inner)):
                # The list form is out; a lone remainder gives the sharper message.
                inner = fitting[0] if len(fitting) == 1 else Union[tuple(fitting)]  # noqa: UP007
                return self.leaf(inner, metadata, annotation, node, path)
        return self.leaf(inner, metadata, annotation, node, path)

    def leaf(
        self, inner: Any, metadata: Sequence[Any], annotation: Any, node: Node, path: Path
    ) -> Any:
        whole: Any = Annotated[(inner, *metadata)] if metadata else inner
        value = plain(node)
        try:
            return TypeAdapter(whole, config=_STRICT).validate_python(value)
        except ValidationError as fault:
            # Of a union the last branch is None, whose complaint helps nobody.
            kind = fault.errors(include_url=False)[0]["type"]
        expected = describe(annotation)
        message = f"{_FAULTS.get(kind, 'wrong type')} (got {shown(value)}; expected {expected})"
        return self.fail(path, message + _slip(value, whole))

    def items(self, annotation: Any, metadata: Sequence[Any], node: ListNode, path: Path) -> Any:
        inner, own = _split(annotation)
        item = get_args(inner)[0]
        out = [self.value(item, n, (*path, i)) for i, n in enumerate(node.items)]
        bounds = (*metadata, *own)
        if bounds:
            try:
                TypeAdapter(Annotated[(list[Any], *bounds)]).validate_python(plain(node))
            except ValidationError:
                expected = describe(Annotated[(inner, *bounds)])
                self.fail(path, f"too short (got {shown(plain(node))}; expected {expected})")
        # A faulty item keeps its place, so that the others keep their index.
        return [None if v is MISSING else v for v in out]

    def variant(self, variants: Mapping[str, type[BaseModel]], node: Node, path: Path) -> Any:
        if not isinstance(node, MapNode):
            kinds = ", ".join(variants)
            got = shown(plain(node))
            expected = f"a mapping with a `kind`: {kinds}"
            return self.fail(path, f"wrong type (got {got}; expected {expected})")
        kind = node.entries.get("kind")
        if isinstance(kind, BrokenNode) or (kind is None and node.incomplete):
            return MISSING
        if kind is None:
            hint = did_you_mean(next(iter(node.entries), None), ["kind", "like"])
            return self.fail((*path, "kind"), f"missing (expected {_one_of(list(variants))}){hint}")
        value = plain(kind)
        if isinstance(value, str) and value in variants:
            return self.model(variants[value], node, path, variants)
        expected = f"expected one of {', '.join(variants)}"
        likely = closest(value, variants)
        message = f"unknown kind (got {shown(value)}; {expected}){did_you_mean(value, variants)}"
        self.fail((*path, "kind"), message)
        # Read on as the kind that was probably meant, for the sake of the other fields.
        return self.model(variants[likely], node, path, variants, "kind") if likely else MISSING

    def model(
        self,
        cls: type[BaseModel],
        node: Node,
        path: Path,
        variants: Mapping[str, type[BaseModel]] | None = None,
        reported: str | None = None,
    ) -> Any:
        """A `cls` of what parsed; the field `reported` is known to be at fault."""
        if not isinstance(node, MapNode):
            expected = f"a mapping of {', '.join(cls.model_fields)}"
            return self.fail(path, f"wrong type (got {shown(plain(node))}; expected {expected})")
        fields = cls.model_fields
        values: dict[str, Any] = {}
        guessed = {
            self._unknown_key(cls, node, path, key, variants or {})
            for key in node.entries
            if key not in fields
        }
        excused = guessed | self._missing_in_base(node, variants or {})
        faulty = set()
        for name, info in fields.items():
            if name == reported:
                faulty.add(name)
            elif name in node.entries:
                value = self.value(_annotation(info), node.entries[name], (*path, name))
                if value is MISSING:
                    faulty.add(name)
                else:
                    values[name] = value
            elif info.is_required() and not node.incomplete and name not in excused:
                expected = describe(_annotation(info))
                self.fail((*path, name), f"missing (expected {expected})")
        out: Any = cls.model_construct(**values)
        for name in faulty:  # no default may stand in for a value that was given
            out.__dict__.pop(name, None)
        return out

    def _unknown_key(
        self,
        cls: type[BaseModel],
        node: MapNode,
        path: Path,
        key: str,
        variants: Mapping[str, type[BaseModel]],
    ) -> str | None:
        """Report `key`; return the field that was probably meant."""
        kind = next((k for k, c in variants.items() if c is cls), None)
        if key in node.inherited and node.base is not None:
            base_class = variants.get(str(plain(node.base).get("kind")))
            if base_class is not None and key in base_class.model_fields:
                message = f"inherits {key!r}, which kind {kind} does not have; set the keys here"
                self.problems.append(Problem(node.marks["like"], (*path, "like"), message))
            return None  # else the entry that sets it is at fault, and reported
        unset = [name for name in cls.model_fields if name not in node.entries]
        owners = [k for k, c in variants.items() if key in c.model_fields]
        likely = None
        if key == "like":
            hint = f"; `like` works in entries of {' and '.join(BLOCKS)} only"
        elif owners:
            hint = f"; only kind {' and '.join(owners)} has it"
        else:
            likely = closest(key, unset)
            hint = did_you_mean(key, unset) or did_you_mean(key, cls.model_fields)
        known = "" if hint else f" (expected one of {', '.join(cls.model_fields)})"
        self.fail((*path, key), f"unknown key{known}{hint}", at_key=True)
        return likely

    def _missing_in_base(self, node: MapNode, variants: Mapping[str, type[BaseModel]]) -> set[str]:
        """Keys that the entry named by `like` lacks itself: reported there, once."""
        if node.base is None:
            return set()
        base_class = variants.get(str(plain(node.base).get("kind")))
        fields = base_class.model_fields if base_class else {}
        return {k for k, f in fields.items() if f.is_required() and k not in node.base.entries}


def describe(annotation: Any) -> str:
    """What a field takes, in words: `an integer of at least 1`, `one of f32, bf16`."""
    inner, metadata = _split(annotation)
    if inner is type(None):
        return "null"
    if get_origin(inner) is Literal:
        return _one_of([str(a) for a in get_args(inner)])
    if _is_model(inner):
        return f"a mapping of {', '.join(inner.model_fields)}"
    variants = _variants(inner)
    if variants:
        return f"a mapping with a `kind`: {', '.join(variants)}"
    if get_origin(inner) in (Union, types.UnionType):
        return " or ".join(describe(a) for a in get_args(inner))
    if get_origin(inner) is list:
        return f"a {'non-empty ' if metadata else ''}list of {_plural(get_args(inner)[0])}"
    if get_origin(inner) is dict:
        return "a mapping of names"
    bounds = {k: getattr(m, k) for m in metadata for k in ("gt", "ge", "le") if hasattr(m, k)}
    if inner is int:
        low = bounds.get("ge", bounds.get("gt", 0) + 1 if "gt" in bounds else None)
        if low is not None and "le" in bounds:
            return f"an integer from {low} to {bounds['le']}"
        return "an integer" if low is None else f"an integer of at least {low}"
    if inner is float:
        return f"a number above {bounds['gt']}" if "gt" in bounds else "a number"
    if inner is bool:
        return "true or false"
    if any(getattr(m, "pattern", None) for m in metadata):
        return "a name of letters, digits, '.', '_' and '-'"
    return "a name"


def _one_of(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"one of {', '.join(values)}"


def _plural(annotation: Any) -> str:
    inner, _ = _split(annotation)
    if _is_model(inner):
        return f"mappings of {', '.join(inner.model_fields)}"
    return {int: "integers", str: "names"}.get(inner, "values")


def _slip(value: Any, annotation: Any) -> str:
    """A hint for a value that YAML 1.1 or another language would have read as meant."""
    if isinstance(value, float) and value.is_integer() and int in _members(_split(annotation)[0]):
        return f"; write {int(value)}"
    if not isinstance(value, str):
        return ""
    literals = [str(a) for a in get_args(annotation)] if get_origin(annotation) is Literal else []
    if literals:
        return did_you_mean(value, literals)
    inner, _ = _split(annotation)
    members = {_split(a)[0] for a in _members(inner)}
    meant = _SLIPS.get(value)
    if (meant in ("true", "false") and bool in members) or (
        meant == "null" and type(None) in members
    ):
        return f"; did you mean {meant}?"
    if members & {int, float} and _NUMBER.fullmatch(value) and len(value) < 20:
        if not isinstance(scalar(value), str):
            return f"; write {value} without quotes"
        # YAML 1.1 reads 1_000 as 1000, and 017 as 15 rather than the likelier 17.
        bare = re.sub(r"^([-+]?)0+(?=[0-9])", r"\1", value.replace("_", "").replace(",", ""))
        return f"; did you mean {bare}?"
    return ""


def _split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """An annotation without `Annotated`, and its constraints."""
    if get_origin(annotation) is not Annotated:
        return annotation, ()
    inner, *metadata = get_args(annotation)
    flat: list[Any] = []
    for m in metadata:
        flat += m.metadata if isinstance(m, FieldInfo) else [m]
    return inner, tuple(flat)


def _annotation(info: FieldInfo) -> Any:
    return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation


def _members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _variants(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models of a union by their `kind`; empty for anything else."""
    members = _members(annotation)
    if len(members) < 2 or not all(_is_model(m) for m in members):
        return {}
    return {get_args(m.model_fields["kind"].annotation)[0]: m for m in members}
