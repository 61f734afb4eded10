"""Lightning indexer: score every compressed row of a request and keep the best (section 2.3.1)."""

from __future__ import annotations

import torch
from torch import Tensor


def index_scores(q_THE: Tensor, keys_TNE: Tensor, weights_TH: Tensor) -> Tensor:
    """`sum_h w_h relu(q_h . k_j)` in float32, `[T, N]`."""
    scores = torch.einsum("the,tne->thn", q_THE.float(), keys_TNE.float()).relu()
    return torch.einsum("thn,th->tn", scores, weights_TH)


def select_topk(scores_TN: Tensor, num_entries_T: Tensor, topk: int) -> Tensor:
    """The `topk` best visible entries of each row, int64 `[T, min(topk, N)]`.

    Entry j of row t is visible when `j < num_entries_T[t]`; unused places hold -1. Equal scores
    select the lowest position. The order within a row is descending by score.

    The score's bits and the position are packed into one integer, which makes every key unique:
    torch.topk alone leaves the choice among ties open.
    """
    n = scores_TN.shape[1]
    entry = torch.arange(n, device=scores_TN.device)
    bits = (scores_TN + 0.0).contiguous().view(torch.int32)  # + 0.0 turns -0 into 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys = ordered * 2**31 + (2**31 - 1 - entry)
    keys = torch.where(entry < num_entries_T[:, None], keys, torch.iinfo(torch.int64).min)
    best = keys.topk(min(topk, n), dim=-1)
    chosen = 2**31 - 1 - (best.values & (2**31 - 1))
    return torch.where(best.values == torch.iinfo(torch.int64).min, -1, chosen)
