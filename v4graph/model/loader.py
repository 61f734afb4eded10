"""Load a checkpoint: every tensor of the plan's inventory, no more and no less.

Headers are compared with the inventory before any value is read. Then tensors are read one at a
time, file by file, and copied to where they stay; the experts of a layer into one tensor of all. So
the resident set is the parameters, one mapped file and one decoded tensor.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from v4graph.errors import NonFiniteWeightsError, WeightsError
from v4graph.model.checkpoint import Checkpoint, TensorSource
from v4graph.model.finite import any_nonfinite, count_nonfinite
from v4graph.model.params import expert_place, logical_entries
from v4graph.model.projections import StoredParam
from v4graph.model.quant import (
    FP4_GROUP,
    FP8_BLOCK,
    Fp4,
    Fp8Block,
    scale_shape_fp4,
    scale_shape_fp8,
    stored_scale,
)
from v4graph.plan.weights import TensorEntry, draft_inventory
from v4graph.spec.model import ModelSpec, StoredDrafter
from v4graph.spec.speculator import SHOWN, find_speculator, mtp_layers
from v4graph.words import counted

Progress = Callable[[str, int, int], None]
Format = Literal["plain", "fp8_block", "fp4"]

_FLOATS = ("F32", "BF16", "F16")
_SCALES = ("F8_E8M0", "F32", "U8")
_SHOWN = 20
_logger = logging.getLogger(__name__)


def load_params(
    spec: ModelSpec,
    directory: Path,
    dtype: torch.dtype,
    progress: Progress | None = None,
    speculative: str | None = None,
    allow_nonfinite: bool = False,
) -> dict[str, Tensor]:
    """Load, decode and stack a checkpoint.

    Matrices, norms and embeddings become `dtype`; tensors that the inventory lists as F32 stay
    float32, routing tables int64.

    Args:
        progress: called with ("load", tensors done, tensors in all).
        speculative: the speculative mode to load for. One that stores no weights leaves draft
            layers in the files unread; one that does must find its own kind there. If left out,
            the spec's draft layers are read, where the files hold any.
        allow_nonfinite: log NaN and infinite values instead of refusing them.

    Returns:
        Tensors by name (see `v4graph.model.params`), on the CPU.

    Raises:
        WeightsError: draft layers of another kind than the mode's, or none; missing, unknown,
            misshapen or undecodable tensors, all of them by name.
        NonFiniteWeightsError: values that are NaN or infinite, as stored or in `dtype`.
    """
    load = _Load(spec, directory, dtype, torch.device("cpu"), speculative, allow_nonfinite)

    def place(entry: TensorEntry) -> None:
        stored = load.read(entry)
        target = load.dtype_of(entry)
        value = stored if isinstance(stored, Tensor) else stored.dequantise(target)
        load.put(entry.name, [value], [target])

    load.run(place, progress)
    return {key: parts[0] for key, parts in load.out.items()}


def load_quantised(
    spec: ModelSpec,
    source: Path | TensorSource,
    dtype: torch.dtype,
    progress: Progress | None = None,
    device: torch.device | None = None,
    speculative: str | None = None,
    allow_nonfinite: bool = False,
) -> dict[str, StoredParam]:
    """Load and stack a checkpoint without decoding it.

    As `load_params`, but FP8 and FP4 weights stay what their files hold: codes and scales, experts
    stacked along a first axis `E`. `dequantise()` of each is bit for bit what `load_params` gives.

    Args:
        source: a checkpoint directory, or another source of its tensors.
        device: where the parameters go, one by one; the CPU if left out.

    Raises:
        WeightsError: what `load_params` raises; experts of one layer in different formats; FP8
            gate and up matrices whose rows are no multiple of 128, for stacked they would share a
            block.
    """
    place_on = device or torch.device("cpu")
    load = _Load(spec, source, dtype, place_on, speculative, allow_nonfinite)
    kept: dict[str, Format] = {}

    def place(entry: TensorEntry) -> None:
        stored = load.read(entry)
        if isinstance(stored, Fp8Block):
            parts, form = [stored.weight, stored.scale], "fp8_block"
        elif isinstance(stored, Fp4):
            parts, form = [stored.packed, stored.scale], "fp4"
        else:
            parts, form = [stored], "plain"
        where = f"{load.directory}: tensor {entry.name}"
        stack = expert_place(entry.name)
        if form == "fp8_block" and stack and stack.halves > 1 and entry.shape[0] % FP8_BLOCK:
            raise WeightsError(
                f"{where}: {counted(entry.shape[0], 'row')}; kept as FP8 w1 and w3 are "
                f"stacked, which takes a multiple of {FP8_BLOCK}"
            )
        dtypes = [load.dtype_of(entry)] if form == "plain" else [p.dtype for p in parts]
        key = load.key(entry.name)
        known = (kept.setdefault(key, form), [p.dtype for p in load.out.get(key, [])] or dtypes)
        if known != (form, dtypes):
            raise WeightsError(
                f"{where}: {form} of {dtypes}; the experts before it are {known[0]} of {known[1]}, "
                "and kept as stored they must agree"
            )
        load.put(entry.name, parts, dtypes)

    load.run(place, progress)
    wrap: dict[Format, Callable[..., StoredParam]] = {"fp8_block": Fp8Block, "fp4": Fp4}
    return {key: wrap.get(kept[key], _only)(*parts) for key, parts in load.out.items()}


def _only(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class _Stored:
    """A tensor of the inventory as the checkpoint has it."""

    form: Format
    scale: str
    """Name of its scale; empty for a plain one."""


class _Load:
    """One pass over a checkpoint."""

    def __init__(
        self,
        spec: ModelSpec,
        source: Path | TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        speculative: str | None,
        allow_nonfinite: bool,
    ) -> None:
        self._allow_nonfinite = allow_nonfinite
        self._checkpoint = Checkpoint(source) if isinstance(source, Path) else source
        self.directory = self._checkpoint.directory
        self._dtype, self._device = dtype, device
        self._entries, names = _wanted(spec, self._checkpoint, speculative)
        # In one tensor: small ones of their own, kept among large ones, would split the heap.
        on_meta = device.type == "meta"
        self._flags = torch.zeros(
            len(self._entries), dtype=torch.bool, device="cpu" if on_meta else device
        )
        self._number = {e.name: i for i, e in enumerate(self._entries)}
        self._stored = _check(self._checkpoint, self._entries, names)
        places = (expert_place(e.name) for e in self._entries)
        self._stack_size = Counter(p.key for p in places if p and p.half == 0)
        gates = (e for e in self._entries if e.name.endswith(".gate.weight"))
        self._experts = {e.name.removesuffix("weight"): e.shape[0] for e in gates}
        self.out: dict[str, list[Tensor]] = {}
        """By parameter: its tensor, or codes and scales."""

    def run(self, place: Callable[[TensorEntry], None], progress: Progress | None) -> None:
        """Place every tensor, in the order of the files; `out` has that of the inventory."""

        def file_of(entry: TensorEntry) -> Path:
            return self._checkpoint.place(entry.name).file

        in_files = sorted(self._entries, key=file_of)
        for i, entry in enumerate(in_files):
            if i and file_of(entry) != file_of(in_files[i - 1]):
                self._checkpoint.close()  # what was read of a mapped file counts as resident
            place(entry)
            if progress is not None:
                progress("load", i + 1, len(in_files))
        self._check_finite()
        self._checkpoint.close()
        order = dict.fromkeys(self.key(e.name) for e in self._entries)
        self.out = {key: self.out[key] for key in order}

    def key(self, name: str) -> str:
        """The parameter that a tensor of the checkpoint is, or is a part of."""
        place = expert_place(name)
        return place.key if place else name

    def dtype_of(self, entry: TensorEntry) -> torch.dtype:
        """Dtype of a tensor that is plain or decoded."""
        return {"F32": torch.float32, "I64": torch.int64}.get(entry.dtype, self._dtype)

    def read(self, entry: TensorEntry) -> StoredParam:
        """A tensor as stored; the ids of a routing table are checked."""
        where = f"{self._checkpoint.directory}: tensor {entry.name}"
        value, stored = self._checkpoint.read(entry.name), self._stored[entry.name]
        if entry.dtype == "I64":
            _check_table(where, value, self._experts[entry.name.removesuffix("tid2eid")])
        if stored.form == "plain":
            return value
        scale = stored_scale(self._checkpoint.read(stored.scale))
        if stored.form == "fp4":
            return Fp4(value.view(torch.uint8), scale)
        return Fp8Block(value, scale)

    def put(self, name: str, parts: list[Tensor], dtypes: list[torch.dtype]) -> None:
        """Copy a tensor's parts to where they stay, which outlives the mapped file."""
        place, key = expert_place(name), self.key(name)
        if key not in self.out:
            shapes = [list(p.shape) for p in parts]
            if place:
                experts = self._stack_size[key]
                shapes = [[experts, rows * place.halves, *rest] for rows, *rest in shapes]
            self.out[key] = [
                torch.empty(shape, dtype=dtype, device=self._device)
                for shape, dtype in zip(shapes, dtypes, strict=True)
            ]
        kept = []
        for whole, part in zip(self.out[key], parts, strict=True):
            own = whole[place.expert].chunk(place.halves)[place.half] if place else whole
            kept.append(own.copy_(part))
        flag = any_nonfinite(kept)
        if flag is not None:
            self._flags[self._number[name]] = flag

    def _check_finite(self) -> None:
        """Refuse, or log, values that are no numbers; waits for the device once."""
        marked = zip(self._entries, self._flags.tolist(), strict=True)
        bad = [entry.name for entry, flag in marked if flag]
        if not bad:
            return
        shown = "\n  ".join(f"tensor {name}: {self._nonfinite(name)}" for name in bad[:_SHOWN])
        more = f"\n  and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        held = counted(len(bad), "tensor holds", "tensors hold")
        message = (
            f"{self.directory}: {held} values that are not finite, and would make every "
            f"logit behind them NaN:\n  {shown}{more}"
        )
        if not self._allow_nonfinite:
            raise NonFiniteWeightsError(f"{message}\n--allow-nonfinite loads them all the same")
        _logger.warning("%s", message)

    def _nonfinite(self, name: str) -> str:
        """What of a tensor in the files is not finite."""
        value, stored = self._checkpoint.read(name), self._stored[name]
        found = [
            (
                value,
                "values are NaN or infinite" if stored.form == "plain" else "e4m3 codes are NaN",
            )
        ]
        if stored.scale:
            scale = stored_scale(self._checkpoint.read(stored.scale))
            found.append((scale, "scales are NaN or infinite"))
        counts = [(count_nonfinite(tensor), tensor.numel(), what) for tensor, what in found]
        told = [f"{bad} of {total} {what}" for bad, total, what in counts if bad]
        return " and ".join(told) or f"finite as stored, but not in {self._dtype}"


