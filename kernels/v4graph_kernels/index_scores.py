"""Lightning-indexer scores over paged index rows: `sum_h w_h relu(q_h . k_j)`, float32.

See section 2.3.1 of the V4 report. Of many tokens neighbours are scored together: they mostly list
the same rows, which are then loaded and decoded once for all of them.

Shape suffixes: T tokens, H index heads, E channels, C listed rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.launch import (
    check,
    check_inner,
    empty_like_output,
    next_power_of_2,
)
from v4graph_kernels.numerics import decode_e4m3
from v4graph_kernels.tuning import tuned

MANY_TOKENS = 128
"""From this many on one program scores neighbouring tokens; fewer would not fill the machine."""
TOKENS = 16
"""Tokens of such a program."""

_CONFIGS = [
    triton.Config({"BLOCK_C": c}, num_warps=w, num_stages=1)
    for c, w in ((64, 4), (128, 4), (128, 8), (32, 4))
]
_MANY_CONFIGS = [
    triton.Config({"BLOCK_C": c}, num_warps=w, num_stages=s)
    for c, w, s in ((128, 4, 2), (128, 8, 2), (256, 8, 2), (128, 4, 3))
]


@triton.jit
def _listed(t, T, c, C, slots, slots_stride, num_rows):
    """Slots in columns `c` of a token's list, and which are rows; none of a token beyond T."""
    mask = c < tl.where(t < T, C, 0)
    slot = tl.load(slots + t * slots_stride + c, mask=mask, other=-1).to(tl.int64)
    return slot, (slot >= 0) & (slot < num_rows)


