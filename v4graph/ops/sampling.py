"""Token selection on the device: greedy, and temperature / top-k / top-p by inverse transform.

Random numbers are a hash of (seed, position), so that a request draws the same tokens alone, in any
batch and after a preemption.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijective 32-bit mixer in int64; multipliers stay below 2^31 so that no product overflows
    63 bits."""
    x = ((x >> 16) ^ x) & _MASK
    x = (x * 0x7FEB352D) & _MASK
    x = ((x >> 15) ^ x) & _MASK
    x = (x * 0x2C1B3C6D) & _MASK
    return ((x >> 16) ^ x) & _MASK


DRAFT, ACCEPT = 1, 2


def uniform(seed: Tensor, position: Tensor, stream: int = 0) -> Tensor:
    """A float32 in [0, 1) for each int64 (seed, position) pair."""
    x = _mix(((seed + 77777 * stream) & _MASK) ^ 0x9E3779B9)
    x = _mix(x ^ ((seed >> 32) & _MASK))
    x = _mix(x + position * 0x3C6EF372 & _MASK)
    x = _mix(x ^ 0x5BD1E995)
    # 24 bits: every value is exact in float32 and below 1.
    return (x >> 8).to(torch.float32) * 2.0**-24


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of every row `[R, V]`; the lowest id among equals."""
    return logits.argmax(-1)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, draw: Tensor
) -> Tensor:
    """One token of every row, int64 `[R]`.

    Args:
        logits: `[R, V]` float32.
        temperature: `[R]`; 0 selects the likeliest token.
        top_k: `[R]` int64; 0 keeps all. top_p: `[R]` in (0, 1].
        draw: `[R]` uniform numbers in [0, 1).

    Tokens are ranked by probability, ties by id; top-k keeps the first k and top-p, applied to
    what top-k left, the shortest prefix with at least that mass. The first kept token stays always.
    """
    scaled = logits / temperature.clamp_min(1e-5)[:, None]
    order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    within = (rank < top_k[:, None]) | (top_k <= 0)[:, None]
    probs = order.values.softmax(-1) * within
    probs = probs / probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs
    probs = torch.where((before < top_p[:, None]) | (rank == 0), probs, 0.0)
    mass = probs.cumsum(-1)
    # The first token whose cumulative mass exceeds the draw has itself a positive probability.
    chosen = (mass <= (draw * mass[:, -1])[:, None]).sum(-1)
    # A row of NaN has none at all; it must not take the batch down with an index of -1.
    last = ((probs > 0).sum(-1) - 1).clamp_min(0)
    token = order.indices.gather(-1, torch.minimum(chosen, last)[:, None])[:, 0]
    return torch.where(temperature <= 0, logits.argmax(-1), token)


def probabilities(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    scaled = logits / temperature.clamp_min(1e-5)[..., None]
    order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    within = (rank < top_k[..., None]) | (top_k <= 0)[..., None]
    probs = order.values.softmax(-1) * within
    probs = probs / probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs
    probs = torch.where((before < top_p[..., None]) | (rank == 0), probs, 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    out = torch.zeros_like(probs).scatter(-1, order.indices, probs)
    one = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return torch.where((temperature <= 0)[..., None], one, out)


def draw(probs: Tensor, number: Tensor) -> Tensor:
    mass = probs.cumsum(-1)
    chosen = (mass <= (number[..., None] * mass[..., -1:])).sum(-1)
    return chosen.clamp_max(probs.shape[-1] - 1)


def verify_greedy(logits: Tensor, drafts: Tensor, num_drafts: Tensor) -> tuple[Tensor, Tensor]:
    best = logits.argmax(-1)
    k = drafts.shape[1]
    index = torch.arange(k, device=drafts.device)
    good = (best[:, :k] == drafts) & (index < num_drafts[:, None])
    accepted = good.to(torch.int64).cumprod(1).sum(1)
    return accepted, best.gather(1, accepted[:, None])[:, 0]


def verify(
    p: Tensor, q: Tensor, drafts: Tensor, num_drafts: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    k = drafts.shape[1]
    index = torch.arange(k, device=drafts.device)
    pd = p[:, :k].gather(-1, drafts[..., None])[..., 0]
    qd = q.gather(-1, drafts[..., None])[..., 0]
    u = uniform(seed[:, None], position[:, None] + index, ACCEPT)
    good = (u * qd < pd) & (index < num_drafts[:, None])
    accepted = good.to(torch.int64).cumprod(1).sum(1)
    rows = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    target = p.gather(1, rows)[:, 0]
    padded = torch.cat((q, torch.zeros_like(q[:, :1])), 1).gather(1, rows)[:, 0]
    rest = (target - torch.where((accepted < num_drafts)[:, None], padded, 0.0)).clamp_min(0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)
    return accepted, draw(rest, uniform(seed, position + accepted))
