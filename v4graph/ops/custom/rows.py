"""Operators that write cache rows, `v4graph::write_kv_rows` and `v4graph::write_index_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.ops.cache import write_rows
from v4graph.ops.custom.library import register
from v4graph.ops.norm import rms_norm
from v4graph.ops.rope import rotate
from v4graph.ops.rows import write_fp8_ds_rows, write_fp8_rows


def _write_kv_rows(
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
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    if cos is not None and sin is not None:
        x = rotate(x, cos, sin)
    if pool.dtype is torch.uint8:
        write_fp8_ds_rows(pool, slots, x, rope_dim, page_rows)
    else:
        write_rows(pool, slots.clamp_min(0), x)


def _write_index_rows(x: Tensor, slots: Tensor, pool: Tensor, *, page_rows: int) -> None:
    if pool.dtype is torch.uint8:
        write_fp8_rows(pool, slots, x, page_rows)
    else:
        write_rows(pool, slots.clamp_min(0), x)


write_kv_rows = register(
    "write_kv_rows(Tensor x, Tensor? norm_weight, Tensor? cos, Tensor? sin, Tensor slots,"
    " Tensor(a!) pool, *, float eps, int rope_dim, int page_rows) -> ()",
    reference=_write_kv_rows,
    fake=lambda *args, **kwargs: None,
    kernel=("cache_rows", "write_kv_rows"),
)
"""Normalise if a weight is given, rotate if cosines are, quantise if the pool is uint8; write.

`x [T, dim]`, `slots [T]` int64, `pool [rows, dim]` or uint8 pages as in `ops/rows.py`, which
`rope_dim` and `page_rows` describe. Slot 0 and negative ones are padding: no real row changes.
"""

write_index_rows = register(
    "write_index_rows(Tensor x, Tensor slots, Tensor(a!) pool, *, int page_rows) -> ()",
    reference=_write_index_rows,
    fake=lambda *args, **kwargs: None,
    kernel=("cache_rows", "write_index_rows"),
)
"""Index keys `x [T, dim]` into `pool [rows, dim]`, or uint8 pages of `fp8` rows; slots as above."""