@triton.jit
def _load_keys(
    pool, pool32, slot, is_row, page_rows, page_stride,
    DIM: tl.constexpr, PACKED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Rows `[BLOCK_C, DIM]` at `slot`, and the factor of each; zeros where not `is_row`."""
    e = tl.arange(0, DIM)
    if PACKED:
        page = slot // page_rows
        at = slot - page * page_rows
        row = page * page_stride + at * DIM
        code = tl.load(pool + row[:, None] + e[None, :], mask=is_row[:, None], other=0)
        at += (page * page_stride + page_rows * DIM) // 4
        return decode_e4m3(code, dtype), tl.load(pool32 + at, mask=is_row, other=0.0)
    else:
        at = slot[:, None] * page_stride + e[None, :]
        k = tl.load(pool + at, mask=is_row[:, None], other=0.0).to(dtype)
        return k, is_row.to(tl.float32)


@triton.jit
def _score(
    t, T, q, k, factor, is_row, weights, H, q_stride_t, q_stride_h, weights_stride,
    DIM: tl.constexpr, PACKED: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Scores of one token with the rows `k`; -inf where not `is_row`."""
    h = tl.arange(0, BLOCK_H)
    own = h < tl.where(t < T, H, 0)
    at = q + t * q_stride_t + h[:, None] * q_stride_h + tl.arange(0, DIM)[None, :]
    q_tile = tl.load(at, mask=own[:, None], other=0.0)
    w = tl.load(weights + t * weights_stride + h, mask=own, other=0.0).to(tl.float32)
    product = tl.dot(q_tile, tl.trans(k), input_precision="ieee")
    # Not tl.maximum, which would turn a NaN into 0.
    product = tl.where(product < 0.0, 0.0, product) * w[:, None]
    total = tl.sum(product, axis=0)
    if PACKED:
        # Positive, so it may be multiplied after the relu.
        total *= factor
    return tl.where(is_row, total, float("-inf"))


@tuned(_CONFIGS, key=["T_KEY", "H", "PACKED"])
@triton.jit(do_not_specialize=["T_KEY"])
def _scores_kernel(
    q, pool, pool32, slots, weights, out, T, T_KEY, H, C, page_rows, page_stride, num_rows,
    q_stride_t, q_stride_h, slots_stride, weights_stride,
    DIM: tl.constexpr, PACKED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_C listed rows of one token; -inf where none is listed."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    slot, is_row = _listed(t, T, c, C, slots, slots_stride, num_rows)
    score = tl.full((BLOCK_C,), float("-inf"), tl.float32)
    # Lists are as wide as the longest context: most blocks of most steps are empty.
    if tl.max(is_row.to(tl.int32)) > 0:
        k, factor = _load_keys(
            pool, pool32, slot, is_row, page_rows, page_stride, DIM, PACKED, q.dtype.element_ty
        )
        score = _score(
            t, T, q, k, factor, is_row, weights, H, q_stride_t, q_stride_h, weights_stride,
            DIM, PACKED, BLOCK_H,
        )  # fmt: skip
    tl.store(out + t * C + c, score, mask=c < C)


@tuned(_MANY_CONFIGS, key=["T_KEY", "H", "PACKED"])
@triton.jit
def _many_scores_kernel(
    q, pool, pool32, slots, weights, out, T, T_KEY, H, C, page_rows, page_stride, num_rows,
    q_stride_t, q_stride_h, slots_stride, weights_stride,
    DIM: tl.constexpr, PACKED: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_C columns of TOKENS neighbours, whose keys are loaded once where their lists agree.

    The lists of a request's tokens differ only in how far they go; where a block straddles two
    requests each token loads its own.
    """
    first = tl.program_id(1).to(tl.int64) * TOKENS
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    block = first + tl.arange(0, TOKENS)[:, None]
    inside = (block < T) & (c < C)[None, :]
    at = slots + block * slots_stride + c[None, :]
    listed = tl.load(at, mask=inside, other=-1).to(tl.int64)
    listed = tl.where(listed < num_rows, listed, -1)
    union = tl.max(listed, axis=0)
    differ = (listed >= 0) & (listed != union[None, :])
    if tl.max(union) < 0:
        nothing = tl.full((TOKENS, BLOCK_C), float("-inf"), tl.float32)
        tl.store(out + block * C + c[None, :], nothing, mask=inside)
        return
    is_union = union >= 0
    dtype: tl.constexpr = q.dtype.element_ty
    agree = tl.max(tl.max(differ.to(tl.int32), axis=1)) == 0
    if agree:
        k, factor = _load_keys(
            pool, pool32, union, is_union, page_rows, page_stride, DIM, PACKED, dtype
        )
        for i in range(TOKENS):
            t = first + i
            slot, is_row = _listed(t, T, c, C, slots, slots_stride, num_rows)
            score = _score(
                t, T, q, k, factor, is_row, weights, H, q_stride_t, q_stride_h, weights_stride,
                DIM, PACKED, BLOCK_H,
            )  # fmt: skip
            tl.store(out + t * C + c, score, mask=c < tl.where(t < T, C, 0))
    else:
        for i in range(TOKENS):
            t = first + i
            slot, is_row = _listed(t, T, c, C, slots, slots_stride, num_rows)
            k, factor = _load_keys(
                pool, pool32, slot, is_row, page_rows, page_stride, DIM, PACKED, dtype
            )
            score = _score(
                t, T, q, k, factor, is_row, weights, H, q_stride_t, q_stride_h, weights_stride,
                DIM, PACKED, BLOCK_H,
            )  # fmt: skip
            tl.store(out + t * C + c, score, mask=c < tl.where(t < T, C, 0))


def index_scores(
    q_THE: Tensor, pool: Tensor, slots_TC: Tensor, weights_TH: Tensor, *, page_rows: int
) -> Tensor:
    """Scores `[T, C]` float32 of the listed rows; -inf where `slots` lists none.

    Args:
        q_THE: rotated index queries; E a power of two of at least 16, last axis contiguous.
        pool: `[rows, E]`, or uint8 pages of `fp8` rows.
        slots_TC: row ids; negative ids, and ids beyond the pool, list nothing.
        weights_TH: head weights, scale factors included; any floating dtype.

    Raises:
        ValueError: shapes or strides that the kernel cannot address.
    """
    T, H, E = q_THE.shape
    C = slots_TC.shape[1]
    check(E >= 16 and E & (E - 1) == 0, f"index dim {E}: expected a power of two of at least 16")
    check_inner("index_scores", q_THE, pool, slots_TC, weights_TH)
    packed = pool.dtype is torch.uint8
    num_rows, pool32 = pool.shape[0], pool
    if packed:
        need, num_rows, pool32 = page_rows * (E + 4), num_rows * page_rows, pool.view(torch.float32)
        check(
            page_rows > 0 and pool.stride(0) >= need,
            f"pool: pages of {pool.stride(0)} bytes, expected at least {need}",
        )
    else:
        check(pool.shape[1] == E, f"pool: rows of {pool.shape[1]} channels, expected {E}")
    out = empty_like_output(q_THE, (T, C), torch.float32)
    if T == 0 or C == 0:
        return out
    arguments = (
        q_THE, pool, pool32, slots_TC, weights_TH, out, T, next_power_of_2(T), H, C,
        page_rows, pool.stride(0), num_rows, q_THE.stride(0), q_THE.stride(1),
        slots_TC.stride(0), weights_TH.stride(0),
    )  # fmt: skip
    constants = {"DIM": E, "PACKED": packed, "BLOCK_H": max(next_power_of_2(H), 16)}
    # float32 products use no tensor cores, so larger tiles would only fill shared memory.
    if T >= MANY_TOKENS and q_THE.dtype is not torch.float32:
        _many_scores_kernel[lambda m: (triton.cdiv(C, m["BLOCK_C"]), triton.cdiv(T, TOKENS))](
            *arguments, TOKENS=TOKENS, **constants
        )
    else:
        _scores_kernel[lambda m: (T, triton.cdiv(C, m["BLOCK_C"]))](*arguments, **constants)
    return out
