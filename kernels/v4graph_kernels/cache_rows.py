"""Write cache rows: norm, rotation, quantisation and the paged store in one launch.

The row formats are those of `store_rows`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.launch import check, check_inner, next_power_of_2
from v4graph_kernels.store_rows import (
    AMAX_FLOOR,
    GROUP,
    normalise,
    rope_pairs,
    rotate,
    store_row,
    target,
)


@triton.jit
def write_row(
    t, x, weight, cos, sin, slots, pool, alias,
    x_stride, page_rows, page_stride, num_rows, eps, floor,
    DIM: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    FORMAT: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the row of token `t`."""
    slot = tl.load(slots + t).to(tl.int64)
    # Row 0 is padding's; ids outside the pool are never followed.
    if (slot > 0) & (slot < num_rows):
        dtype: tl.constexpr = x.dtype.element_ty
        c = tl.arange(0, BLOCK)
        value = tl.load(x + t.to(tl.int64) * x_stride + c, mask=c < DIM, other=0.0).to(tl.float32)
        if NORM:
            value = normalise(value, weight, eps, DIM, BLOCK, dtype)
        if TURN:
            pair, is_rope = rope_pairs(DIM - ROPE, ROPE, BLOCK)
            at = t * (ROPE // 2) + pair
            co = tl.load(cos + at, mask=is_rope, other=0.0)
            si = tl.load(sin + at, mask=is_rope, other=0.0)
            value = rotate(value, co, si, is_rope, BLOCK, dtype)
        store_row(
            value, slot, pool, alias, page_rows, page_stride, floor,
            DIM, ROPE, FORMAT, GROUPS, BLOCK,
        )  # fmt: skip


@triton.jit
def _write_kernel(
    x, weight, cos, sin, slots, pool, alias,
    x_stride, page_rows, page_stride, num_rows, eps, floor,
    DIM: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    FORMAT: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token. BLOCK covers DIM."""
    write_row(
        tl.program_id(0), x, weight, cos, sin, slots, pool, alias,
        x_stride, page_rows, page_stride, num_rows, eps, floor,
        DIM, ROPE, NORM, TURN, FORMAT, GROUPS, BLOCK,
    )  # fmt: skip


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
    """Write `rotate(rms_norm(x))` into `pool` at `slots`; uint8 pools hold `fp8_ds` rows.

    Args:
        x: `[T, DIM]`, any row stride; norm_weight `[DIM]`, or None to write `x` unnormalised.
        cos, sin: float32 `[T, rope_dim / 2]`, or None to write `x` unrotated.
        slots: `[T]` int64; 0 and ids outside the pool write nothing.
        page_rows: rows of a page of a uint8 pool; not looked at otherwise.

    Raises:
        ValueError: shapes or strides that the kernel cannot address.
    """
    _write(x, norm_weight, cos, sin, slots, pool, "fp8_ds", eps, rope_dim, page_rows)


def write_index_rows(x: Tensor, slots: Tensor, pool: Tensor, *, page_rows: int) -> None:
    """Write index keys `x [T, DIM]` into `pool` at `slots [T]`, as `fp8` rows if it is uint8.

    The scale is a power of two, stored as float32. Slots as in `write_kv_rows`.

    Raises:
        ValueError: shapes or strides that the kernel cannot address.
    """
    _write(x, None, None, None, slots, pool, "fp8", 0.0, 0, page_rows)


def _write(
    x: Tensor,
    norm_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slots: Tensor,
    pool: Tensor,
    row_format: str,
    eps: float,
    rope_dim: int,
    page_rows: int,
) -> None:
    T, dim = x.shape
    to = target("pool", pool, row_format, dim, rope_dim, page_rows)
    check(cos is None or cos.shape == (T, rope_dim // 2), "cos: expected [T, rope_dim / 2]")
    check(cos is None or (dim - rope_dim) % 2 == 0, f"x: {dim} channels, expected an even number")
    check_inner("x", x, norm_weight, slots)
    if T == 0:
        return
    block = max(next_power_of_2(dim), GROUP)
    _write_kernel[(T,)](
        x, norm_weight, None if cos is None else cos.contiguous(),
        None if sin is None else sin.contiguous(), slots, to.pool, to.alias,
        x.stride(0), to.page_rows, to.page_stride, to.num_rows, eps, AMAX_FLOOR,
        DIM=dim, ROPE=rope_dim, NORM=norm_weight is not None, TURN=cos is not None,
        FORMAT=to.row_format, GROUPS=block // GROUP, BLOCK=block,
        num_warps=4 if block > 128 else 1,
    )  # fmt: skip
