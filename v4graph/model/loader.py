"""Read a checkpoint directory: every tensor of the plan's inventory, no more and no less."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from v4graph.errors import WeightsError
from v4graph.model.params import logical_entries, stack_experts
from v4graph.model.quant import FP4_GROUP, FP8_BLOCK, decode_fp4, decode_fp8
from v4graph.plan.weights import TensorEntry, draft_inventory
from v4graph.spec.model import ModelSpec, MtpSpeculation
from v4graph.spec.safetensors_header import (
    INDEX_FILE,
    STACKED_EXPERTS,
    check_shard,
    official_name,
)
from v4graph.spec.speculator import SHOWN, STORED_KINDS, find_speculator

Progress = Callable[[str, int, int], None]
_FLOATS = {torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class _Place:
    """Where a tensor is stored; `part` and `expert` pick a matrix out of stacked experts."""

    file: Path
    stored: str
    part: str = ""
    expert: int = 0


class Checkpoint:
    """Open safetensors files of a directory, with or without an index; tensors are read lazily.

    Names are the published ones, whichever of the known schemes the files use (see
    `v4graph.spec.safetensors_header`).
    """

    _index: dict[str, str]

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        if not directory.is_dir():
            raise WeightsError(f"{directory}: not a directory; expected a checkpoint directory")
        index = directory / INDEX_FILE
        self._index = {}
        files = self._indexed(index) if index.is_file() else sorted(directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{directory}: no *.safetensors file and no {index.name}")
        self._handles = {}
        self._where: dict[str, _Place] = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as e:
                raise WeightsError(f"{file}: cannot be read as safetensors: {e}") from e
            self._handles[file] = handle
            # The index is authoritative: a stale copy in another file does not count.
            for stored in handle.keys():  # noqa: SIM118 (not a mapping)
                if self._index and directory / self._index.get(stored, "") != file:
                    continue
                for name, place in self._places(file, stored):
                    if name in self._where:
                        raise WeightsError(
                            f"{directory}: tensor {name} is in {self._where[name].file.name} and "
                            f"in {file.name}, and no index says which one counts"
                        )
                    self._where[name] = place
        held = {p.stored for p in self._where.values()}
        missing = [n for n in self._index if n not in held]
        if missing:
            raise WeightsError(
                f"{index}: says that {self._index[missing[0]]} holds {missing[0]}, but it does "
                f"not ({len(missing)} such tensor(s))"
            )

    def _places(self, file: Path, stored: str) -> Iterator[tuple[str, _Place]]:
        name = official_name(stored)
        stacked = STACKED_EXPERTS.match(name)
        if stacked is None:
            yield name, _Place(file, stored)
            return
        prefix, which, suffix = stacked.groups()
        parts = ("w1", "w3") if which == "gate_up_proj" else ("w2",)
        for expert in range(self._handles[file].get_slice(stored).get_shape()[0]):
            for part in parts:
                official = f"{prefix}.{expert}.{part}{suffix or '.weight'}"
                yield official, _Place(file, stored, part, expert)

    def _indexed(self, index: Path) -> list[Path]:
        try:
            self._index = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as e:
            raise WeightsError(f"{index}: expected JSON with a weight_map: {e}") from e
        try:
            files = sorted({self.directory / check_shard(n, f) for n, f in self._index.items()})
        except ValueError as e:
            raise WeightsError(f"{index}: {e}") from e
        for f in files:
            if not f.is_file():
                raise WeightsError(f"{index}: names {f.name}, which is not in {self.directory}")
        return files

    def names(self) -> set[str]:
        """Published names of all tensors."""
        return set(self._where)

    def file_of(self, name: str) -> str:
        """Name of the file that holds a tensor."""
        return self._where[name].file.name

    def read(self, name: str) -> Tensor:
        """One tensor as stored."""
        place = self._where[name]
        handle = self._handles[place.file]
        if not place.part:
            return handle.get_tensor(place.stored)
        matrix = handle.get_slice(place.stored)[place.expert]
        if place.part == "w2":
            return matrix
        half = matrix.shape[0] // 2
        return matrix[:half] if place.part == "w1" else matrix[half:]


def load_params(
    spec: ModelSpec,
    directory: Path,
    dtype: torch.dtype,
    progress: Progress | None = None,
    speculative: str | None = None,
) -> dict[str, Tensor]:
    """Load, decode and stack a checkpoint.

    Matrices, norms and embeddings become `dtype`; tensors that the inventory lists as F32 stay
    float32, routing tables int64.

    Args:
        speculative: the speculative mode to load for. One that stores no weights leaves draft
            layers in the files unread; one that does must find its own kind there. If left out,
            the spec's draft layers are read, where the files hold any.

    Raises:
        WeightsError: draft layers of another kind than the mode's, or none; missing, unknown,
            misshapen or undecodable tensors, each by name.
    """
    checkpoint = Checkpoint(directory)
    draft = {e.name for e in draft_inventory(spec)}
    names = checkpoint.names()
    entries = logical_entries(spec)
    if not _reads_draft_layers(spec, checkpoint, speculative):
        entries = [e for e in entries if e.name not in draft]
        names = {n for n in names if not (n.startswith("mtp.") and (draft or speculative))}
    wanted = {e.name for e in entries}
    scales = {n.removesuffix("weight") + "scale" for n in wanted if n.endswith(".weight")}
    _check_names(directory, wanted, names, scales)
    gates = (e for e in entries if e.name.endswith(".gate.weight"))
    experts = {e.name.removesuffix("weight"): e.shape[0] for e in gates}
    tensors = {}
    for i, entry in enumerate(entries):
        tensors[entry.name] = _decode(checkpoint, entry, dtype)
        if entry.dtype == "I64":
            count = experts[entry.name.removesuffix("tid2eid")]
            _check_table(f"{directory}: tensor {entry.name}", tensors[entry.name], count)
        if progress is not None:
            progress("load", i + 1, len(entries))
    return stack_experts(tensors)


def _reads_draft_layers(spec: ModelSpec, checkpoint: Checkpoint, speculative: str | None) -> bool:
    """Whether to load `mtp.*` tensors, once those in the files are known to be the mode's kind."""
    stored = {name: m for name, m in spec.speculative.items() if m.kind in STORED_KINDS}
    if speculative is not None:
        stored = {name: m for name, m in stored.items() if name == speculative}
    if not stored:
        return False
    name, mode = next(iter(stored.items()))
    found = find_speculator(checkpoint.names())
    if found.kind == "none" and speculative is None:
        return False
    needed = found.kind == mode.kind
    wanted, held = SHOWN[mode.kind], SHOWN[found.kind]
    if needed and isinstance(mode, MtpSpeculation) and found.num_layers != mode.num_layers:
        needed = False
        wanted, held = f"{mode.num_layers} {wanted}", f"{found.num_layers} of them"
    if needed:
        return True
    where = f" ({found.evidence} in {checkpoint.file_of(found.evidence)})" if found.evidence else ""
    free = [n for n, m in spec.speculative.items() if m.kind in ("none", "ngram", found.kind)]
    choices = " or ".join(f"--speculative {n}" for n in dict.fromkeys(("none", *free)))
    raise WeightsError(
        f"{checkpoint.directory}: speculative mode {name!r} needs {wanted}, but the files hold "
        f"{held}{where}. Tensors decide, whatever num_nextn_predict_layers in config.json says; "
        f"choose {choices}, or a checkpoint with {wanted}"
    )


