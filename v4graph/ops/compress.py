"""Compressor pooling: a softmax over a window's state rows, per channel (V4 report section 2.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.ops.norm import rms_norm
from v4graph.ops.rope import rotate


def state_rows(kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor) -> Tensor:
    """One f32 state row a token: `[kv, score + ape[position mod ratio]]`, `[T, 2 * width]`."""
    return torch.cat((kv, score + ape[positions % ape.shape[0]]), dim=-1)


def pool_windows(
    rows: Tensor,
    visible: Tensor,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    overlap: bool,
    norm_eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Close windows: pool, cast, normalise and rotate at the window's first position.

    Args:
        rows: state rows of each closing window, oldest first, f32 `[C, span, 2 * width]`; `span`
            is the ratio, or twice the ratio with `overlap` (previous window first).
        visible: `[C, span]` bool, False before the start of the sequence.
        cos, sin: `[C, rope_dim / 2]`.

    Returns:
        `[C, dim]` in `dtype`; `dim` is half the state width with `overlap`.
    """
    kv, score = rows.chunk(2, dim=-1)
    if overlap:
        half, dim = rows.shape[1] // 2, kv.shape[-1] // 2
        kv = torch.cat((kv[:, :half, :dim], kv[:, half:, dim:]), dim=1)
        score = torch.cat((score[:, :half, :dim], score[:, half:, dim:]), dim=1)
    # A wholly invisible row (padding) would be 0 / 0; a finite floor keeps it finite, and real
    # windows always see their own tokens.
    score = score.masked_fill(~visible[..., None], torch.finfo(torch.float32).min)
    kv = kv.masked_fill(~visible[..., None], 0.0)
    pooled = (score.softmax(1) * kv).sum(1).to(dtype)
    return rotate(rms_norm(pooled, norm_weight, norm_eps), cos, sin)
