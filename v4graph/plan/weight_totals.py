"""Totals over a checkpoint inventory: tensors, bytes and parameters, by dtype and by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from v4graph.plan.weights import TensorEntry, draft_inventory, main_inventory
from v4graph.spec.model import ModelSpec


@dataclass(frozen=True)
class PartTotals:
    """One part of a checkpoint."""

    num_tensors: int
    num_bytes: int
    """Tensor bytes; the header of the file is left out."""
    num_params: int
    """Learned values: a packed FP4 byte counts two; scales and lookup tables count none."""
    by_dtype: Mapping[str, tuple[int, int]]
    """safetensors dtype -> (tensors, bytes), most tensors first."""


@dataclass(frozen=True)
class WeightTotals:
    """A whole checkpoint and its two parts."""

    total: PartTotals
    main: PartTotals
    draft: PartTotals
    """The draft layers stored under `mtp.N`; zeros when the spec has none."""


def weight_totals(spec: ModelSpec) -> WeightTotals:
    """Totals of the checkpoint that `spec` describes."""
    main, draft = main_inventory(spec), draft_inventory(spec)
    return WeightTotals(part_totals(main + draft), part_totals(main), part_totals(draft))


def part_totals(entries: Iterable[TensorEntry]) -> PartTotals:
    """Totals of `entries`."""
    by_dtype: dict[str, tuple[int, int]] = {}
    params = 0
    for entry in entries:
        tensors, size = by_dtype.get(entry.dtype, (0, 0))
        by_dtype[entry.dtype] = (tensors + 1, size + entry.num_bytes)
        params += _params(entry)
    ordered = dict(sorted(by_dtype.items(), key=lambda item: (-item[1][0], item[0])))
    return PartTotals(
        num_tensors=sum(tensors for tensors, _ in ordered.values()),
        num_bytes=sum(size for _, size in ordered.values()),
        num_params=params,
        by_dtype=ordered,
    )


def _params(entry: TensorEntry) -> int:
    if entry.name.endswith(".scale") or entry.dtype == "I64":
        return 0
    return prod(entry.shape) * (2 if entry.dtype == "I8" else 1)
