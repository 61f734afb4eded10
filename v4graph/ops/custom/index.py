"""Operators of the lightning indexer: scores over paged rows, and the selection of the best."""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.ops.attention import gather_rows
from v4graph.ops.custom.library import register
from v4graph.ops.indexer import index_scores, select_topk
from v4graph.ops.rows import read_fp8_rows


def _paged_index_scores(
    q_THE: Tensor, pool: Tensor, slots_TC: Tensor, weights_TH: Tensor, *, page_rows: int
) -> Tensor:
    if pool.dtype is torch.uint8:
        keys = read_fp8_rows(pool, slots_TC, q_THE.shape[-1], page_rows)
    else:
        keys = gather_rows(pool, slots_TC)
    scores = index_scores(q_THE, keys, weights_TH.float())
    return scores.masked_fill(slots_TC < 0, float("-inf"))


def _select_rows(
    scores_TC: Tensor, num_entries_T: Tensor, slots_TC: Tensor | None, *, topk: int
) -> Tensor:
    beyond = scores_TC.shape[1]
    chosen = select_topk(scores_TC, num_entries_T, topk)
    chosen = torch.where(chosen < 0, beyond, chosen).sort(dim=1).values
    is_chosen = chosen < beyond
    if slots_TC is not None:
        chosen = slots_TC.gather(1, torch.where(is_chosen, chosen, 0))
    return torch.where(is_chosen, chosen, -1)


paged_index_scores = register(
    "paged_index_scores(Tensor q, Tensor pool, Tensor slots, Tensor weights, *, int page_rows)"
    " -> Tensor",
    reference=_paged_index_scores,
    fake=lambda q, pool, slots, weights, **_: q.new_empty(slots.shape, dtype=torch.float32),
    kernel=("index_scores", "index_scores"),
)
"""`index_scores` of `q [T, H, dim]` with the rows of `pool` at `slots [T, C]`, float32 `[T, C]`.

`pool` is `[rows, dim]` or uint8 pages of `fp8` rows; `weights [T, H]`. A slot of -1 scores -inf.
"""


def _fake_select(scores: Tensor, num_entries: Tensor, slots: Tensor | None, *, topk: int) -> Tensor:
    shape = (scores.shape[0], min(topk, scores.shape[1]))
    return scores.new_empty(shape, dtype=torch.int64)


select_rows = register(
    "select_rows(Tensor scores, Tensor num_entries, Tensor? slots, *, int topk) -> Tensor",
    reference=_select_rows,
    fake=_fake_select,
    kernel=("topk", "select_rows"),
)
"""`select_topk`'s entries in order of position, or their `slots [T, C]`; `[T, min(topk, C)]`."""
