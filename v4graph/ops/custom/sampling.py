"""The operator `v4graph::greedy_tokens`: the likeliest token of every row of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.ops.custom.library import register


def _greedy_tokens(logits_RV: Tensor) -> Tensor:
    return logits_RV.argmax(-1)


greedy_tokens = register(
    "greedy_tokens(Tensor logits) -> Tensor",
    reference=_greedy_tokens,
    fake=lambda logits: logits.new_empty(logits.shape[:1], dtype=torch.int64),
    kernel=("greedy", "greedy_tokens"),
)
"""int64 `[R]` of `logits [R, V]`: the highest logit's id, the lowest one among equals; a NaN counts
as the highest."""
