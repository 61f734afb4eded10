"""Write an imported spec as YAML that a person would have written, with its sources as comments."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from v4graph.spec.hf_config import ImportedSpec

_WIDTH = 100
_BARE = re.compile(r"^[A-Za-z_][A-Za-z0-9_-]*$")
_RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


def to_yaml(imported: ImportedSpec, origin: str) -> str:
    """The YAML text of `imported`; `origin` says in its first line where it came from."""
    lines = _comment(
        f"Imported by `v4graph import` from {origin}. The comment above a block names the keys of "
        "config.json, or the tensors, that its values come from."
    )
    for note in imported.notes:
        lines += _comment(f"Note: {note}.")
    for key, value in imported.data.items():
        if key in imported.sources:
            lines += _comment(imported.sources[key])
        lines += _entry(key, value, 0)
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False
    )


def _entry(key: str, value: Any, indent: int) -> Iterator[str]:
    pad = " " * indent
    line = f"{pad}{_scalar(key)}: {_flow(value)}"
    nested = isinstance(value, Mapping) and any(isinstance(v, Mapping) for v in value.values())
    if isinstance(value, list) and any(isinstance(v, Mapping) for v in value):
        yield f"{pad}{_scalar(key)}:"
        for item in value:
            yield f"{pad}  - {_flow(item)}"
    elif isinstance(value, Mapping) and (len(line) > _WIDTH or (nested and indent == 0)):
        yield f"{pad}{_scalar(key)}:"
        for inner, inner_value in value.items():
            yield from _entry(inner, inner_value, indent + 2)
    else:
        yield line


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(k)}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(v) for v in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float):
        text = repr(value)
        # YAML 1.1 reads `1e-06` as a string: a mantissa needs its point.
        mantissa, mark, exponent = text.partition("e")
        if not mark:
            return text
        return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+d}"
    if _BARE.match(value) and value.lower() not in _RESERVED:
        return value
    return json.dumps(value)
