"""The compressor: write a step's state rows, pool the windows that it closes, write their rows.

One program closes a window: a softmax over its state rows, channel by channel and in one pass, then
norm, rotation, quantisation and store. For few tokens other programs of the same launch write the
state rows, and a window takes the rows of its own step from the projection: the slots of a window
are looked up among those of the step, so no program waits for another. For many tokens the lookup
would cost more than the launch that it saves.

Shape suffixes: T tokens, C closing windows, S state rows of a window, W state width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.launch import check, check_inner, next_power_of_2
from v4graph_kernels.numerics import through
from v4graph_kernels.store_rows import (
    AMAX_FLOOR,
    GROUP,
    normalise,
    rope_pairs,
    rotate,
    store_row,
    target,
)

FEW_TOKENS = 256
"""More tokens than this write their state rows in a launch of their own."""

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _write_state(
    t, projected, ape, positions, state_slots, state,
    projected_stride, state_stride, num_states,
    RATIO: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    slot = tl.load(state_slots + t).to(tl.int64)
    if (slot > 0) & (slot < num_states):
        c = tl.arange(0, WIDTH_PAD)
        row = projected + t.to(tl.int64) * projected_stride
        phase = tl.load(positions + t) % RATIO
        kv = tl.load(row + c, mask=c < WIDTH, other=0.0)
        score = tl.load(row + WIDTH + c, mask=c < WIDTH, other=0.0)
        score += tl.load(ape + phase * WIDTH + c, mask=c < WIDTH, other=0.0)
        to = state + slot * state_stride + c
        tl.store(to, kv, mask=c < WIDTH)
        tl.store(to + WIDTH, score, mask=c < WIDTH)


@triton.jit(do_not_specialize=["T", "C"])
def _compressor_kernel(
    projected, ape, positions, state_slots, state, read_slots, closing, freqs, weight, slots,
    pool, alias, T, C, projected_stride, state_stride, num_states,
    page_rows, page_stride, num_rows, eps, floor, least,
    SPAN: tl.constexpr, RATIO: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
    ROPE: tl.constexpr, LOOK: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr,
    T_PAD: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    """Programs [0, C) close a window each, those behind them write a token's state row each."""
    program = tl.program_id(0)
    if program >= C:
        _write_state(
            program - C, projected, ape, positions, state_slots, state,
            projected_stride, state_stride, num_states, RATIO, WIDTH, WIDTH_PAD,
        )  # fmt: skip
        return
    slot = tl.load(slots + program).to(tl.int64)
    if (slot <= 0) | (slot >= num_rows):
        return
    c = tl.arange(0, BLOCK)[None, :]
    c_in = c < DIM
    top = tl.full((BLOCK,), least, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK,), tl.float32)
    if LOOK:
        t = tl.arange(0, T_PAD)[None, :]
        written = tl.load(state_slots + t, mask=t < T, other=-1)
    for start in range(0, SPAN, ROWS):
        j = start + tl.arange(0, ROWS)
        listed = tl.load(read_slots + program.to(tl.int64) * SPAN + j, mask=j < SPAN, other=-1)
        seen = (listed >= 0) & (listed < num_states)
        # With overlap the first half of the channels belongs to the window before.
        own = tl.where(j >= RATIO, WIDTH - DIM, 0)[:, None] + c
        stored = seen
        if LOOK:
            same = (listed[:, None] == written) & (listed > 0)[:, None]
            token = tl.max(tl.where(same, t, -1), axis=1).to(tl.int64)
            stored = seen & (token < 0)
        at = tl.where(stored, listed, 0)[:, None] * state_stride + own
        here = stored[:, None] & c_in
        kv = tl.load(state + at, mask=here, other=0.0)
        score = tl.load(state + at + WIDTH, mask=here, other=least)
        if LOOK:
            fresh = seen & (token >= 0)
            phase = tl.load(positions + token, mask=fresh, other=0) % RATIO
            at = tl.where(fresh, token, 0)[:, None] * projected_stride + own
            here = fresh[:, None] & c_in
            new = tl.load(projected + at + WIDTH, mask=here, other=0.0)
            new += tl.load(ape + phase[:, None] * WIDTH + own, mask=here, other=0.0)
            kv = tl.where(here, tl.load(projected + at, mask=here, other=0.0), kv)
            score = tl.where(here, new, score)
        highest = tl.maximum(top, tl.max(score, axis=0))
        shrink = tl.exp(top - highest)
        share = tl.exp(score - highest[None, :])
        total = total * shrink + tl.sum(share, axis=0)
        acc = acc * shrink + tl.sum(share * kv, axis=0)
        top = highest
    pooled = tl.where(tl.arange(0, BLOCK) < DIM, through(acc / total, dtype), 0.0)
    value = normalise(pooled, weight, eps, DIM, BLOCK, dtype)
    first = tl.maximum(tl.load(closing + program) - (RATIO - 1), 0).to(tl.float32)
    pair, is_rope = rope_pairs(DIM - ROPE, ROPE, BLOCK)
    angle = first * tl.load(freqs + pair, mask=is_rope, other=0.0)
    value = rotate(value, tl.cos(angle), tl.sin(angle), is_rope, BLOCK, dtype)
    store_row(
        value, slot, pool, alias, page_rows, page_stride, floor, DIM, ROPE, FORMAT, GROUPS, BLOCK
    )


