"""Attention of every token to its own lists of cache rows, with a value-less sink (section 2.3).

Shape suffixes: T tokens, H heads, E head_dim, L listed rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(pool: Tensor, slots: Tensor) -> Tensor:
    """Rows of `pool [R, E]` at `slots [...]`; a slot of -1 yields zeros and reads nothing that
    counts (the null row), so that no garbage can enter through 0 * NaN."""
    rows = pool[slots.clamp_min(0)]
    return torch.where((slots >= 0)[..., None], rows, torch.zeros((), dtype=rows.dtype))


def paged_attention(
    q_THE: Tensor,
    window_pool: Tensor,
    window_slots_TL: Tensor,
    compressed_pool: Tensor | None,
    compressed_slots_TL: Tensor | None,
    sink_H: Tensor,
    softmax_scale: float,
) -> Tensor:
    """One softmax over a token's window rows, its compressed rows and the per-head sink.

    Args:
        q_THE: rotated queries `[T, H, E]`.
        window_pool, compressed_pool: `[rows, E]`; a row is key and value at once.
        window_slots_TL, compressed_slots_TL: row ids, int64, -1 where there is none.
        sink_H: float32 logits that take part in the denominator only.

    Returns:
        `[T, H, E]` in the dtype of `q`, before the inverse rotation. A token with no rows gets 0.
    """
    slots, keys = window_slots_TL, gather_rows(window_pool, window_slots_TL)
    if compressed_pool is not None and compressed_slots_TL is not None:
        keys = torch.cat((keys, gather_rows(compressed_pool, compressed_slots_TL)), dim=1)
        slots = torch.cat((slots, compressed_slots_TL), dim=1)
    return attend(q_THE, keys.to(q_THE.dtype), (slots >= 0)[:, None], sink_H, softmax_scale)


def attend(
    q_BQE: Tensor, keys_BLE: Tensor, seen_BQL: Tensor, sink_Q: Tensor, softmax_scale: float
) -> Tensor:
    """Softmax of each query row over the keys it sees and its sink; keys are values too.

    `seen` is bool and broadcasts; scores and softmax are float32. The result has `q`'s dtype.
    """
    scores = torch.bmm(q_BQE, keys_BLE.transpose(1, 2)).float() * softmax_scale
    scores = scores.masked_fill(~seen_BQL, float("-inf"))
    sink = sink_Q[:, None]
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = (scores - top).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + (sink - top).exp())
    return torch.bmm(weights.to(keys_BLE.dtype), keys_BLE)
