"""From logits to committed tokens or drafts: what ends each stage of a round.

Every function takes (request table, host lists, static buffers, logits) and is a region of its
own. What the main model's logits decide takes one thing more: which rows of the model's own logits,
before any rule, are finite. A request whose row is not gets `FAULT` instead of a token.

The `sample` variants run when any request of the batch has a temperature; in them a request
without one is a distribution with a single token. `process` may come before them and
`tell_logprobs` behind.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from v4graph.ops.logits import Prefix, logprobs, process_logits
from v4graph.ops.ngram import lookup
from v4graph.ops.sampling import (
    DRAFT,
    certain,
    draw,
    probabilities,
    uniform,
    verify,
    verify_greedy,
)
from v4graph.program.commit import (
    commit_draft,
    commit_lookup,
    commit_sampled,
    commit_verified,
)
from v4graph.program.rules import unpack

Tensors = dict[str, Tensor]
Settle = Callable[[Tensors, Tensors, Tensors, Tensor, Tensor], Tensor]
Draft = Callable[[Tensors, Tensors, Tensors, Tensor], None]
FAULT = -2
"""In place of a token: the model's logits were NaN or infinite. The host ends the request."""


def process(table: Tensors, host: Tensors, buf: Tensors, logits: Tensor) -> Tensor:
    """Logits `[R, V]` under the requests' rules; before a choice, or before one more draft."""
    behind = table["num_drafts"][host["slots"]][:, None]
    return _process(table, host["slots"], behind, logits[:, None])[:, 0]


def process_choice(table: Tensors, host: Tensors, buf: Tensors, logits: Tensor) -> Tensor:
    """The same for the main model's choice: what was drafted once is none of its prefix."""
    behind = torch.zeros_like(host["slots"])[:, None]
    return _process(table, host["slots"], behind, logits[:, None])[:, 0]


def process_verified(table: Tensors, host: Tensors, buf: Tensors, logits: Tensor) -> Tensor:
    """The same for `logits [R x (k + 1), V]`; row i of a request stands behind i drafts."""
    slots = host["slots"]
    rows = logits.unflatten(0, (slots.shape[0], -1))
    behind = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape[:2])
    return _process(table, slots, behind, rows).flatten(0, 1)


def _process(table: Tensors, slots: Tensor, behind: Tensor, rows: Tensor) -> Tensor:
    prefix = Prefix(
        table["token_ids"][slots], table["num_tokens"][slots], table["draft_tokens"][slots], behind
    )
    return process_logits(
        rows, prefix, unpack(table["rule_ints"][slots], table["rule_floats"][slots])
    )