def _wanted(
    spec: ModelSpec, checkpoint: TensorSource, speculative: str | None
) -> tuple[list[TensorEntry], set[str]]:
    """The inventory without scales, and the names in the files that it has to account for; both
    without draft layers where these are not read."""
    entries, names = logical_entries(spec), checkpoint.names()
    draft = {e.name for e in draft_inventory(spec)}
    if not _reads_draft_layers(spec, checkpoint, speculative):
        entries = [e for e in entries if e.name not in draft]
        names = {n for n in names if not (n.startswith("mtp.") and (draft or speculative))}
    return entries, names


def _reads_draft_layers(spec: ModelSpec, checkpoint: TensorSource, speculative: str | None) -> bool:
    """Whether to load `mtp.*` tensors, once those in the files are known to be the mode's kind."""
    stored = {name: m for name, m in spec.speculative.items() if isinstance(m, StoredDrafter)}
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
    if needed and found.num_layers != mode.num_layers:
        needed = False
        count = mode.num_layers
        wanted = (
            mtp_layers(count) if mode.kind == "mtp" else f"{wanted} of {counted(count, 'layer')}"
        )
        held = f"{found.num_layers} of them"
    if needed:
        return True
    where = found.evidence
    where = f" ({where} in {checkpoint.place(where).file.name})" if where else ""
    free = [n for n, m in spec.speculative.items() if m.kind in ("none", "ngram", found.kind)]
    free = [n for n in free if n != name]
    choices = " or ".join(f"--speculative {n}" for n in dict.fromkeys(("none", *free)))
    raise WeightsError(
        f"{checkpoint.directory}: speculative mode {name!r} needs {wanted}, but the files hold "
        f"{held}{where}. Tensors decide, whatever num_nextn_predict_layers in config.json says; "
        f"choose {choices}, or a checkpoint with {wanted}"
    )


