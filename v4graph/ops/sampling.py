"""From logits to tokens on the device: distributions, draws, and the verification of drafts.

Random numbers are a hash of (seed, position, stream), so that a request draws the same tokens
alone, in any batch and after a preemption. Drafting, acceptance and the final draw of a position
use streams of their own: rejection sampling needs them independent.

Nothing here waits for the device, and a row of NaN harms no other row.
"""

from __future__ import annotations

import torch
from torch import Tensor

FINAL, DRAFT, ACCEPT = 0, 1, 2
"""Random streams: a position's own token, a draft for it, the acceptance of that draft."""

_MASK = 0xFFFFFFFF
_LEAST_TEMPERATURE = 1e-5


def _mix(x: Tensor) -> Tensor:
    """A bijective 32-bit mixer in int64; multipliers stay below 2^31 so that no product overflows
    63 bits."""
    x = ((x >> 16) ^ x) & _MASK
    x = (x * 0x7FEB352D) & _MASK
    x = ((x >> 15) ^ x) & _MASK
    x = (x * 0x2C1B3C6D) & _MASK
    return ((x >> 16) ^ x) & _MASK


def uniform(seed: Tensor, position: Tensor, stream: int = FINAL) -> Tensor:
    """A float32 in [0, 1) for each int64 (seed, position) pair of one random stream."""
    x = _mix((seed & _MASK) ^ 0x9E3779B9)
    x = _mix(x ^ ((seed >> 32) & _MASK))
    x = _mix(x + position * 0x3C6EF372 & _MASK)
    x = _mix(x ^ ((0x5BD1E995 + stream * 0x2545F491) & _MASK))
    # 24 bits: every value is exact in float32 and below 1.
    return (x >> 8).to(torch.float32) * 2.0**-24


def probabilities(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The distribution that a row's parameters make of its logits, float32 `[..., V]`.

    Args:
        logits: `[..., V]` float32.
        temperature: `[...]`; 0 puts everything on the likeliest token, the lowest id among equals.
        top_k: `[...]` int64; 0 keeps all. top_p: `[...]` in (0, 1].
        min_p: `[...]` in [0, 1]; 0 keeps all.

    In this order: the temperature; min-p drops tokens below `min_p` times the largest probability;
    top-k keeps the first k, ranked by probability and then by id; top-p keeps of what is left the
    shortest prefix with at least that share of its mass. The first token stays always.
    """
    scaled = logits / temperature.clamp_min(_LEAST_TEMPERATURE)[..., None]
    order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    probs = order.values.softmax(-1)
    kept = probs >= probs[..., :1] * min_p[..., None]
    kept = kept & ((rank < top_k[..., None]) | (top_k <= 0)[..., None])
    probs = torch.where(kept | (rank == 0), probs, 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs
    probs = torch.where((before < top_p[..., None]) | (rank == 0), probs, 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    probs = torch.zeros_like(probs).scatter(-1, order.indices, probs)
    return torch.where((temperature <= 0)[..., None], certain(logits.argmax(-1), logits), probs)


def certain(tokens: Tensor, like: Tensor) -> Tensor:
    """Distributions `[..., V]` with everything on `tokens [...]`; shape and dtype as `like`."""
    # Not one_hot: that one reads the largest id back to the host.
    return torch.zeros_like(like).scatter(-1, tokens[..., None], 1.0)


def draw(probs: Tensor, number: Tensor) -> Tensor:
    """One token of every row by inverse transform, int64 `[...]`.

    Args:
        probs: `[..., V]`, not necessarily normalised. number: `[...]` in [0, 1).

    A token without probability is never drawn, whatever the rounding of the sums.
    """
    mass = probs.cumsum(-1)
    # The first token whose cumulative mass exceeds the number has itself a positive probability.
    chosen = (mass <= number[..., None] * mass[..., -1:]).sum(-1)
    ids = torch.arange(probs.shape[-1], device=probs.device)
    last = torch.where(probs > 0, ids, 0).amax(-1)
    return torch.minimum(chosen, last)


def verify_greedy(logits: Tensor, drafts: Tensor, num_drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafts while they are the likeliest tokens.

    Args:
        logits: `[R, k + 1, V]`; row i follows the known tokens and i drafts.
        drafts: `[R, k]` int64. num_drafts: `[R]` int64, how many of them count.

    Returns:
        Accepted drafts `[R]`, and the likeliest token behind them `[R]`.
    """
    best = logits.argmax(-1)
    accepted = _leading(best[:, :-1] == drafts, num_drafts)
    return accepted, best.gather(1, accepted[:, None])[:, 0]


def verify(
    target: Tensor,
    proposal: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    seed: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling: the tokens follow `target`, whatever the drafts were drawn from.

    Draft i is accepted with probability min(1, p_i / q_i); behind the first rejected one the token
    is drawn from max(p - q, 0), behind the last accepted one from p (Leviathan et al., ICML 2023,
    algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2).

    Args:
        target: p, `[R, k + 1, V]`. proposal: q, `[R, k, V]`, what draft i was drawn from.
        drafts: `[R, k]` int64. num_drafts: `[R]` int64, how many of them count.
        seed: `[R]` int64. position: `[R]` int64, of the first draft.

    Returns:
        Accepted drafts `[R]`, and the token behind them `[R]`.
    """
    k, V = drafts.shape[1], target.shape[-1]
    index = torch.arange(k, device=drafts.device)
    p = target[:, :k].gather(-1, drafts[..., None])[..., 0]
    q = proposal.gather(-1, drafts[..., None])[..., 0]
    number = uniform(seed[:, None], position[:, None] + index, ACCEPT)
    accepted = _leading(number * q < p, num_drafts)
    row = accepted[:, None, None].expand(-1, 1, V)
    goal = target.gather(1, row)[:, 0]
    padded = torch.cat((proposal, torch.zeros_like(target[:, :1])), dim=1)
    rejected = (accepted < num_drafts)[:, None]
    rest = (goal - torch.where(rejected, padded.gather(1, row)[:, 0], 0.0)).clamp_min(0.0)
    # Nothing is left where p equals q up to rounding; a rejection had next to no probability.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, goal)
    return accepted, draw(rest, uniform(seed, position + accepted))


def _leading(good: Tensor, num_drafts: Tensor) -> Tensor:
    """How many drafts `[R]` hold before the first that does not, of `good [R, k]`."""
    index = torch.arange(good.shape[1], device=good.device)
    good = good & (index < num_drafts[:, None])
    return good.to(torch.int64).cumprod(1).sum(1)
