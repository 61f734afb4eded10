"""The commit stages: a step's outcome written back to the request table, on the device.

Each one advances the table by what its stage has settled; the next stage's prepare reads nothing
else. Padding rewrites fields of the null request with the values that they have.
"""

from __future__ import annotations

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def commit_sampled(table: Tensors, host: Tensors, buf: Tensors, sampled: Tensor) -> Tensor:
    """After prefill or decode: computed lengths, and the token of every request that is due one.

    Returns the tokens `[R, 1]`, -1 for requests that sampled none (padding, unfinished prompts).
    """
    due = buf["do_sample"]
    tokens = torch.where(due, sampled, -1)[:, None]
    _append(table, host["slots"], tokens)
    _advance(table, host["slots"], host["query_lens"], due.to(torch.int64))
    return tokens


def commit_verified(
    table: Tensors, host: Tensors, buf: Tensors, num_accepted: Tensor, next_token: Tensor
) -> Tensor:
    """After target-verify: the accepted drafts and the token behind them.

    Rejecting is not a deed: the rows of rejected tokens lie behind `num_computed_tokens` and are
    written again before anything reads them.

    Args:
        num_accepted: `[R]` int64. next_token: `[R]` int64, the main model's own choice.

    Returns:
        The new tokens `[R, k + 1]`, -1 behind the last one.
    """
    slots, due = host["slots"], buf["do_sample"]
    drafts = table["draft_tokens"][slots]
    index = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    padded = torch.cat((drafts, torch.zeros_like(drafts[:, :1])), dim=1)
    tokens = torch.where(index == num_accepted[:, None], next_token[:, None], padded)
    tokens = torch.where((index <= num_accepted[:, None]) & due[:, None], tokens, -1)
    count = torch.where(due, num_accepted + 1, 0)
    _append(table, slots, tokens)
    _advance(table, slots, count, count)
    return tokens


def commit_draft(table: Tensors, host: Tensors, buf: Tensors, token: Tensor) -> None:
    """After draft-extend or draft-decode: one more draft `token [R]` of every request due one."""
    due, slots = buf["do_sample"], host["slots"]
    where = torch.where(due, slots, 0)
    place = torch.where(due, table["num_drafts"][slots], 0)
    table["draft_tokens"].index_put_((where, place), torch.where(due, token, 0))
    table["num_drafts"].index_put_((slots,), due.to(torch.int64), accumulate=True)


def commit_lookup(
    table: Tensors, host: Tensors, buf: Tensors, drafts: Tensor, count: Tensor
) -> None:
    """Drafts `[R, k]`, of which `count [R]` count, for every request whose next step verifies."""
    slots = host["slots"]
    # Not `do_sample`: a request that was preempted goes on with the drafts that it had.
    last = table["num_tokens"][slots] - 1
    due = (host["query_lens"] > 0) & (table["num_computed_tokens"][slots] == last)
    where = torch.where(due, slots, 0)
    table["draft_tokens"].index_put_((where,), torch.where(due[:, None], drafts, 0))
    table["num_drafts"].index_put_((where,), torch.where(due, count, 0))


def _append(table: Tensors, slots: Tensor, tokens: Tensor) -> None:
    """Write `tokens [R, W]` behind the known ones; -1 writes nothing that counts."""
    due = tokens >= 0
    places = table["num_tokens"][slots][:, None] + torch.arange(
        tokens.shape[1], device=tokens.device
    )
    where = torch.where(due, slots[:, None], 0)
    table["token_ids"].index_put_((where, torch.where(due, places, 0)), tokens.clamp_min(0))


def _advance(table: Tensors, slots: Tensor, computed: Tensor, known: Tensor) -> None:
    table["num_computed_tokens"].index_put_((slots,), computed, accumulate=True)
    table["num_tokens"].index_put_((slots,), known, accumulate=True)
    table["num_committed"].index_put_((slots,), computed)
    table["num_appended"].index_put_((slots,), known)
    table["num_drafts"].index_put_((slots,), torch.zeros_like(computed))
