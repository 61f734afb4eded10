"""Loading listed cache rows of any format into a tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.launch import check, check_inner
from v4graph_kernels.numerics import exp2_of, from_e4m3


@triton.jit
def load_rows(
    pool, pool16, slots, is_row, page_rows, page_stride,
    DIM: tl.constexpr, ROPE: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows of `pool` at int64 `slots [N]` as a tile `[N, DIM]` of DTYPE; zeros where not `is_row`.

    PACKED pools hold `fp8_ds` rows, `pool16` being the same memory as bf16; see `cache_rows`. e4m3
    times a power of two and bf16 values are exact in bf16 and in float32.
    """
    c = tl.arange(0, DIM)
    if PACKED:
        NOPE: tl.constexpr = DIM - ROPE
        DATA: tl.constexpr = NOPE + 2 * ROPE
        SCALES: tl.constexpr = (NOPE + 511) // 512 * 8
        page = slots // page_rows
        at = slots - page * page_rows
        data = page * page_stride + at * DATA
        scales = page * page_stride + page_rows * DATA + at * SCALES
        quantised = is_row[:, None] & (c < NOPE)[None, :]
        code = tl.load(pool + data[:, None] + c[None, :], mask=quantised, other=0)
        byte = tl.load(pool + scales[:, None] + (c // 64)[None, :], mask=quantised, other=0)
        tail = ((data + NOPE) // 2)[:, None] + (c - NOPE)[None, :]
        rotated = tl.load(pool16 + tail, mask=is_row[:, None] & (c >= NOPE)[None, :], other=0.0)
        # Exactly one of the two is not zero.
        return (from_e4m3(code) * exp2_of(byte) + rotated.to(tl.float32)).to(DTYPE)
    else:
        at = slots[:, None] * page_stride + c[None, :]
        return tl.load(pool + at, mask=is_row[:, None], other=0.0).to(DTYPE)


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
