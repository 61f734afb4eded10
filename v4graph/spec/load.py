"""From the name of a shipped spec, a YAML file or a YAML text to a checked `ModelSpec`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from v4graph.errors import SpecError
from v4graph.spec.check import BLOCKS, Names, check
from v4graph.spec.like import BLOCKS as LIKE_BLOCKS
from v4graph.spec.like import resolve_likes
from v4graph.spec.model import ModelSpec
from v4graph.spec.read import read
from v4graph.spec.source import (
    MAX_BYTES,
    MapNode,
    Problem,
    UnreadableText,
    did_you_mean,
    parse,
    plain,
    shown,
)
from v4graph.words import counted

MAX_SHOWN = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SUFFIXES = (".yaml", ".yml")


def load_spec(name_or_path: str | Path) -> ModelSpec:
    """Load a shipped spec by name, or a spec file by path.

    Raises:
        SpecError: no such spec, or a file with faults; the message lists every fault.
    """
    path = spec_path(name_or_path)
    shown_path = _relative(path) if _is_name(name_or_path) else str(name_or_path)
    if not shown_path.isprintable() or not shown_path:
        shown_path = ascii(shown_path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)  # bounded, for a path may name a device
    except (OSError, ValueError) as fault:
        hint = ""
        if isinstance(fault, FileNotFoundError) and path.stem in shipped_specs():
            hint = f"; did you mean the shipped spec {path.stem!r}?"
        raise SpecError(f"{shown_path}: cannot be read: {_reason(fault)}{hint}") from None
    if len(raw) > MAX_BYTES:
        raise SpecError(f"{shown_path}: more than {MAX_BYTES // 1024} KiB; not a spec")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        line = raw.count(b"\n", 0, fault.start) + 1
        raise SpecError(
            f"{shown_path}:{line}: not UTF-8 text: byte 0x{raw[fault.start]:02x}"
        ) from None
    return load_spec_text(text, shown_path)


def load_spec_text(text: str, file: str = "<text>") -> ModelSpec:
    """Load a spec from YAML text; `file` is what messages call it.

    Raises:
        SpecError: the text has faults; the message lists every one, in the order of the text.
    """
    try:
        source = parse(text)
    except UnreadableText as fault:
        raise SpecError(_message(fault.problems, file)) from None
    problems = [*source.problems, *resolve_likes(source)]
    spec, faults = read(ModelSpec, source)
    problems += faults
    blocks = {b: source.root.entries.get(b) for b in BLOCKS}
    names = Names(
        {b: list(node.entries) for b, node in blocks.items() if isinstance(node, MapNode)},
        [p.path for p in problems],
    )
    for path, message in check(spec, names):
        problems.append(Problem(source.locate(path), path, message))
    if problems:
        raise SpecError(_message(problems, file))
    try:  # the models' own word, should the walk in `read` ever be laxer
        return ModelSpec.model_validate(plain(source.root))
    except ValidationError as fault:
        raise SpecError(f"{file}: {fault}") from None


def spec_path(name_or_path: str | Path) -> Path:
    """The file of a shipped spec, or the path itself.

    Raises:
        SpecError: a name that is not shipped; the message lists the names that are.
    """
    text = str(name_or_path)
    if not _is_name(name_or_path):
        return Path(text)
    path = _shipped_directory() / f"{text}.yaml"
    if path.is_file():
        return path
    names = shipped_specs()
    hint = did_you_mean(text, names)
    raise SpecError(
        f"no shipped spec {shown(text)}{hint} (shipped: {', '.join(names) or 'none'}; or give the "
        "path of a .yaml file)"
    )


def shipped_specs() -> list[str]:
    """The names that `load_spec` knows."""
    return sorted(path.stem for path in _shipped_directory().glob("*.yaml"))


def schema() -> dict[str, Any]:
    """The JSON schema of a spec file, `like` included, for editors."""
    out = ModelSpec.model_json_schema()
    for block in LIKE_BLOCKS:
        entries = out["properties"][block]
        variants = entries["additionalProperties"]["oneOf"]
        derived = [_derived(out["$defs"], variant["$ref"]) for variant in variants]
        entries["additionalProperties"] = {
            # Not oneOf: an entry without its own `kind` may fit several derived forms.
            "anyOf": [entries["additionalProperties"], *derived]
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **out}


def _derived(definitions: dict[str, Any], reference: str) -> dict[str, Any]:
    """Add the form of a definition that takes its other keys from `like`."""
    name = reference.rsplit("/", 1)[1]
    original = definitions[name]
    like = {"type": "string", "description": "Entry whose keys this one takes unless it sets them."}
    definitions[f"{name}Like"] = {
        **original,
        "title": f"{name}Like",
        "properties": {"like": like, **original["properties"]},
        "required": ["like"],
    }
    return {"$ref": f"{reference}Like"}


def _shipped_directory() -> Path:
    """`specs` inside the package of a wheel, else beside the package in a source tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "specs"
    return inside if inside.is_dir() else package.parent / "specs"


def _is_name(name_or_path: str | Path) -> bool:
    text = str(name_or_path)
    if not _NAME.fullmatch(text) or text.endswith(_SUFFIXES):
        return False
    return (_shipped_directory() / f"{text}.yaml").is_file() or not Path(text).is_file()


def _relative(path: Path) -> str:
    """The path as a user would type it here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _reason(fault: Exception) -> str:
    if isinstance(fault, IsADirectoryError):
        return "it is a directory (expected a .yaml file)"
    if isinstance(fault, OSError):
        return os.strerror(fault.errno) if fault.errno else str(fault)
    return str(fault)


def _message(problems: list[Problem], file: str) -> str:
    unique: dict[Any, Problem] = {}
    for problem in sorted(problems, key=lambda p: p.mark):
        path = problem.path
        # Entries that inherit a faulty line would repeat its fault under their own names.
        place = path[2:] if path and path[0] in LIKE_BLOCKS else path
        unique.setdefault((problem.mark, place, problem.message), problem)
    count = len(unique)
    lines = [p.render(file) for p in unique.values()][:MAX_SHOWN]
    more = [f"... and {count - MAX_SHOWN} more"] if count > MAX_SHOWN else []
    header = f"{file}: {counted(count, 'problem')}"
    return "\n".join([header, *lines, *more])
