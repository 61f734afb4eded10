"""Prompt lookup: drafts copied from what followed an earlier occurrence of the last tokens.

Needs no weights (Saxena, "Prompt Lookup Decoding", 2023).
"""

from __future__ import annotations

import torch
from torch import Tensor


def lookup(
    token_ids: Tensor, num_tokens: Tensor, k: int, min_ngram: int, max_ngram: int
) -> tuple[Tensor, Tensor]:
    """Drafts `[R, k]` int64 and how many of them count `[R]`.

    Args:
        token_ids: `[R, L]` int64; only the first `num_tokens [R]` of a row are looked at.
        k: most drafts. min_ngram, max_ngram: shortest and longest n-gram to look for, in tokens.

    The n-gram that ends a row is looked for earlier in it: the longest that occurs, up to
    `max_ngram`; of its occurrences the most recent. The drafts are the known tokens behind that
    one, at most k. Without an occurrence of `min_ngram` tokens there are none.
    """
    length = token_ids.shape[1]
    place = torch.arange(length, device=token_ids.device)
    last = (num_tokens - 1)[:, None]
    run = torch.zeros_like(token_ids)
    same = torch.ones_like(token_ids, dtype=torch.bool)
    for back in range(max_ngram):
        # Compare place - back with last - back, for every place that an occurrence may end at.
        wanted = token_ids.gather(1, (last - back).clamp_min(0))
        shifted = token_ids.gather(1, (place - back).clamp_min(0).expand_as(token_ids))
        same = same & (shifted == wanted) & (place >= back) & (last >= back)
        run = run + same.to(torch.int64)
    found = (run >= min_ngram) & (place < last)
    # The longest run wins, then the latest place: one number orders both.
    score = torch.where(found, run * length + place, -1)
    end = score.argmax(1, keepdim=True)
    count = torch.where(found.any(1), (last - end)[:, 0].clamp_max(k), 0)
    ahead = end + 1 + torch.arange(k, device=token_ids.device)
    drafts = token_ids.gather(1, ahead.clamp_max(length - 1))
    return torch.where(ahead <= last, drafts, 0), count