def close_windows(
    projected: Tensor,
    ape: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    state_pool: Tensor,
    read_slots: Tensor,
    closing_positions: Tensor,
    freqs: Tensor,
    norm_weight: Tensor,
    slots: Tensor,
    pool: Tensor,
    *,
    overlap: bool,
    eps: float,
    row_format: str,
    page_rows: int,
    dtype: torch.dtype,
) -> None:
    """Write the state rows of a step, then the compressed rows of the windows that it closes.

    Args:
        projected: float32 `[T, 2 W]`, (kv, score) of each token; any row stride.
        ape: float32 `[ratio, W]`. positions: `[T]` int64.
        state_slots: `[T]` int64, distinct where positive. state_pool: float32 `[rows, 2 W]`.
        read_slots: `[C, S]` int64, oldest row first; S is the ratio, twice that with `overlap`.
        closing_positions: `[C]` int64, the last one of each window.
        freqs: float32 `[rope_dim / 2]`. norm_weight: `[dim]`; W is dim, or 2 dim with `overlap`.
        slots: `[C]` int64 into `pool`. 0 and ids outside a pool write nothing and list nothing.
        row_format: `fp8_ds` or `fp8` for a uint8 pool. dtype: what the pooled row is rounded to.

    Raises:
        ValueError: shapes, strides or dtypes that the kernel cannot address.
    """
    T, C, dim, rope_dim = len(positions), len(slots), norm_weight.shape[0], 2 * freqs.shape[0]
    ratio, width = ape.shape
    parts = 2 if overlap else 1
    span = ratio * parts
    expected = {
        "ape": (ape, (ratio, parts * dim)),
        "projected": (projected, (T, 2 * width)),
        "state_slots": (state_slots, (T,)),
        "state_pool": (state_pool, (len(state_pool), 2 * width)),
        "read_slots": (read_slots, (C, span)),
        "closing_positions": (closing_positions, (C,)),
    }
    for name, (tensor, shape) in expected.items():
        check(tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)}, expected {shape}")
        check_inner(name, tensor)
    for name in ("ape", "projected", "state_pool"):
        kind = expected[name][0].dtype
        check(kind is torch.float32, f"{name}: {kind}, expected float32")
    check(ape.is_contiguous() and read_slots.is_contiguous(), "ape, read_slots: not contiguous")
    check_inner("close_windows", positions, freqs, norm_weight, slots)
    check(dtype in _DTYPES, f"dtype: {dtype}, expected one of {', '.join(map(str, _DTYPES))}")
    check((dim - rope_dim) % 2 == 0, f"norm_weight: {dim} channels, expected an even number")
    to = target("pool", pool, row_format, dim, rope_dim, page_rows)
    block = max(next_power_of_2(dim), GROUP)
    look = T <= FEW_TOKENS

    def launch(programs: int, windows: int) -> None:
        if programs == 0:
            return
        _compressor_kernel[(programs,)](
            projected, ape, positions, state_slots, state_pool, read_slots, closing_positions,
            freqs, norm_weight, slots, to.pool, to.alias, T, windows,
            projected.stride(0), state_pool.stride(0), state_pool.shape[0],
            to.page_rows, to.page_stride, to.num_rows, eps, AMAX_FLOOR,
            torch.finfo(torch.float32).min,
            SPAN=span, RATIO=ratio, WIDTH=width, DIM=dim, ROPE=rope_dim, LOOK=look,
            FORMAT=to.row_format, dtype=_DTYPES[dtype], T_PAD=max(next_power_of_2(T), 16),
            ROWS=min(next_power_of_2(span), 16), GROUPS=block // GROUP, BLOCK=block,
            WIDTH_PAD=next_power_of_2(width), num_warps=8 if block > 128 else 4,
        )  # fmt: skip

    if look:
        launch(C + T, C)
    else:
        launch(T, 0)
        launch(C, C)
