"""Loading listed cache rows of any format into a tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.launch import check, check_inner
from v4graph_kernels.numerics import decode_e4m3, exp2_of, from_e4m3


@triton.jit
def load_plain_rows(pool, slots, is_row, stride, COLS: tl.constexpr, dtype: tl.constexpr):
    """Rows `[N, COLS]` at int64 `slots [N]`; zeros where not `is_row`."""
    at = slots[:, None] * stride + tl.arange(0, COLS)[None, :]
    return tl.load(pool + at, mask=is_row[:, None], other=0.0).to(dtype)


@triton.jit
def load_packed_rows(
    pool, pool16, slots, is_row, page_rows, page_stride,
    NOPE: tl.constexpr, ROPE: tl.constexpr, GROUPS: tl.constexpr, ROPE_PAD: tl.constexpr,
    dtype: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`fp8_ds` rows as two tiles: quantised `[N, GROUPS * 64]`, rotated `[N, ROPE_PAD]`.

    Zeros where not `is_row` and beyond NOPE and ROPE. `pool16` is the same memory as bf16. e4m3
    times a power of two is exact in bf16 and in float32.
    """
    DATA: tl.constexpr = NOPE + 2 * ROPE
    SCALES: tl.constexpr = (NOPE + 511) // 512 * 8
    page = slots // page_rows
    at = slots - page * page_rows
    data = page * page_stride + at * DATA
    scales = page * page_stride + page_rows * DATA + at * SCALES
    # Three axes, so that a thread loads each of its scales once.
    g = tl.arange(0, GROUPS)[None, :, None]
    c = g * 64 + tl.arange(0, 64)[None, None, :]
    here = is_row[:, None, None]
    code = tl.load(pool + data[:, None, None] + c, mask=here & (c < NOPE), other=0)
    byte = tl.load(pool + scales[:, None, None] + g, mask=here & (g * 64 < NOPE), other=0)
    if dtype == tl.bfloat16:
        # Half the registers of the other branch, and as exact.
        value = decode_e4m3(code, dtype) * exp2_of(byte).to(dtype)
    else:
        value = (from_e4m3(code) * exp2_of(byte)).to(dtype)
    quantised = tl.reshape(value, (N, GROUPS * 64))
    r = tl.arange(0, ROPE_PAD)
    tail = ((data + NOPE) // 2)[:, None] + r[None, :]
    rotated = tl.load(pool16 + tail, mask=is_row[:, None] & (r < ROPE)[None, :], other=0.0)
    return quantised, rotated.to(dtype)


def pool_arguments(
    name: str, pool: Tensor, dim: int, rope_dim: int, page_rows: int
) -> tuple[Tensor, Tensor, int, int, int, bool]:
    """`(pool, pool as bf16, page_rows, page_stride, num_rows, is packed)` of a pool.

    Raises:
        ValueError: a pool whose rows are not of `dim` channels, or whose pages are too short.
    """
    check_inner(name, pool)
    if pool.dtype is not torch.uint8:
        check(pool.shape[1] == dim, f"{name}: rows of {pool.shape[1]} channels, expected {dim}")
        return pool, pool, 1, pool.stride(0), pool.shape[0], False
    nope = dim - rope_dim
    need = page_rows * (nope + 2 * rope_dim + -(-nope // 512) * 8)
    fits = page_rows > 0 and pool.stride(0) >= need and pool.stride(0) % 2 == 0 and nope % 2 == 0
    check(fits, f"{name}: pages of {pool.stride(0)} bytes, expected an even number >= {need}")
    num_rows = pool.shape[0] * page_rows
    return pool, pool.view(torch.bfloat16), page_rows, pool.stride(0), num_rows, True