def _check_names(directory: Path, wanted: set[str], found: set[str], scales: set[str]) -> None:
    problems = []
    unread = found - wanted - scales
    for name in sorted(wanted - found):
        close = difflib.get_close_matches(name, unread, 1)
        problems.append(f"missing {name}" + (f" (found {close[0]})" if close else ""))
    problems += [f"unknown {name}: nothing in the spec reads it" for name in sorted(unread)]
    if problems:
        shown = "\n  ".join(problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise WeightsError(f"{directory}: {len(problems)} tensor(s) differ:\n  {shown}{more}")


def _check_scale(where: str, scale: Tensor, expected: tuple[int, ...]) -> None:
    """Broadcasting or cutting a scale of another shape would load a wrong model in silence."""
    if tuple(scale.shape) != expected:
        raise WeightsError(f"{where}: scale of shape {tuple(scale.shape)}, expected {expected}")


def _check_table(where: str, table: Tensor, experts: int) -> None:
    bad = table[(table < 0) | (table >= experts)]
    if bad.numel():
        raise WeightsError(f"{where}: expert id {int(bad[0])}, expected 0 to {experts - 1}")


def _decode(checkpoint: Checkpoint, entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    """Decode by the stored dtype: quantised if a scale is there, never by a config string."""
    where = f"{checkpoint.directory}: tensor {entry.name}"
    stored = checkpoint.read(entry.name)
    scale_name = entry.name.removesuffix("weight") + "scale"
    scale = checkpoint.read(scale_name) if scale_name in checkpoint.names() else None
    if entry.dtype == "I64":
        if stored.dtype is not torch.int64:
            raise WeightsError(f"{where}: dtype {stored.dtype}, expected int64")
        value = stored
    elif stored.dtype is torch.float8_e4m3fn and scale is not None:
        _check_scale(where, scale, tuple(-(-n // FP8_BLOCK) for n in stored.shape))
        value = decode_fp8(stored, scale)
    elif stored.dtype in (torch.int8, torch.uint8) and scale is not None:
        _check_scale(where, scale, (*stored.shape[:-1], stored.shape[-1] * 2 // FP4_GROUP))
        value = decode_fp4(stored, scale)
    elif stored.dtype in _FLOATS and scale is None:
        value = stored
    else:
        state = "with" if scale is not None else "without"
        raise WeightsError(
            f"{where}: dtype {stored.dtype} {state} a scale cannot be decoded; expected a float "
            "tensor without, or an e4m3 or packed e2m1 tensor with one"
        )
    if tuple(value.shape) != entry.shape:
        raise WeightsError(f"{where}: shape {tuple(value.shape)}, expected {entry.shape}")
    if entry.dtype == "I64":
        return value
    return value.to(torch.float32 if entry.dtype == "F32" else dtype)
