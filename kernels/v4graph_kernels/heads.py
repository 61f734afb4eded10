"""Queries and cache rows of a step in one launch; the inverse rotation of the heads' outputs.

A program of `qkv_rows` handles some heads of one token, or writes its cache row. `unrope` works in
place and moves nothing but the rotated channels, an eighth of V4's.

Shape suffixes: T tokens, H heads, E head_dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.cache_rows import write_row
from v4graph_kernels.launch import check, check_inner, empty_like_output, next_power_of_2
from v4graph_kernels.numerics import through
from v4graph_kernels.store_rows import AMAX_FLOOR, GROUP, rope_pairs, target

TILE = 2048
"""Channels that a program holds: 4 heads of 512 channels."""


@triton.jit
def _turn_heads(
    t, first, x, out, cos, sin, x_stride, eps, H,
    DIM: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads [first, first + HEADS) of token t: norm without a weight, rotation."""
    dtype: tl.constexpr = x.dtype.element_ty
    h = first + tl.arange(0, HEADS)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    own = (h < H) & (c < DIM)
    value = tl.load(x + t * x_stride + h * DIM + c, mask=own, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(value * value, axis=1) / DIM + eps)
        value = through(value * factor[:, None], dtype)
    pair, is_rope = rope_pairs(DIM - ROPE, ROPE, BLOCK)
    at = t * (ROPE // 2) + pair
    co = tl.load(cos + at, mask=is_rope, other=0.0)[None, :]
    si = tl.load(sin + at, mask=is_rope, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(value, (HEADS, BLOCK // 2, 2)))
    turned_even = through(even * co - odd * si, dtype)
    turned_odd = through(odd * co + even * si, dtype)
    even = tl.where(is_rope[None, :], turned_even, even)
    odd = tl.where(is_rope[None, :], turned_odd, odd)
    value = tl.reshape(tl.join(even, odd), (HEADS, BLOCK))
    tl.store(out + (t * H + h) * DIM + c, value.to(dtype), mask=own)


@triton.jit
def _qkv_kernel(
    queries, kv, kv_norm, cos, sin, slots, pool, alias, q, index_q,
    queries_stride, kv_stride, page_rows, page_stride, num_rows, eps, floor, H, INDEX_H,
    DIM: tl.constexpr, INDEX_DIM: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, INDEX_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One token: program 0 of the second axis writes its row, the others have heads."""
    t = tl.program_id(0)
    part = tl.program_id(1)
    HEADS: tl.constexpr = TILE // BLOCK
    parts = tl.cdiv(H, HEADS)
    if part == 0:
        write_row(
            t, kv, kv_norm, cos, sin, slots, pool, alias,
            kv_stride, page_rows, page_stride, num_rows, eps, floor,
            DIM, ROPE, True, True, FORMAT, GROUPS, KV_BLOCK,
        )  # fmt: skip
    elif part <= parts:
        _turn_heads(
            t.to(tl.int64), (part - 1) * HEADS, queries, q, cos, sin, queries_stride, eps, H,
            DIM, ROPE, True, HEADS, BLOCK,
        )  # fmt: skip
    else:
        INDEX_HEADS: tl.constexpr = TILE // INDEX_BLOCK
        _turn_heads(
            t.to(tl.int64), (part - 1 - parts) * INDEX_HEADS, queries + H * DIM, index_q,
            cos, sin, queries_stride, eps, INDEX_H,
            INDEX_DIM, ROPE, False, INDEX_HEADS, INDEX_BLOCK,
        )  # fmt: skip


def qkv_rows(
    queries: Tensor,
    kv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pool: Tensor,
    *,
    heads: int,
    index_heads: int,
    index_dim: int,
    eps: float,
    rope_dim: int,
    page_rows: int,
) -> tuple[Tensor, Tensor]:
    """Rotated queries `[T, H, E]` and `[T, index_heads, index_dim]`; `kv` goes into `pool`.

    Args:
        queries: `[T, H E + index_heads index_dim]`, any row stride; those of the heads come first
            and are normalised, those of the indexer are not.
        kv: `[T, E]`, any row stride, in the dtype of `queries`; `kv_norm`, `slots`, `pool` and
            `page_rows` as in `cache_rows.write_kv_rows`.
        cos, sin: float32 `[T, rope_dim / 2]`.

    Raises:
        ValueError: shapes or strides that the kernel cannot address.
    """
    T, dim = kv.shape
    wanted = (T, heads * dim + index_heads * index_dim)
    check(tuple(queries.shape) == wanted, f"queries: {tuple(queries.shape)}, expected {wanted}")
    check(queries.dtype is kv.dtype, f"kv: {kv.dtype}, queries are {queries.dtype}")
    _check_angles(T, cos, sin, rope_dim, dim)
    check(
        not index_heads or _turns(index_dim, rope_dim), f"index_dim {index_dim}: too small or odd"
    )
    check(tuple(slots.shape) == (T,), f"slots: {tuple(slots.shape)}, expected {(T,)}")
    check_inner("qkv_rows", queries, kv, kv_norm, slots)
    to = target("pool", pool, "fp8_ds", dim, rope_dim, page_rows)
    q = empty_like_output(queries, (T, heads, dim))
    index_q = empty_like_output(queries, (T, index_heads, index_dim))
    if T == 0:
        return q, index_q
    block, index_block = next_power_of_2(dim), next_power_of_2(index_dim)
    tile = max(TILE, block, index_block)
    parts = triton.cdiv(heads, tile // block) + triton.cdiv(index_heads, tile // index_block)
    kv_block = max(block, GROUP)
    _qkv_kernel[(T, 1 + parts)](
        queries, kv, kv_norm, cos, sin, slots, to.pool, to.alias, q, index_q,
        queries.stride(0), kv.stride(0), to.page_rows, to.page_stride, to.num_rows,
        eps, AMAX_FLOOR, heads, index_heads,
        DIM=dim, INDEX_DIM=max(index_dim, rope_dim), ROPE=rope_dim, FORMAT=to.row_format,
        GROUPS=kv_block // GROUP, BLOCK=block, KV_BLOCK=kv_block,
        INDEX_BLOCK=max(index_block, next_power_of_2(rope_dim)), TILE=tile, num_warps=4,
    )  # fmt: skip
    return q, index_q


@triton.jit
def _unrope_kernel(
    x, cos, sin, x_stride_t, x_stride_h, H,
    NOPE: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token."""
    t = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    c = tl.arange(0, 2 * PAIRS)[None, :]
    own = (h < H) & (c < 2 * HALF)
    at = x + t * x_stride_t + h.to(tl.int64) * x_stride_h + NOPE + c
    value = tl.load(at, mask=own, other=0.0).to(tl.float32)
    pair = tl.arange(0, PAIRS)
    co = tl.load(cos + t * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    si = tl.load(sin + t * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    even, odd = tl.split(tl.reshape(value, (HEADS, PAIRS, 2)))
    turned_even = through(even * co + odd * si, dtype)
    turned_odd = through(odd * co - even * si, dtype)
    value = tl.reshape(tl.join(turned_even, turned_odd), (HEADS, 2 * PAIRS))
    tl.store(at, value.to(dtype), mask=own)


def unrope(x_THE: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the last channels of `x [T, H, E]` back by its tokens' angles, in place.

    Args:
        x_THE: last axis contiguous. cos, sin: float32 `[T, rope_dim / 2]`.

    Raises:
        ValueError: shapes or strides that the kernel cannot address.
    """
    T, H, dim = x_THE.shape
    half = cos.shape[-1]
    _check_angles(T, cos, sin, 2 * half, dim)
    check_inner("unrope", x_THE)
    if T == 0 or half == 0:
        return
    pairs, heads = next_power_of_2(half), 16
    _unrope_kernel[(T, triton.cdiv(H, heads))](
        x_THE, cos, sin, x_THE.stride(0), x_THE.stride(1), H,
        NOPE=dim - 2 * half, HALF=half, PAIRS=pairs, HEADS=heads, num_warps=4,
    )  # fmt: skip


def _turns(dim: int, rope_dim: int) -> bool:
    return 0 < rope_dim <= dim and (dim - rope_dim) % 2 == 0


def _check_angles(num_tokens: int, cos: Tensor, sin: Tensor, rope_dim: int, dim: int) -> None:
    wanted = (num_tokens, rope_dim // 2)
    for name, angles in (("cos", cos), ("sin", sin)):
        check(tuple(angles.shape) == wanted, f"{name}: {tuple(angles.shape)}, expected {wanted}")
        check(angles.is_contiguous(), f"{name}: expected a contiguous tensor")
        check(angles.dtype is torch.float32, f"{name}: {angles.dtype}, expected float32")
    check(_turns(dim, rope_dim), f"rope_dim {rope_dim}: of {dim} channels, both even")
