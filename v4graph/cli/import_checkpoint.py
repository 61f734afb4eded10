"""`v4graph import`: write the spec of a checkpoint directory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from v4graph.errors import SpecError, WeightsError
from v4graph.plan.weights import inventory
from v4graph.spec.hf_config import import_config
from v4graph.spec.hf_yaml import to_yaml
from v4graph.spec.load import load_spec
from v4graph.spec.model import ModelSpec
from v4graph.spec.safetensors_header import StoredCheckpoint, read_checkpoint
from v4graph.words import counted

_SHOWN = 8
_FLOATS = frozenset({"F32", "BF16"})


def import_command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory with config.json and safetensors.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="YAML file to write.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the spec; the directory's if left out.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A config key known not to change the model's results."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare the spec with the stored tensors.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output file.")] = False,
) -> None:
    """Write the spec of a DeepSeek-V4 checkpoint from its config.json and its files' headers."""
    if output.exists() and not force:
        raise SpecError(f"{output}: the file exists; pass --force to overwrite it")
    text, notes = import_checkpoint(directory, name, tuple(ignore or ()), check)
    output.write_text(text, encoding="utf-8")
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"wrote {output}")


def import_checkpoint(
    directory: Path, name: str | None = None, ignored: Sequence[str] = (), check: bool = True
) -> tuple[str, tuple[str, ...]]:
    """The YAML text of a checkpoint's spec, and notes for the user.

    Raises:
        SpecError: config.json or a header cannot be read, or asks for what is not supported.
        WeightsError: the stored tensors are not those of the spec (unless `check` is false).
    """
    stored = read_checkpoint(directory)
    title = name or directory.resolve().name
    imported = import_config(_config(directory), title, stored, ignored)
    notes = list(imported.notes)
    files = len({tensor.file for tensor in stored.tensors.values()})
    if missing := len(stored.missing_files):
        listed = counted(files + missing, "file of the index is", "files of the index are")
        notes.append(f"{missing} of {listed} not in the directory; no tensor there was compared")
    headers = counted(files, "safetensors file")
    where = f"the headers of {headers}" if files else "no safetensors file"
    text = to_yaml(imported, f"{directory.resolve().name}: config.json and {where}")
    spec = _validated(text)
    if check and stored.tensors:
        notes += compare(spec, stored)
    return text, tuple(notes)


def compare(spec: ModelSpec, stored: StoredCheckpoint) -> list[str]:
    """Compare the spec's inventory with the stored tensors; returns notes.

    Stored `mtp.N` tensors are left out where the spec has no draft layer, and F32 against BF16 is a
    note, because either is decoded by its own dtype.

    Raises:
        WeightsError: tensors are missing, unexpected, or of another dtype or shape.
    """
    expected = {entry.name: entry for entry in inventory(spec)}
    drafts = any(name.startswith("mtp.") for name in expected)
    found = {n: t for n, t in stored.tensors.items() if drafts or not n.startswith("mtp.")}
    faults: list[str] = []
    floats = 0
    if not stored.missing_files:
        faults += [f"{name}: missing" for name in expected if name not in found]
    for name, tensor in found.items():
        entry = expected.get(name)
        if entry is None:
            faults.append(f"{tensor.file}: {name}: unexpected")
        elif tensor.shape != entry.shape:
            faults.append(
                f"{tensor.file}: {name}: shape {list(tensor.shape)}; expected {list(entry.shape)}"
            )
        elif tensor.dtype != entry.dtype:
            if {tensor.dtype, entry.dtype} <= _FLOATS:
                floats += 1
            else:
                faults.append(f"{tensor.file}: {name}: {tensor.dtype}; expected {entry.dtype}")
    if faults:
        shown = "\n".join(faults[:_SHOWN])
        rest = f"\n... and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise WeightsError(
            f"{counted(len(faults), 'stored tensor differs', 'stored tensors differ')} from the "
            "spec that config.json describes "
            f"(--no-check writes it all the same):\n{shown}{rest}"
        )
    if floats:
        differ = counted(floats, "tensor is", "tensors are")
        return [f"{differ} stored in F32 or BF16 where the spec says the other"]
    return []


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise SpecError(f"{path}: {fault.strerror}; expected a checkpoint directory") from fault
    except ValueError as fault:
        raise SpecError(f"{path}: not JSON: {fault}") from fault
    if not isinstance(config, dict):
        raise SpecError(f"{path}: expected a JSON object")
    return config


def _validated(text: str) -> ModelSpec:
    """Load the text as a user would, so that no file is written that does not load."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "imported.yaml"
        path.write_text(text, encoding="utf-8")
        return load_spec(str(path))
