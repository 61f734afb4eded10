"""The operator `v4graph::sparse_attention`: attention over listed rows of pools of any format."""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.ops.attention import attend, gather_rows
from v4graph.ops.custom.library import register
from v4graph.ops.rows import read_fp8_ds_rows


def read_rows(pool: Tensor, slots: Tensor, dim: int, rope_dim: int, page_rows: int) -> Tensor:
    """Rows `[..., dim]` of a pool of any format at `slots [...]`; -1 yields zeros."""
    if pool.dtype is torch.uint8:
        return read_fp8_ds_rows(pool, slots, dim, rope_dim, page_rows)
    return gather_rows(pool, slots)


def _sparse_attention(
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
) -> Tensor:
    dim = q_THE.shape[-1]
    slots = window_slots_TL
    keys = read_rows(window_pool, slots, dim, rope_dim, window_page_rows).to(q_THE.dtype)
    if compressed_pool is not None and compressed_slots_TL is not None:
        more = read_rows(compressed_pool, compressed_slots_TL, dim, rope_dim, compressed_page_rows)
        keys = torch.cat((keys, more.to(q_THE.dtype)), dim=1)
        slots = torch.cat((slots, compressed_slots_TL), dim=1)
    return attend(q_THE, keys, (slots >= 0)[:, None], sink_H, softmax_scale)


sparse_attention = register(
    "sparse_attention(Tensor q, Tensor window_pool, Tensor window_slots, Tensor? compressed_pool,"
    " Tensor? compressed_slots, Tensor sink, float softmax_scale, *, int rope_dim,"
    " int window_page_rows, int compressed_page_rows) -> Tensor",
    reference=_sparse_attention,
    fake=lambda q, *args, **kwargs: q.new_empty(q.shape),
    kernel=("paged_attention", "sparse_attention"),
)
"""`paged_attention` for pools `[rows, dim]` or uint8 pages of `fp8_ds` rows (`ops/rows.py`).

`q [T, H, dim]`, slots `[T, L]` int64 with -1 where there is no row, `sink [H]` float32; the result
is `[T, H, dim]` in the dtype of `q`. Each token has its own lists, so several tokens of a request
see exactly what is causal. `rope_dim` and the page rows describe uint8 pools.
"""