def _check(
    checkpoint: TensorSource, entries: Iterable[TensorEntry], found: set[str]
) -> Mapping[str, _Stored]:
    """Compare `found` names, dtypes and shapes with the inventory; how each tensor is stored.

    A tensor is decoded by its own dtype: quantised if a scale is there, never by a config string.

    Raises:
        WeightsError: all that differ.
    """
    wanted = {e.name: e for e in entries}
    scales = {n.removesuffix("weight") + "scale" for n in wanted if n.endswith(".weight")}
    unread = found - wanted.keys() - scales
    problems = []
    for name in sorted(wanted.keys() - found):
        close = difflib.get_close_matches(name, unread, 1)
        problems.append(f"missing {name}" + (f" (found {close[0]})" if close else ""))
    problems += [f"unknown {name}: nothing in the spec reads it" for name in sorted(unread)]
    stored: dict[str, _Stored] = {}
    for name, entry in wanted.items():
        if name in found:
            fault = _fault(checkpoint, entry, stored)
            problems += [f"tensor {name}: {fault}"] if fault else []
    if problems:
        shown = "\n  ".join(problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise WeightsError(
            f"{checkpoint.directory}: "
            f"{counted(len(problems), 'tensor differs', 'tensors differ')}:\n  {shown}{more}"
        )
    return stored


def _fault(checkpoint: TensorSource, entry: TensorEntry, stored: dict[str, _Stored]) -> str:
    """What is wrong with a tensor's header; notes in `stored` how it is stored if nothing is."""
    place = checkpoint.place(entry.name)
    dtype, shape = place.dtype, place.shape
    name = entry.name.removesuffix("weight") + "scale" if entry.name.endswith("weight") else ""
    scale = checkpoint.place(name) if name in checkpoint else None
    if entry.dtype == "I64" and dtype != "I64":
        return f"dtype {dtype}, expected I64"
    form = _form(dtype, scale is not None) if entry.dtype != "I64" else "plain"
    if form is None:
        return (
            f"dtype {dtype} {'with' if scale else 'without'} a scale; expected "
            f"{', '.join(_FLOATS)} without, or F8_E4M3 or I8 (packed e2m1) with one"
        )
    logical = (*shape[:-1], shape[-1] * 2) if form == "fp4" and shape else shape
    if logical != entry.shape:
        return f"shape {logical}, expected {entry.shape}"
    if scale is not None:
        if len(shape) != 2 or (form == "fp4" and logical[-1] % FP4_GROUP):
            return f"shape {logical} cannot be {form}; expected a matrix of whole groups"
        fits = scale_shape_fp8(shape) if form == "fp8_block" else scale_shape_fp4(shape)
        # Broadcasting or cutting another shape would load a wrong model in silence.
        if scale.shape != fits:
            return f"scale of shape {scale.shape}, expected {fits}"
        if scale.dtype not in _SCALES:
            return f"scale of dtype {scale.dtype}, expected one of {', '.join(_SCALES)}"
    stored[entry.name] = _Stored(form, name if scale else "")
    return ""


def _form(dtype: str, scaled: bool) -> Format | None:
    if dtype in _FLOATS:
        return None if scaled else "plain"
    if not scaled:
        return None
    quantised: dict[str, Format] = {"F8_E4M3": "fp8_block", "I8": "fp4", "U8": "fp4"}
    return quantised.get(dtype)


def _check_table(where: str, table: Tensor, experts: int) -> None:
    bad = table[(table < 0) | (table >= experts)]
    if bad.numel():
        raise WeightsError(f"{where}: expert id {int(bad[0])}, expected 0 to {experts - 1}")
