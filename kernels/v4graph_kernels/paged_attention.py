"""Sparse paged attention: every token's own lists of rows, one softmax with a sink, K = V.

Section 2.3 of the V4 report: `out = sum_j p_j k_j`, `p_j = exp(s_j - M) / (sum_i exp(s_i - M) +
exp(sink - M))`. Lists are cut into parts, each a program's; a second kernel joins them.

Shape suffixes: T tokens, H heads, E head_dim, L listed rows, S parts.
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
    splits_for,
)
from v4graph_kernels.load_rows import load_packed_rows, load_plain_rows, pool_arguments
from v4graph_kernels.tuning import tuned

SCAN = 512
"""Listed slots that one step of the search for used ones looks at."""
MIN_PART = 64
"""Least rows of a part: a shorter one costs more to join than to read."""

_CONFIGS = [
    triton.Config({"BLOCK_H": h, "BLOCK_N": n}, num_warps=w, num_stages=s)
    for h, n, w, s in (
        (16, 32, 8, 2),
        (16, 32, 4, 2),
        (32, 32, 8, 2),
        (32, 64, 8, 2),
        (64, 32, 8, 1),
        (64, 32, 8, 2),
    )
]


@triton.jit
def _used(slots, begin, end, num_rows, SCAN: tl.constexpr):
    """First and behind-last column in [begin, end) that lists a row; (end, begin) if none does."""
    first, last = end, begin
    for start in range(begin, end, SCAN):
        col = start + tl.arange(0, SCAN)
        slot = tl.load(slots + col, mask=col < end, other=-1)
        is_row = (slot >= 0) & (slot < num_rows)
        first = tl.minimum(first, tl.min(tl.where(is_row, col, end)))
        last = tl.maximum(last, tl.max(tl.where(is_row, col + 1, begin)))
    return first, last


@triton.jit
def _attend(
    q, q_r, acc, acc_r, top, total, slots, begin, end, scale,
    pool, pool16, page_rows, page_stride, num_rows,
    NOPE: tl.constexpr, ROPE: tl.constexpr, GROUPS: tl.constexpr, ROPE_PAD: tl.constexpr,
    COLS: tl.constexpr, PACKED: tl.constexpr, BLOCK_N: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Carry the running softmax over the rows that columns [begin, end) of `slots` list.

    Packed rows come as two tiles, quantised and rotated; plain rows as one, and `acc_r` stays zero.
    """
    first, last = _used(slots, begin, end, num_rows, SCAN)
    for start in range(first, last, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + col, mask=col < last, other=-1).to(tl.int64)
        is_row = (slot >= 0) & (slot < num_rows)
        if PACKED:
            k, k_r = load_packed_rows(
                pool, pool16, slot, is_row, page_rows, page_stride,
                NOPE, ROPE, GROUPS, ROPE_PAD, q.dtype, BLOCK_N,
            )  # fmt: skip
            score = tl.dot(q_r, tl.trans(k_r), input_precision="ieee")
            score = tl.dot(q, tl.trans(k), score, input_precision="ieee") * scale
        else:
            k = load_plain_rows(pool, slot, is_row, page_stride, COLS, q.dtype)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(is_row[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        # Before the first row both are -inf, and their difference would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weight, axis=1)
        weight = weight.to(q.dtype)
        acc = tl.dot(weight, k, acc * shrink[:, None], input_precision="ieee")
        if PACKED:
            acc_r = tl.dot(weight, k_r, acc_r * shrink[:, None], input_precision="ieee")
        top = new_top
    return acc, acc_r, top, total


@triton.jit
def _finish(acc, top, total, sink):
    """Divide by the denominator, the sink's part included; 0 where nothing counts."""
    peak = tl.maximum(top, sink)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    shrink = tl.exp(top - base)
    total = total * shrink + tl.exp(sink - base)
    return tl.where(total == 0.0, 0.0, acc * shrink / tl.where(total == 0.0, 1.0, total))


@tuned(_CONFIGS, key=["T_KEY", "H", "HAS_C", "IN_PARTS", "PACKED"])
@triton.jit(do_not_specialize=["T_KEY", "parts", "part_rows"])
def _attention_kernel(
    q, out, part_top, part_total, sink, scale, T_KEY, H, LW, LC, parts, part_rows,
    slots_w, pool_w, pool16_w, page_rows_w, page_stride_w, num_rows_w,
    slots_c, pool_c, pool16_c, page_rows_c, page_stride_c, num_rows_c,
    q_stride_t, q_stride_h, slots_stride_w, slots_stride_c,
    DIM: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, GROUPS: tl.constexpr,
    ROPE_PAD: tl.constexpr, COLS: tl.constexpr, PACKED: tl.constexpr, HAS_C: tl.constexpr,
    IN_PARTS: tl.constexpr, SCAN: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One part of one token's lists for BLOCK_H heads.

    Columns 0 to LW - 1 are window rows, LW to LW + LC - 1 compressed ones. With one part `out` is
    the result; else float32 accumulators `[T, H, S, E]`, with `part_top` and `part_total`,
    `[T, H, S]`. Plain rows are all NOPE.
    """
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(2)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = (h < H)[:, None]
    c = tl.arange(0, COLS)[None, :]
    r = tl.arange(0, ROPE_PAD)[None, :]
    at = q + t * q_stride_t + h[:, None] * q_stride_h
    q_tile = tl.load(at + c, mask=is_head & (c < NOPE), other=0.0)
    q_r = tl.load(at + NOPE + r, mask=is_head & (r < ROPE), other=0.0)
    acc = tl.zeros((BLOCK_H, COLS), tl.float32)
    acc_r = tl.zeros((BLOCK_H, ROPE_PAD), tl.float32)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    begin = part * part_rows
    end = begin + part_rows
    acc, acc_r, top, total = _attend(
        q_tile, q_r, acc, acc_r, top, total, slots_w + t * slots_stride_w,
        tl.minimum(begin, LW), tl.minimum(end, LW), scale,
        pool_w, pool16_w, page_rows_w, page_stride_w, num_rows_w,
        NOPE, ROPE, GROUPS, ROPE_PAD, COLS, PACKED, BLOCK_N, SCAN,
    )  # fmt: skip
    if HAS_C:
        acc, acc_r, top, total = _attend(
            q_tile, q_r, acc, acc_r, top, total, slots_c + t * slots_stride_c,
            tl.minimum(tl.maximum(begin - LW, 0), LC), tl.minimum(tl.maximum(end - LW, 0), LC),
            scale, pool_c, pool16_c, page_rows_c, page_stride_c, num_rows_c,
            NOPE, ROPE, GROUPS, ROPE_PAD, COLS, PACKED, BLOCK_N, SCAN,
        )  # fmt: skip
    row = t * H + h
    if not IN_PARTS:
        s = tl.load(sink + h, mask=h < H, other=0.0).to(tl.float32)[:, None]
        acc_r = _finish(acc_r, top[:, None], total[:, None], s)
        acc = _finish(acc, top[:, None], total[:, None], s)
    else:
        row = row * parts + part
        tl.store(part_top + row, top, mask=h < H)
        tl.store(part_total + row, total, mask=h < H)
    to = out + row[:, None] * DIM
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(to + c, acc.to(dtype), mask=is_head & (c < NOPE))
    if PACKED:
        tl.store(to + NOPE + r, acc_r.to(dtype), mask=is_head & (r < ROPE))


@triton.jit(do_not_specialize=["num_parts"])
def _combine_kernel(
    parts, part_top, part_total, sink, out, H, num_parts,
    DIM: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Join the parts of one token and head."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK_S)
    tops = tl.load(part_top + row * num_parts + s, mask=s < num_parts, other=float("-inf"))
    totals = tl.load(part_total + row * num_parts + s, mask=s < num_parts, other=0.0)
    top = tl.max(tops)
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.exp(tops - base)
    c = tl.arange(0, DIM)
    at = parts + (row * num_parts + s)[:, None] * DIM + c[None, :]
    acc = tl.sum(tl.load(at, mask=(s < num_parts)[:, None], other=0.0) * shrink[:, None], axis=0)
    done = _finish(acc, top, tl.sum(totals * shrink), tl.load(sink + row % H).to(tl.float32))
    tl.store(out + row * DIM + c, done.to(out.dtype.element_ty))


def sparse_attention(
    q_THE: Tensor,
    window_pool: Tensor,
    window_slots_TL: Tensor,
    compressed_pool: Tensor | None,
    compressed_slots_TL: Tensor | None,
    sink_H: Tensor,
    softmax_scale: float,
    *,
    rope_dim: int,
    window_page_rows: int,
    compressed_page_rows: int,
    num_parts: int = 0,
) -> Tensor:
    """Attention of each token to its listed rows; `[T, H, E]` in the dtype of `q`.

    Args:
        q_THE: rotated queries; E a power of two of at least 16, last axis contiguous.
        window_pool, compressed_pool: `[rows, E]`, or uint8 pages of `fp8_ds` rows.
        window_slots_TL, compressed_slots_TL: row ids; negative ids, and ids beyond the pool, list
            nothing and are never followed. A token without rows gets zeros.
        sink_H: logits that take part in the denominator only.
        rope_dim, window_page_rows, compressed_page_rows: the layout of uint8 pools.
        num_parts: into how many parts lists are cut; 0 lets the shapes decide.

    Raises:
        ValueError: shapes or strides that the kernel cannot address.
    """
    T, H, E = q_THE.shape
    check(E >= 16 and E & (E - 1) == 0, f"head_dim {E}: expected a power of two of at least 16")
    check_inner("sparse_attention", q_THE, window_slots_TL, compressed_slots_TL, sink_H)
    window = pool_arguments("window_pool", window_pool, E, rope_dim, window_page_rows)
    LW, LC = window_slots_TL.shape[1], 0
    # Without compressed rows the window's arguments stand in; the kernel does not read them.
    has_c = compressed_pool is not None and compressed_slots_TL is not None
    compressed, slots_c = window, window_slots_TL
    if has_c:
        compressed = pool_arguments(
            "compressed_pool", compressed_pool, E, rope_dim, compressed_page_rows
        )
        slots_c, LC = compressed_slots_TL, compressed_slots_TL.shape[1]
        check(compressed[5] == window[5], "compressed_pool: expected the row format of window_pool")
        has_c = LC > 0
    result = empty_like_output(q_THE, (T, H, E))
    if T == 0:
        return result
    columns = max(LW + LC, 1)
    parts = num_parts or splits_for(T * triton.cdiv(H, 64), triton.cdiv(columns, MIN_PART))
    part_rows = triton.cdiv(columns, parts)
    if not num_parts:
        part_rows = triton.cdiv(part_rows, 32) * 32
    parts = triton.cdiv(columns, part_rows)
    out, top, total = result, result, result
    if parts > 1:
        out = empty_like_output(q_THE, (T, H, parts, E), torch.float32)
        top = empty_like_output(q_THE, (T, H, parts), torch.float32)
        total = empty_like_output(q_THE, (T, H, parts), torch.float32)

    def grid(meta: dict) -> tuple[int, int, int]:
        return T, triton.cdiv(H, meta["BLOCK_H"]), parts

    packed = window[5]
    rope = rope_dim if packed else 0
    groups = next_power_of_2(triton.cdiv(E - rope, 64))
    _attention_kernel[grid](
        q_THE, out, top, total, sink_H, softmax_scale, next_power_of_2(T), H, LW, LC,
        parts, part_rows, window_slots_TL, *window[:5], slots_c, *compressed[:5],
        q_THE.stride(0), q_THE.stride(1), window_slots_TL.stride(0), slots_c.stride(0),
        DIM=E, NOPE=E - rope, ROPE=rope, GROUPS=groups, ROPE_PAD=max(next_power_of_2(rope), 16),
        COLS=groups * 64 if packed else E, PACKED=packed, HAS_C=has_c,
        IN_PARTS=parts > 1, SCAN=SCAN,
    )  # fmt: skip
    if parts > 1:
        _combine_kernel[(T * H,)](
            out, top, total, sink_H, result, H, parts,
            DIM=E, BLOCK_S=next_power_of_2(parts), num_warps=4,
        )  # fmt: skip
    return result
