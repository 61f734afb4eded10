"""Cache rows in FP8: the `fp8_ds` row of 584 bytes and the `fp8` index row of 132, in pages.

Pools are uint8 `[pages, page_bytes]`; row r is row `r % page_rows` of page `r // page_rows`.

`fp8_ds`, `dim` channels of which the last `rope` are rotated: the page's rows of `dim - rope` e4m3
bytes and `rope` bf16 values come first, then for each row one e8m0 scale byte for every 64
quantised channels, padded to a multiple of 8 (FlashMLA's paged layout). `fp8`: rows of `dim` e4m3
bytes, then one float32 scale for each row.

A scale is the least power of two that brings the group's largest value within 448, the largest
value being taken as at least 1e-4 (the official inference code's rule).

Shape suffixes: any leading axes, E channels, R rope channels, G groups, B bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 64
SCALE_ALIGN = 8
AMAX_FLOOR = 1e-4
E4M3_MAX = 448.0


def fp8_ds_bytes(dim: int, rope_dim: int) -> tuple[int, int]:
    """Data bytes and scale bytes of an `fp8_ds` row: (576, 8) for 512 channels, 64 rotated."""
    nope = dim - rope_dim
    return nope + 2 * rope_dim, -(-nope // (GROUP * SCALE_ALIGN)) * SCALE_ALIGN


def power_of_two_exponent(amax: Tensor) -> Tensor:
    """Least n with `amax <= 448 * 2^n`, int32, for float32 `amax`, which is floored at 1e-4.

    448 = 1.75 * 2^8: the exponent and a comparison of the mantissa say it exactly.
    """
    bits = amax.float().clamp_min(AMAX_FLOOR).view(torch.int32)
    return (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)


def _quantise(x_GE: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 bytes of groups on the last axis, and the exponents of their scales."""
    exponent = power_of_two_exponent(x_GE.abs().amax(-1))
    scaled = x_GE.float() * torch.exp2(-exponent.float())[..., None]
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, exponent


def pack_fp8_ds(x_E: Tensor, rope_dim: int) -> tuple[Tensor, Tensor]:
    """Data and scale bytes, uint8 `[..., data]` and `[..., scales]`, of rows `x [..., dim]`."""
    nope = x_E.shape[-1] - rope_dim
    _, num_scales = fp8_ds_bytes(x_E.shape[-1], rope_dim)
    groups = -(-nope // GROUP)
    padded = torch.nn.functional.pad(x_E[..., :nope].float(), (0, groups * GROUP - nope))
    codes, exponent = _quantise(padded.unflatten(-1, (groups, GROUP)))
    rope = x_E[..., nope:].to(torch.bfloat16).contiguous().view(torch.uint8)
    data = torch.cat((codes.flatten(-2)[..., :nope], rope), dim=-1)
    scales = (exponent + 127).to(torch.uint8)
    return data, torch.nn.functional.pad(scales, (0, num_scales - groups))


def unpack_fp8_ds(data_B: Tensor, scales_B: Tensor, rope_dim: int) -> Tensor:
    """float32 rows `[..., dim]` from their data and scale bytes."""
    nope = data_B.shape[-1] - 2 * rope_dim
    codes = data_B[..., :nope].contiguous().view(torch.float8_e4m3fn).float()
    factors = torch.exp2(scales_B.float() - 127).repeat_interleave(GROUP, -1)[..., :nope]
    rope = data_B[..., nope:].contiguous().view(torch.bfloat16).float()
    return torch.cat((codes * factors, rope), dim=-1)


def _page_parts(pool: Tensor, page_rows: int, data: int, scales: int) -> tuple[Tensor, Tensor]:
    """Views `[pages, page_rows, data]` and `[pages, page_rows, scales]` of a pool."""
    n = page_rows * data
    return (
        pool[:, :n].unflatten(1, (page_rows, data)),
        pool[:, n : n + page_rows * scales].unflatten(1, (page_rows, scales)),
    )


def write_fp8_ds_rows(
    pool: Tensor, slots: Tensor, rows: Tensor, rope_dim: int, page_rows: int
) -> None:
    """Quantise `rows [T, dim]` into `pool` at `slots [T]`, in place; the null row takes padding.

    Bytes that pad the scales keep what they hold.
    """
    dim = rows.shape[-1]
    into_data, into_scales = _page_parts(pool, page_rows, *fp8_ds_bytes(dim, rope_dim))
    data, scales = pack_fp8_ds(rows, rope_dim)
    slots, groups = slots.clamp_min(0), -(-(dim - rope_dim) // GROUP)
    into_data[slots // page_rows, slots % page_rows] = data
    into_scales[..., :groups][slots // page_rows, slots % page_rows] = scales[:, :groups]


def read_fp8_ds_rows(
    pool: Tensor, slots: Tensor, dim: int, rope_dim: int, page_rows: int
) -> Tensor:
    """float32 rows `[..., dim]` of `pool` at `slots [...]`; -1 yields zeros like `gather_rows`."""
    parts = _page_parts(pool, page_rows, *fp8_ds_bytes(dim, rope_dim))
    at = slots.clamp_min(0)
    data, scales = (part[at // page_rows, at % page_rows] for part in parts)
    rows = unpack_fp8_ds(data, scales, rope_dim)
    return torch.where((slots >= 0)[..., None], rows, 0.0)


def empty_page(pool: Tensor, page_rows: int, dim: int, rope_dim: int) -> Tensor:
    """A pool of one page of `page_rows` rows, in the format and on the device of `pool`."""
    if pool.dtype is not torch.uint8:
        return pool.new_zeros((page_rows, dim))
    return pool.new_zeros((1, page_rows * sum(fp8_ds_bytes(dim, rope_dim))))


def stored_rows(x_E: Tensor, row_format: str, rope_dim: int = 0) -> Tensor:
    """What `x [..., dim]` reads as once it has been a row of that format, in the dtype of `x`.

    `model` rows keep every bit.
    """
    if row_format == "model":
        return x_E
    if row_format == "fp8_ds":
        return unpack_fp8_ds(*pack_fp8_ds(x_E, rope_dim), rope_dim).to(x_E.dtype)
    if row_format == "fp8":
        codes, exponent = _quantise(x_E)
        scale = torch.exp2(exponent.float())[..., None]
        return (codes.view(torch.float8_e4m3fn).float() * scale).to(x_E.dtype)
    return x_E.to({"f32": torch.float32, "bf16": torch.bfloat16}[row_format]).to(x_E.dtype)


def write_fp8_rows(pool: Tensor, slots: Tensor, rows: Tensor, page_rows: int) -> None:
    """Quantise index keys `rows [T, dim]` into `pool` at `slots [T]`, in place."""
    data, scales = _page_parts(pool, page_rows, rows.shape[-1], 4)
    codes, exponent = _quantise(rows)
    factor = torch.exp2(exponent.float())[:, None].view(torch.uint8)
    slots = slots.clamp_min(0)
    data[slots // page_rows, slots % page_rows] = codes
    scales[slots // page_rows, slots % page_rows] = factor


def read_fp8_rows(pool: Tensor, slots: Tensor, dim: int, page_rows: int) -> Tensor:
    """float32 index keys `[..., dim]` of `pool` at `slots [...]`; -1 yields zeros."""
    at = slots.clamp_min(0)
    data, scales = (
        part[at // page_rows, at % page_rows] for part in _page_parts(pool, page_rows, dim, 4)
    )
    rows = data.view(torch.float8_e4m3fn).float() * scales.contiguous().view(torch.float32)
    return torch.where((slots >= 0)[..., None], rows, 0.0)
