"""Write cache rows: norm, rotation, quantisation and the paged store in one launch.

Row formats, for a row of DIM channels whose last ROPE ones are rotated:
  plain    `[rows, DIM]` in a floating dtype.
  fp8_ds   uint8 `[pages, page_bytes]`; a page holds its rows' data (DIM - ROPE e4m3 bytes and ROPE
           bf16 values each), then their scale bytes: one e8m0 byte for 64 channels, padded to 8.
  fp8      uint8 `[pages, page_bytes]`; DIM e4m3 bytes a row, then one float32 scale a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.launch import check, check_inner, next_power_of_2
from v4graph_kernels.numerics import e8m0_of, exp2_of, round_bf16, through, to_e4m3

GROUP = 64
AMAX_FLOOR = 1e-4


@triton.jit
def _write_kv_kernel(
    x, weight, cos, sin, slots, pool, pool16,
    x_stride, page_rows, page_stride, num_rows, eps, floor,
    DIM: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    PACKED: tl.constexpr, GROUPS: tl.constexpr, DATA: tl.constexpr, SCALES: tl.constexpr,
    G: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One token. BLOCK covers DIM, HALF covers ROPE / 2, GROUPS of G channels are BLOCK."""
    t = tl.program_id(0)
    slot = tl.load(slots + t).to(tl.int64)
    # Row 0 is padding's; ids outside the pool are never followed.
    if (slot > 0) & (slot < num_rows):
        NOPE: tl.constexpr = DIM - ROPE
        dtype: tl.constexpr = x.dtype.element_ty
        row = x + t.to(tl.int64) * x_stride
        c = tl.arange(0, BLOCK)
        # The rotated channels by pairs, so that no shuffle is needed.
        p = tl.arange(0, HALF)
        in_rope = p < ROPE // 2
        value = tl.load(row + c, mask=c < DIM, other=0.0).to(tl.float32)
        even = tl.load(row + NOPE + 2 * p, mask=in_rope, other=0.0).to(tl.float32)
        odd = tl.load(row + NOPE + 2 * p + 1, mask=in_rope, other=0.0).to(tl.float32)
        if NORM:
            factor = tl.rsqrt(tl.sum(value * value) / DIM + eps)
            value *= factor * tl.load(weight + c, mask=c < DIM, other=0.0).to(tl.float32)
            even *= factor * tl.load(weight + NOPE + 2 * p, mask=in_rope, other=0.0).to(tl.float32)
            odd *= factor * tl.load(weight + NOPE + 2 * p + 1, mask=in_rope, other=0.0).to(
                tl.float32
            )
            value, even, odd = through(value, dtype), through(even, dtype), through(odd, dtype)
        if TURN:
            co = tl.load(cos + t * (ROPE // 2) + p, mask=in_rope, other=0.0)
            si = tl.load(sin + t * (ROPE // 2) + p, mask=in_rope, other=0.0)
            even, odd = even * co - odd * si, odd * co + even * si
            even, odd = through(even, dtype), through(odd, dtype)
        if PACKED:
            page = slot // page_rows
            at = slot - page * page_rows
            data = page * page_stride + at * DATA
            tail = (data + NOPE) // 2 + 2 * p
            tl.store(pool16 + tail, round_bf16(even).to(tl.int16), mask=in_rope)
            tl.store(pool16 + tail + 1, round_bf16(odd).to(tl.int16), mask=in_rope)
            size = tl.where(c < NOPE, tl.abs(value), 0.0)
            amax = tl.max(tl.reshape(size, (GROUPS, G)), axis=1)
            byte = e8m0_of(tl.maximum(amax, floor))
            scaled = tl.reshape(value, (GROUPS, G)) * exp2_of(254 - byte)[:, None]
            code = tl.reshape(to_e4m3(scaled), (BLOCK,))
            tl.store(pool + data + c, code.to(tl.uint8), mask=c < NOPE)
            g = tl.arange(0, GROUPS)
            scales = page * page_stride + page_rows * DATA + at * SCALES
            tl.store(pool + scales + g, byte.to(tl.uint8), mask=g * G < NOPE)
        else:
            out = pool + slot * page_stride
            to: tl.constexpr = pool.dtype.element_ty
            tail = NOPE + 2 * p
            if to == tl.bfloat16:
                # Bits, for the interpreter truncates; `pool16` is the same memory.
                bits = pool16 + slot * page_stride
                tl.store(bits + c, round_bf16(value).to(tl.int16), mask=c < NOPE)
                tl.store(bits + tail, round_bf16(even).to(tl.int16), mask=in_rope)
                tl.store(bits + tail + 1, round_bf16(odd).to(tl.int16), mask=in_rope)
            else:
                tl.store(out + c, value.to(to), mask=c < NOPE)
                tl.store(out + tail, even.to(to), mask=in_rope)
                tl.store(out + tail + 1, odd.to(to), mask=in_rope)


def write_kv_rows(
    x: Tensor,
    norm_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    pool: Tensor,
    *,
    eps: float,
    rope_dim: int,
    page_rows: int,
) -> None:
    """Write `rotate(rms_norm(x))` into `pool` at `slots`; see the module for the formats.

    Args:
        x: `[T, DIM]`, any row stride; norm_weight `[DIM]`, or None to write `x` unnormalised.
        cos, sin: float32 `[T, rope_dim / 2]`, or None to write `x` unrotated.
        slots: `[T]` int64; 0 and ids outside the pool write nothing.
        page_rows: rows of a page of a uint8 pool; not looked at otherwise.

    Raises:
        ValueError: shapes or strides that the kernel cannot address.
    """
    T, dim = x.shape
    packed = pool.dtype is torch.uint8
    check(0 <= rope_dim <= dim and rope_dim % 2 == 0, f"rope_dim {rope_dim}: of {dim} channels")
    check(cos is None or cos.shape == (T, rope_dim // 2), "cos: expected [T, rope_dim / 2]")
    check_inner("write_kv_rows", x, norm_weight, pool, slots)
    nope = dim - rope_dim
    data, scales = nope + 2 * rope_dim, -(-nope // (GROUP * 8)) * 8
    if packed:
        check(page_rows > 0, f"page_rows {page_rows}: expected a positive number for a uint8 pool")
        need = page_rows * (data + scales)
        check(
            pool.stride(0) >= need and pool.stride(0) % 2 == 0 and nope % 2 == 0,
            f"pool: pages of {pool.stride(0)} bytes, expected an even number of at least {need}",
        )
        num_rows, pool16 = pool.shape[0] * page_rows, pool.view(torch.int16)
    else:
        check(pool.shape[1] == dim, f"pool: rows of {pool.shape[1]} channels, expected {dim}")
        num_rows = pool.shape[0]
        pool16 = pool.view(torch.int16) if pool.dtype is torch.bfloat16 else pool
    if T == 0:
        return
    block = max(next_power_of_2(dim), GROUP)
    _write_kv_kernel[(T,)](
        x, norm_weight, None if cos is None else cos.contiguous(),
        None if sin is None else sin.contiguous(), slots, pool, pool16,
        x.stride(0), page_rows, pool.stride(0), num_rows, eps, AMAX_FLOOR,
        DIM=dim, ROPE=rope_dim, NORM=norm_weight is not None, TURN=cos is not None,
        PACKED=packed, GROUPS=block // GROUP, DATA=data, SCALES=scales, G=GROUP,
        BLOCK=block, HALF=max(next_power_of_2(rope_dim // 2), 1), num_warps=4,
    )  # fmt: skip


@triton.jit
def _write_index_kernel(
    x, slots, pool, pool32, x_stride, page_rows, page_stride, num_rows, floor,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    slot = tl.load(slots + t).to(tl.int64)
    if (slot > 0) & (slot < num_rows):
        c = tl.arange(0, BLOCK)
        value = tl.load(x + t.to(tl.int64) * x_stride + c, mask=c < DIM, other=0.0).to(tl.float32)
        byte = e8m0_of(tl.maximum(tl.max(tl.abs(value)), floor))
        page = slot // page_rows
        at = slot - page * page_rows
        code = to_e4m3(value * exp2_of(254 - byte)).to(tl.uint8)
        tl.store(pool + page * page_stride + at * DIM + c, code, mask=c < DIM)
        tl.store(pool32 + (page * page_stride + page_rows * DIM) // 4 + at, exp2_of(byte))


def write_index_rows(x: Tensor, slots: Tensor, pool: Tensor, *, page_rows: int) -> None:
    """Write index keys `x [T, DIM]` into `pool` at `slots [T]`, as fp8 rows if it is uint8.

    The scale is a power of two, stored as float32. Slots as in `write_kv_rows`.

    Raises:
        ValueError: shapes or strides that the kernel cannot address.
    """
    T, dim = x.shape
    if pool.dtype is not torch.uint8:
        write_kv_rows(x, None, None, None, slots, pool, eps=0.0, rope_dim=0, page_rows=page_rows)
        return
    check_inner("write_index_rows", x, slots, pool)
    need = page_rows * (dim + 4)
    check(
        page_rows > 0 and pool.stride(0) >= need and pool.stride(0) % 4 == 0 and dim % 4 == 0,
        f"pool: pages of {pool.stride(0)} bytes, expected a multiple of 4 of at least {need}",
    )
    if T:
        _write_index_kernel[(T,)](
            x, slots, pool, pool.view(torch.float32), x.stride(0), page_rows, pool.stride(0),
            pool.shape[0] * page_rows, AMAX_FLOOR, DIM=dim, BLOCK=next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
