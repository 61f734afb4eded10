"""Judging a kernel: its error against float64 beside the reference's own."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(got: Tensor, exact: Tensor) -> float:
    """`||got - exact|| / ||exact||` in float64; NaN if `got` holds one."""
    exact = exact.double().cpu()
    return float((got.double().cpu() - exact).norm() / exact.norm().clamp_min(1e-30))


def assert_as_exact(got: Tensor, reference: Tensor, exact: Tensor, factor: float = 2.0) -> None:
    """The kernel errs no more than `factor` times the reference, or a few float32 roundings."""
    assert got.dtype == reference.dtype
    assert got.shape == reference.shape
    ours, theirs = relative_error(got, exact), relative_error(reference, exact)
    floor = 4 * torch.finfo(torch.float32).eps
    # Written so that a NaN fails.
    assert ours <= max(factor * theirs, floor), f"error {ours:.3g}, the reference's is {theirs:.3g}"
