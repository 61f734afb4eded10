"""Operators around the heads of attention, `v4graph::qkv_rows` and `v4graph::unrope`."""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.ops.custom.library import register
from v4graph.ops.custom.rows import _write_kv_rows
from v4graph.ops.norm import rms_norm
from v4graph.ops.rope import rotate


def _qkv_rows(
    queries: Tensor,
    kv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pool: Tensor,
    *,
    heads: int,
    index_heads: int,
    index_dim: int,
    eps: float,
    rope_dim: int,
    page_rows: int,
) -> tuple[Tensor, Tensor]:
    width = heads * kv.shape[1]
    q = queries[:, :width].unflatten(-1, (heads, kv.shape[1]))
    index_q = queries[:, width:].reshape(len(kv), index_heads, index_dim)
    co, si = cos[:, None], sin[:, None]
    _write_kv_rows(
        kv, kv_norm, cos, sin, slots, pool, eps=eps, rope_dim=rope_dim, page_rows=page_rows
    )
    q = rotate(rms_norm(q, None, eps), co, si)
    return q, rotate(index_q, co, si) if index_heads else torch.empty_like(index_q)


def _fake_qkv(
    queries: Tensor, kv: Tensor, *args: Tensor, heads: int, index_heads: int, index_dim: int, **_
) -> tuple[Tensor, Tensor]:
    T, dim = kv.shape
    return queries.new_empty((T, heads, dim)), queries.new_empty((T, index_heads, index_dim))


qkv_rows = register(
    "qkv_rows(Tensor queries, Tensor kv, Tensor kv_norm, Tensor cos, Tensor sin, Tensor slots,"
    " Tensor(a!) pool, *, int heads, int index_heads, int index_dim, float eps, int rope_dim,"
    " int page_rows) -> (Tensor, Tensor)",
    reference=_qkv_rows,
    fake=_fake_qkv,
    kernel=("heads", "qkv_rows"),
)
"""What attention makes of its projections: the heads' queries, the indexer's, the cache rows.

`queries [T, H E + index_heads index_dim]`; the first `heads` of `E = kv.shape[1]` channels are
normalised head by head without a weight and rotated, `[T, H, E]`; the rest is rotated only, `[T,
index_heads, index_dim]`, empty for `index_heads` 0. `kv [T, E]` is written as `write_kv_rows` does,
normalised and rotated, to `pool` at `slots [T]`. `cos` and `sin` are float32 `[T, rope_dim / 2]`.
"""


def _unrope(x_THE: Tensor, cos: Tensor, sin: Tensor) -> None:
    x_THE.copy_(rotate(x_THE, cos[:, None], -sin[:, None]))


unrope = register(
    "unrope(Tensor(a!) x, Tensor cos, Tensor sin) -> ()",
    reference=_unrope,
    fake=lambda *args: None,
    kernel=("heads", "unrope"),
)
"""Rotate the last channels of the heads' outputs `x [T, H, E]` back, in place.

`cos` and `sin` are the tokens' own, float32 `[T, rope_dim / 2]`.
"""
