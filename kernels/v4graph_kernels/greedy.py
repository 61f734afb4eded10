"""The likeliest token of each row of logits; the lowest id among equals, in every run.

A row is cut into parts where rows are few; then a second launch joins the parts. Values are
compared as integers that order like them: -0 equals 0, and NaN is above all, as in `torch.argmax`.
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

BLOCK = 4096
LEAST_PART = 8192
"""Logits of a part, at least; shorter ones read less than they cost to join."""

_BELOW_ALL = tl.constexpr(-(2**31))


@triton.jit
def _order_of(value):
    """int32 that order as float32 `value` do."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(value != value, 0x7FFFFFFF, order)


@triton.jit
def _first_of_highest(order, index):
    """The highest order, and the lowest index that has it."""
    highest = tl.max(order)
    return highest, tl.min(tl.where(order == highest, index, 0x7FFFFFFF))


@triton.jit
def _part_kernel(
    logits, tokens, orders, ids, stride, V, part_cols, parts,
    JOINED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One part of a row; with a single part its token."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    first = part * part_cols
    end = tl.minimum(first + part_cols, V)
    best = tl.full((BLOCK,), _BELOW_ALL, tl.int32)
    index = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    for start in range(first, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < end, other=0.0)
        order = tl.where(i < end, _order_of(value.to(tl.float32)), _BELOW_ALL)
        # Not `>=`: a lane keeps the first of equals.
        higher = order > best
        best, index = tl.where(higher, order, best), tl.where(higher, i, index)
    highest, token = _first_of_highest(best, index)
    if JOINED:
        tl.store(tokens + row, token.to(tl.int64))
    else:
        tl.store(orders + row * parts + part, highest)
        tl.store(ids + row * parts + part, token)


@triton.jit
def _join_kernel(orders, ids, tokens, parts, PARTS: tl.constexpr):
    row = tl.program_id(0)
    s = tl.arange(0, PARTS)
    order = tl.load(orders + row * parts + s, mask=s < parts, other=_BELOW_ALL)
    index = tl.load(ids + row * parts + s, mask=s < parts, other=0x7FFFFFFF)
    _, token = _first_of_highest(order, index)
    tl.store(tokens + row, token.to(tl.int64))


def greedy_tokens(logits_RV: Tensor, *, num_parts: int = 0) -> Tensor:
    """int64 `[R]`: the index of the highest value of each row, the lowest among equals.

    Args:
        logits_RV: any floating dtype, any row stride; V below 2^31.
        num_parts: into how many parts a row is cut; 0 chooses.

    Raises:
        ValueError: no logits, or strides that the kernel cannot address.
    """
    R, V = logits_RV.shape
    check(0 < V < 2**31 - BLOCK, f"logits: {V} in a row, expected at least one, below 2^31")
    check_inner("greedy_tokens", logits_RV)
    tokens = empty_like_output(logits_RV, (R,), torch.int64)
    if R == 0:
        return tokens
    parts = num_parts or splits_for(R, max(V // LEAST_PART, 1))
    part_cols = triton.cdiv(V, parts)
    parts = triton.cdiv(V, part_cols)
    orders = ids = tokens
    if parts > 1:
        orders = empty_like_output(logits_RV, (R, parts), torch.int32)
        ids = empty_like_output(logits_RV, (R, parts), torch.int32)
    _part_kernel[(R, parts)](
        logits_RV, tokens, orders, ids, logits_RV.stride(0), V, part_cols, parts,
        JOINED=parts == 1, BLOCK=min(BLOCK, next_power_of_2(V)), num_warps=8,
    )  # fmt: skip
    if parts > 1:
        _join_kernel[(R,)](orders, ids, tokens, parts, PARTS=next_power_of_2(parts), num_warps=1)
    return tokens
