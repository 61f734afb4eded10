"""How kernels are launched: interpreter or GPU, sizes and checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

TARGET_PROGRAMS = 264
"""Programs that fill the machine: twice the 132 multiprocessors of an H100 or H200."""


@triton.jit
def _probe() -> None:
    pass


INTERPRETED = isinstance(_probe, InterpretedFunction)
"""Whether kernels of this process run in the interpreter; Triton fixes that when it is imported."""


def check(is_right: bool, message: str) -> None:
    """ValueError with `message` unless `is_right`."""
    if not is_right:
        raise ValueError(message)


def check_inner(name: str, *tensors: Tensor | None) -> None:
    """Kernels step through the last axis one element at a time."""
    for t in tensors:
        if t is not None and t.dim() and t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ValueError(f"{name}: last axis has stride {t.stride(-1)}, expected 1")


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least `n`; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def splits_for(programs: int, most: int) -> int:
    """Into how many parts each of `programs` pieces of work is cut to fill the machine."""
    return max(1, min(most, -(-TARGET_PROGRAMS // max(programs, 1))))


def empty_like_output(x: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """An output on the device of `x`; the interpreter's are poisoned, so that gaps show."""
    out = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
    if INTERPRETED:
        out.fill_(float("nan") if out.is_floating_point() else -(2**30))
    return out
