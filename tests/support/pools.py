"""Paged pools of every row format, filled with rows, for tests of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from v4graph.ops.rows import (
    fp8_ds_bytes,
    read_fp8_ds_rows,
    read_fp8_rows,
    write_fp8_ds_rows,
    write_fp8_rows,
)

FORMATS = ("f32", "bf16", "fp8_ds")


@dataclass
class Pool:
    """A pool, what its rows mean in float64, and how it is paged."""

    data: Tensor
    values: Tensor
    page_rows: int


def page_bytes(row_format: str, dim: int, rope_dim: int, page_rows: int) -> int:
    """Bytes of a page, with some beyond its rows, as aligned pages have."""
    if row_format == "fp8":
        return page_rows * (dim + 4) + 12
    data, scales = fp8_ds_bytes(dim, rope_dim)
    return -(-page_rows * (data + scales) // data) * data


def empty_pool(
    row_format: str, num_pages: int, page_rows: int, dim: int, rope_dim: int = 0
) -> Tensor:
    """A pool in which every byte is 0x7f: NaN in e4m3, huge in the other formats."""
    if row_format in ("fp8", "fp8_ds"):
        size = page_bytes(row_format, dim, rope_dim, page_rows)
        return torch.full((num_pages, size), 0x7F, dtype=torch.uint8)
    dtype = torch.float32 if row_format == "f32" else torch.bfloat16
    return torch.full((num_pages * page_rows, dim), float("nan"), dtype=dtype)


def filled_pool(
    row_format: str, num_pages: int, page_rows: int, dim: int, rope_dim: int = 0
) -> Pool:
    """Random rows on every page but page 0, which stays poisoned."""
    pool = empty_pool(row_format, num_pages, page_rows, dim, rope_dim)
    num_rows = num_pages * page_rows
    slots = torch.arange(page_rows, num_rows)
    rows = torch.randn(len(slots), dim)
    everything = torch.arange(num_rows)
    if row_format == "fp8_ds":
        write_fp8_ds_rows(pool, slots, rows, rope_dim, page_rows)
        values = read_fp8_ds_rows(pool, everything, dim, rope_dim, page_rows)
    elif row_format == "fp8":
        write_fp8_rows(pool, slots, rows, page_rows)
        values = read_fp8_rows(pool, everything, dim, page_rows)
    else:
        pool[slots] = rows.to(pool.dtype)
        values = pool
    return Pool(pool, values.double(), page_rows)


def random_slots(tokens: int, width: int, counts: list[int], first: int, beyond: int) -> Tensor:
    """Slot lists with `counts` rows of `first` to `beyond - 1` each, -1 scattered between them."""
    out = torch.full((tokens, width), -1)
    for t, n in enumerate(counts):
        places = torch.randperm(width)[:n]
        out[t, places] = first + torch.randperm(beyond - first)[:n]
    return out
