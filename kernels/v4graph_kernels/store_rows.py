"""Normalising, rotating and storing a cache row of any format, one row a program.

Row formats, for a row of DIM channels whose last ROPE ones are rotated:
  plain    `[rows, DIM]` in a floating dtype.
  fp8_ds   uint8 `[pages, page_bytes]`; a page holds its rows' data (DIM - ROPE e4m3 bytes and ROPE
           bf16 values each), then their scale bytes: one e8m0 byte for 64 channels, padded to 8.
  fp8      uint8 `[pages, page_bytes]`; DIM e4m3 bytes a row, then one float32 scale a row.

In a kernel a row is a vector of BLOCK channels, float32, those from DIM on zero. BLOCK is a power
of two and at least GROUP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.launch import check, check_inner
from v4graph_kernels.numerics import e8m0_of, exp2_of, round_bf16, through, to_e4m3

GROUP = 64
"""Channels of one scale of an `fp8_ds` row."""
AMAX_FLOOR = 1e-4


@triton.jit
def normalise(value, weight, eps, DIM: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """RMS norm of a row, rounded to `dtype`; no `weight` is 1."""
    factor = tl.rsqrt(tl.sum(value * value) / DIM + eps)
    value *= factor
    if weight is not None:
        c = tl.arange(0, BLOCK)
        value *= tl.load(weight + c, mask=c < DIM, other=0.0).to(tl.float32)
    return through(value, dtype)


@triton.jit
def rope_pairs(NOPE: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr):
    """Which rotary pair each of the BLOCK / 2 pairs of channels is, and whether it is one."""
    pair = tl.arange(0, BLOCK // 2) - NOPE // 2
    return pair, (pair >= 0) & (pair < ROPE // 2)


@triton.jit
def rotate(value, co, si, is_rope, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """Rotate the pairs of a row that `is_rope [BLOCK / 2]` names; these are rounded to `dtype`."""
    even, odd = tl.split(tl.reshape(value, (BLOCK // 2, 2)))
    turned = through(even * co - odd * si, dtype), through(odd * co + even * si, dtype)
    even, odd = tl.where(is_rope, turned[0], even), tl.where(is_rope, turned[1], odd)
    return tl.reshape(tl.join(even, odd), (BLOCK,))


@triton.jit
def store_row(
    value, slot, pool, alias, page_rows, page_stride, floor,
    DIM: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row at int64 `slot`, which exists. `alias` is the pool's memory as `Target` says."""
    c = tl.arange(0, BLOCK)
    if FORMAT == "plain":
        to: tl.constexpr = pool.dtype.element_ty
        at = slot * page_stride + c
        if to == tl.bfloat16:
            # Bits, for the interpreter truncates.
            tl.store(alias + at, round_bf16(value).to(tl.int16), mask=c < DIM)
        else:
            tl.store(pool + at, value.to(to), mask=c < DIM)
    else:
        page = slot // page_rows
        at = slot - page * page_rows
        start = page * page_stride
        if FORMAT == "fp8":
            byte = e8m0_of(tl.maximum(tl.max(tl.abs(value)), floor))
            code = to_e4m3(value * exp2_of(254 - byte)).to(tl.uint8)
            tl.store(pool + start + at * DIM + c, code, mask=c < DIM)
            tl.store(alias + (start + page_rows * DIM) // 4 + at, exp2_of(byte))
        else:
            NOPE: tl.constexpr = DIM - ROPE
            DATA: tl.constexpr = NOPE + 2 * ROPE
            SCALES: tl.constexpr = (NOPE + 511) // 512 * 8
            G: tl.constexpr = BLOCK // GROUPS
            data = start + at * DATA
            size = tl.where(c < NOPE, tl.abs(value), 0.0)
            amax = tl.max(tl.reshape(size, (GROUPS, G)), axis=1)
            byte = e8m0_of(tl.maximum(amax, floor))
            scaled = tl.reshape(value, (GROUPS, G)) * exp2_of(254 - byte)[:, None]
            code = tl.reshape(to_e4m3(scaled), (BLOCK,))
            tl.store(pool + data + c, code.to(tl.uint8), mask=c < NOPE)
            g = tl.arange(0, GROUPS)
            scales = start + page_rows * DATA + at * SCALES
            tl.store(pool + scales + g, byte.to(tl.uint8), mask=g * G < NOPE)
            tail = (data + NOPE) // 2 + c - NOPE
            rotated = (c >= NOPE) & (c < DIM)
            tl.store(alias + tail, round_bf16(value).to(tl.int16), mask=rotated)


@dataclass(frozen=True)
class Target:
    """A pool as `store_row` takes it."""

    pool: Tensor
    alias: Tensor
    """The same memory: int16 for `fp8_ds` and plain bf16 rows, float32 for `fp8` ones."""
    page_rows: int
    page_stride: int
    num_rows: int
    row_format: str


def target(
    name: str, pool: Tensor, row_format: str, dim: int, rope_dim: int, page_rows: int
) -> Target:
    """How rows of `dim` channels get into `pool`.

    Args:
        row_format: `fp8_ds` or `fp8` for a uint8 pool; not looked at for others.

    Raises:
        ValueError: another format, rows of other channels, or pages that are too short.
    """
    check_inner(name, pool)
    check(0 <= rope_dim <= dim and rope_dim % 2 == 0, f"rope_dim {rope_dim}: of {dim} channels")
    if pool.dtype is not torch.uint8:
        check(pool.shape[1] == dim, f"{name}: rows of {pool.shape[1]} channels, expected {dim}")
        alias = pool.view(torch.int16) if pool.dtype is torch.bfloat16 else pool
        return Target(pool, alias, 1, pool.stride(0), pool.shape[0], "plain")
    check(row_format in ("fp8", "fp8_ds"), f"{name}: uint8 rows of format {row_format!r}")
    check(page_rows > 0, f"page_rows {page_rows}: expected a positive number for a uint8 pool")
    nope, stride = dim - rope_dim, pool.stride(0)
    if row_format == "fp8":
        need, multiple, view = page_rows * (dim + 4), 4, torch.float32
        is_aligned = stride % 4 == 0 and page_rows * dim % 4 == 0
    else:
        need = page_rows * (nope + 2 * rope_dim + -(-nope // (GROUP * 8)) * 8)
        multiple, view = 2, torch.int16
        is_aligned = stride % 2 == 0 and nope % 2 == 0
    check(
        stride >= need and is_aligned,
        f"{name}: pages of {stride} bytes, expected a multiple of {multiple} of at least {need}",
    )
    num_rows = pool.shape[0] * page_rows
    return Target(pool, pool.view(view), page_rows, stride, num_rows, row_format)