def tell_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.logits.logprobs` of the new `tokens [R, W]`, from logits `[R x W, V]` before rules."""
    return logprobs(logits.unflatten(0, tokens.shape), tokens, count)


def finite_rows(logits: Tensor) -> Tensor:
    """Which rows of `logits [..., V]` hold finite numbers only, bool `[...]`."""
    return logits.isfinite().all(-1)


def mark_faults(tokens: Tensor, finite: Tensor) -> Tensor:
    """New `tokens [R, W]` up to the first that rests on logits that are not finite.

    There stands `FAULT`, and -1 behind it. The table keeps what was chosen, a valid id: the request
    may be in a launched round already.

    Args:
        finite: bool `[R x W]`, of the row that each token was chosen from.
    """
    bad = (tokens >= 0) & ~finite.view(tokens.shape)
    count = bad.to(torch.int64).cumsum(1)
    return torch.where(count > 0, torch.where(bad & (count == 1), FAULT, -1), tokens)


def choose_greedy(
    table: Tensors, host: Tensors, buf: Tensors, logits: Tensor, finite: Tensor
) -> Tensor:
    """Commit the likeliest token of `logits [R, V]`; the new tokens `[R, 1]`."""
    return mark_faults(commit_sampled(table, host, buf, logits.argmax(-1)), finite)


def choose_sample(
    table: Tensors, host: Tensors, buf: Tensors, logits: Tensor, finite: Tensor
) -> Tensor:
    """Commit a token drawn from `logits [R, V]`; the new tokens `[R, 1]`."""
    slots = host["slots"]
    number = uniform(table["seed"][slots], table["num_tokens"][slots])
    token = draw(_probabilities(table, slots, logits), number)
    return mark_faults(commit_sampled(table, host, buf, token), finite)


def verify_drafts_greedy(
    table: Tensors, host: Tensors, buf: Tensors, logits: Tensor, finite: Tensor
) -> Tensor:
    """Accept the drafts that are the main model's own choices; the new tokens `[R, k + 1]`."""
    slots = host["slots"]
    rows = logits.unflatten(0, (slots.shape[0], -1))
    accepted, token = verify_greedy(rows, table["draft_tokens"][slots], buf["num_drafts"])
    return mark_faults(commit_verified(table, host, buf, accepted, token), finite)


def verify_drafts_sample(
    table: Tensors, host: Tensors, buf: Tensors, logits: Tensor, finite: Tensor
) -> Tensor:
    """Rejection sampling against what the drafts were drawn from; the new tokens `[R, k + 1]`."""
    slots = host["slots"]
    rows = logits.unflatten(0, (slots.shape[0], -1))
    drafts = table["draft_tokens"][slots]
    # A request without a temperature drafts greedily, also in rounds that stored no distribution.
    likeliest = certain(drafts, rows[:, :-1])
    proposal = likeliest
    if table["draft_probs"].shape[-1]:
        greedy = (table["temperature"][slots] <= 0)[:, None, None]
        proposal = torch.where(greedy, likeliest, table["draft_probs"][slots])
    accepted, token = verify(
        _probabilities(table, slots, rows),
        proposal,
        drafts,
        buf["num_drafts"],
        table["seed"][slots],
        table["num_tokens"][slots],
    )
    return mark_faults(commit_verified(table, host, buf, accepted, token), finite)


def with_lookup(settle: Settle, k: int, ngram: tuple[int, int]) -> Settle:
    """`settle`, and then drafts for every request that it gave a token, by prompt lookup."""

    def settle_and_look_up(
        table: Tensors, host: Tensors, buf: Tensors, logits: Tensor, finite: Tensor
    ) -> Tensor:
        tokens = settle(table, host, buf, logits, finite)
        slots = host["slots"]
        drafts, count = lookup(table["token_ids"][slots], table["num_tokens"][slots], k, *ngram)
        commit_lookup(table, host, buf, drafts, count)
        return tokens

    return settle_and_look_up


def draft_greedy(table: Tensors, host: Tensors, buf: Tensors, logits: Tensor) -> None:
    """Draft the likeliest token of `logits [R, V]`."""
    commit_draft(table, host, buf, logits.argmax(-1))


def draft_sample(table: Tensors, host: Tensors, buf: Tensors, logits: Tensor) -> None:
    """Draft a token drawn from `logits [R, V]` and keep the distribution for its verification."""
    slots, due = host["slots"], buf["do_sample"]
    probs = _probabilities(table, slots, logits)
    count = table["num_drafts"][slots]
    number = uniform(table["seed"][slots], table["num_tokens"][slots] + count, DRAFT)
    where, place = torch.where(due, slots, 0), torch.where(due, count, 0)
    table["draft_probs"].index_put_((where, place), torch.where(due[:, None], probs, 0.0))
    commit_draft(table, host, buf, draw(probs, number))


def _probabilities(table: Tensors, slots: Tensor, logits: Tensor) -> Tensor:
    """Distributions `[R, ..., V]` that the requests' parameters make of the logits."""
    shape = (-1, *([1] * (logits.dim() - 2)))
    temperature, top_k, top_p, min_p = (
        table[name][slots].view(shape).expand(logits.shape[:-1])
        for name in ("temperature", "top_k", "top_p", "min_p")
    )
    return probabilities(logits, temperature, top_k, top_p, min_p)
