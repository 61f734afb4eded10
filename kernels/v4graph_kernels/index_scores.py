"""Lightning-indexer scores over paged index rows: `sum_h w_h relu(q_h . k_j)`, float32.

See section 2.3.1 of the V4 report.

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
from v4graph_kernels.numerics import from_e4m3
from v4graph_kernels.tuning import tuned

_CONFIGS = [
    triton.Config({"BLOCK_C": c}, num_warps=w, num_stages=1)
    for c, w in ((64, 4), (128, 4), (128, 8), (32, 4))
]


@tuned(_CONFIGS, key=["T_KEY", "H", "PACKED"])
@triton.jit(do_not_specialize=["T_KEY"])
def _scores_kernel(
    q, pool, pool32, slots, weights, out, T_KEY, H, C, page_rows, page_stride, num_rows,
    q_stride_t, q_stride_h, slots_stride, weights_stride,
    DIM: tl.constexpr, PACKED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_C listed rows of one token; -inf where none is listed."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    slot = tl.load(slots + t * slots_stride + c, mask=c < C, other=-1).to(tl.int64)
    is_row = (slot >= 0) & (slot < num_rows)
    score = tl.full((BLOCK_C,), float("-inf"), tl.float32)
    # Lists are as wide as the longest context: most blocks of most steps are empty.
    if tl.max(is_row.to(tl.int32)) > 0:
        h = tl.arange(0, BLOCK_H)
        e = tl.arange(0, DIM)
        at = q + t * q_stride_t + h[:, None] * q_stride_h + e[None, :]
        q_tile = tl.load(at, mask=(h < H)[:, None], other=0.0)
        w = tl.load(weights + t * weights_stride + h, mask=h < H, other=0.0).to(tl.float32)
        if PACKED:
            page = slot // page_rows
            at = slot - page * page_rows
            row = page * page_stride + at * DIM
            code = tl.load(pool + row[:, None] + e[None, :], mask=is_row[:, None], other=0)
            k = from_e4m3(code).to(q_tile.dtype)
            # Positive, so it may be multiplied after the relu.
            factor = tl.load(
                pool32 + (page * page_stride + page_rows * DIM) // 4 + at, mask=is_row, other=0.0
            )
        else:
            at = slot[:, None] * page_stride + e[None, :]
            k = tl.load(pool + at, mask=is_row[:, None], other=0.0).to(q_tile.dtype)
        product = tl.dot(q_tile, tl.trans(k), input_precision="ieee")
        # Not tl.maximum, which would turn a NaN into 0.
        product = tl.where(product < 0.0, 0.0, product) * w[:, None]
        total = tl.sum(product, axis=0)
        if PACKED:
            total *= factor
        score = tl.where(is_row, total, score)
    tl.store(out + t * C + c, score, mask=c < C)


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
    if T and C:
        _scores_kernel[lambda meta: (T, triton.cdiv(C, meta["BLOCK_C"]))](
            q_THE, pool, pool32, slots_TC, weights_TH, out, next_power_of_2(T), H, C,
            page_rows, pool.stride(0), num_rows, q_THE.stride(0), q_THE.stride(1),
            slots_TC.stride(0), weights_TH.stride(0),
            DIM=E, PACKED=packed, BLOCK_H=max(next_power_of_2(H), 16),
        )  # fmt: skip
    return out
