"""Exact top-k by radix selection: the k largest scores, the lowest positions among equal ones.

A float's bits, made unsigned and monotonic, are searched eight at a time: a histogram of the digit
says which holds the k-th largest. Long rows are cut into parts whose winners are selected again.

Shape suffixes: T tokens, C entries, K selected.
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

BLOCK = 1024
PART_ENTRIES = 8192
"""Least entries of a part."""


@triton.jit
def _keys(scores, positions, at, is_in, FIRST: tl.constexpr):
    """Unsigned keys in the order of the scores, and which of them count.

    FIRST reads float scores; else keys (as int32) that an earlier selection kept, with positions.
    """
    if FIRST:
        score = tl.load(scores + at, mask=is_in, other=0.0)
        score = tl.where(score == 0.0, 0.0, score)  # -0 and 0 are equal
        bits = score.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, ~bits, bits ^ -2147483648)
        return key.to(tl.uint32, bitcast=True), is_in
    else:
        key = tl.load(scores + at, mask=is_in, other=0)
        valid = is_in & (tl.load(positions + at, mask=is_in, other=-1) >= 0)
        return key.to(tl.uint32, bitcast=True), valid


@triton.jit
def _select_kernel(
    scores, positions, num_entries, slots, out_keys, out, C, part_entries, stride, slots_stride,
    FIRST: tl.constexpr, KEEP_KEYS: tl.constexpr, HAS_SLOTS: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best K of one part of one token's entries, in order of position, -1 behind them."""
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    to = (t * tl.num_programs(1) + part) * K
    begin = part * part_entries
    end = tl.minimum(begin + part_entries, C)
    if FIRST:
        end = tl.minimum(end.to(tl.int64), tl.load(num_entries + t).to(tl.int64)).to(tl.int32)
    row = t * stride
    bins = tl.arange(0, 256)
    prefix = tl.zeros((), tl.uint32)
    wanted = tl.full((), K, tl.int32)
    for digit in tl.static_range(4):
        hist = tl.zeros((256,), tl.int32)
        for start in range(begin, end, BLOCK):
            col = start + tl.arange(0, BLOCK)
            key, valid = _keys(scores, positions, row + col, col < end, FIRST)
            if digit > 0:
                valid = valid & ((key >> (32 - 8 * digit)) == prefix)
            value = ((key >> (24 - 8 * digit)) & 255).to(tl.int32)
            hist += tl.histogram(value, 256, mask=valid)
        if digit == 0:
            wanted = tl.minimum(wanted, tl.sum(hist))
        # Entries with this digit or a larger one.
        at_least = tl.sum(hist) - tl.cumsum(hist, 0) + hist
        chosen = tl.max(tl.where(at_least >= wanted, bins, 0))
        wanted -= tl.sum(tl.where(bins > chosen, hist, 0))
        prefix = (prefix << 8) | chosen.to(tl.uint32)
    # `prefix` is the k-th largest key, and `wanted` of those equal to it are taken.
    taken = tl.zeros((), tl.int32)
    ties = tl.zeros((), tl.int32)
    for start in range(begin, end, BLOCK):
        col = start + tl.arange(0, BLOCK)
        key, valid = _keys(scores, positions, row + col, col < end, FIRST)
        is_tie = (valid & (key == prefix)).to(tl.int32)
        rank = ties + tl.cumsum(is_tie, 0)
        take = (valid & (key > prefix)) | ((is_tie > 0) & (rank <= wanted))
        place = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        if FIRST:
            found = col.to(tl.int64)
        else:
            found = tl.load(positions + row + col, mask=take, other=-1).to(tl.int64)
        if HAS_SLOTS:
            found = tl.load(slots + t * slots_stride + found, mask=take, other=-1).to(tl.int64)
        # `place` stays below K; the mask guards memory should a key change while it is read.
        fits = take & (place < K)
        tl.store(out + to + place, found.to(out.dtype.element_ty), mask=fits)
        if KEEP_KEYS:
            tl.store(out_keys + to + place, key.to(tl.int32, bitcast=True), mask=fits)
        taken += tl.sum(take.to(tl.int32))
        ties += tl.sum(is_tie)
    k = tl.arange(0, K_PAD)
    none = tl.full((K_PAD,), -1, tl.int64).to(out.dtype.element_ty)
    tl.store(out + to + k, none, mask=(k >= taken) & (k < K))


def select_rows(
    scores_TC: Tensor, num_entries_T: Tensor, slots_TC: Tensor | None, *, topk: int
) -> Tensor:
    """The best `topk` of each token's visible entries, int64 `[T, min(topk, C)]`, -1 behind.

    Args:
        scores_TC: float32; entry j of token t counts when `j < num_entries[t]`.
        slots_TC: if given, the result holds `slots[t, j]` instead of j.

    Returns:
        Entries in order of position. Equal scores select the lowest position; NaN is largest.

    Raises:
        ValueError: shapes, strides or dtypes that the kernel cannot address.
    """
    T, C = scores_TC.shape
    K = min(topk, C)
    check(scores_TC.dtype is torch.float32, f"scores: {scores_TC.dtype}, expected float32")
    check(slots_TC is None or slots_TC.shape == (T, C), "slots: expected the shape of the scores")
    check_inner("select_rows", scores_TC, num_entries_T, slots_TC)
    out = empty_like_output(scores_TC, (T, K), torch.int64)
    if T == 0 or K == 0:
        return out
    parts = splits_for(T, max(C // max(PART_ENTRIES, 4 * K), 1))
    part_entries = triton.cdiv(triton.cdiv(C, parts), BLOCK) * BLOCK
    parts = triton.cdiv(C, part_entries)
    constants = {"K": K, "K_PAD": next_power_of_2(K), "BLOCK": BLOCK, "num_warps": 8}
    has_slots = slots_TC is not None
    stride = slots_TC.stride(0) if has_slots else 0
    if parts == 1:
        _select_kernel[(T, 1)](
            scores_TC, scores_TC, num_entries_T, slots_TC, out, out, C, C, scores_TC.stride(0),
            stride, FIRST=True, KEEP_KEYS=False, HAS_SLOTS=has_slots, **constants,
        )  # fmt: skip
        return out
    keys = empty_like_output(scores_TC, (T, parts, K), torch.int32)
    found = empty_like_output(scores_TC, (T, parts, K), torch.int32)
    _select_kernel[(T, parts)](
        scores_TC, scores_TC, num_entries_T, None, keys, found, C, part_entries,
        scores_TC.stride(0), 0, FIRST=True, KEEP_KEYS=True, HAS_SLOTS=False, **constants,
    )  # fmt: skip
    _select_kernel[(T, 1)](
        keys, found, num_entries_T, slots_TC, keys, out, parts * K, parts * K, parts * K,
        stride, FIRST=False, KEEP_KEYS=False, HAS_SLOTS=has_slots, **constants,
    )  # fmt: skip
    return out
