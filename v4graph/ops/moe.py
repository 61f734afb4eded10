"""Routing and routed experts (V4 report section 2.1).

Shape suffixes: T tokens, E experts, K experts per token, I intermediate, D hidden; P = T K pairs, N
blocks of M places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from v4graph.ops.norm import swiglu


def route(
    logits_TE: Tensor,
    bias_E: Tensor | None,
    table_TK: Tensor | None,
    *,
    topk: int,
    scoring: str,
    norm_topk: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Expert ids and weights of every token.

    Args:
        logits_TE: router logits, float32.
        bias_E: selection bias; it chooses experts and never enters the weights.
        table_TK: experts by token id (hash routing); when given, nothing is selected.
        scoring: `sqrtsoftplus`, `sigmoid` or `softmax`.

    Returns:
        `weights [T, K]` float32 and `experts [T, K]` int64. Equal scores select the lower id.
    """
    if scoring == "softmax":
        scores = logits_TE.softmax(-1)
    elif scoring == "sigmoid":
        scores = logits_TE.sigmoid()
    else:
        scores = F.softplus(logits_TE).sqrt()
    if table_TK is not None:
        experts = table_TK
    else:
        biased = scores if bias_E is None else scores + bias_E
        experts = _largest(biased, topk)
    weights = scores.gather(-1, experts)
    if norm_topk:
        # The floor keeps a row whose scores all underflow finite; it is below float32 resolution.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts


def _largest(scores_TE: Tensor, topk: int) -> Tensor:
    """Ids of the `topk` largest scores, descending, lower ids first among equals, `[T, K]`.

    A few argmaxes fuse with their neighbours where a sort is a call of its own.
    """
    ids = torch.arange(scores_TE.shape[-1], device=scores_TE.device)
    chosen = []
    for _ in range(topk):
        best = scores_TE.argmax(-1, keepdim=True)
        chosen.append(best)
        scores_TE = scores_TE.masked_fill(ids == best, float("-inf"))
    return torch.cat(chosen, dim=-1)


def moe_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13: Tensor,
    w2: Tensor,
    clamp: float | None,
) -> Tensor:
    """Weighted sum of the chosen experts' clamped SwiGLU, `[T, D]` in the dtype of `x`.

    `w13 [E, 2I, D]` holds gate over up, `w2 [E, D, I]`. The routing weight multiplies the hidden
    activation in float32, as in the official code. Shapes are static and do not depend on the
    routing: few tokens read their experts' matrices one by one, many are sorted into blocks of one
    expert each.
    """
    T, topk = experts_TK.shape
    if T * topk <= 2 * w13.shape[0]:
        # Products and sums, not bmm: the compiler then reads each matrix in place, where bmm would
        # first copy the gathered experts.
        flat = experts_TK.flatten()
        x = x_TD.repeat_interleave(topk, 0)
        gate, up = (w13[flat].float() * x[:, None].float()).sum(-1).chunk(2, dim=-1)
        h = swiglu(gate, up, clamp) * weights_TK.flatten()[:, None]
        h = h.to(x_TD.dtype).float()
        y = (w2[flat].float() * h[:, None]).sum(-1)
    else:
        pair_NM, expert_N, place_P = _expert_blocks(experts_TK.flatten(), w13.shape[0])
        # Places without a pair repeat the last one; nothing reads what they give.
        gate, up = torch.bmm(x_TD[pair_NM // topk], w13[expert_N].transpose(1, 2)).chunk(2, dim=-1)
        h = swiglu(gate.float(), up.float(), clamp) * weights_TK.flatten()[pair_NM][..., None]
        y = torch.bmm(h.to(x_TD.dtype), w2[expert_N].transpose(1, 2)).flatten(0, 1)[place_P].float()
    return y.view(T, topk, -1).sum(1).to(x_TD.dtype)


def _expert_blocks(experts_P: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort (token, choice) pairs into blocks of M places, each block of one expert.

    Args:
        experts_P: the expert of each pair.

    Returns:
        `pair [N, M]` at each place (the last pair where there is none), `expert [N]` of each block
        and `place [P]` of each pair. N is the most blocks that P pairs can need.
    """
    P, device = experts_P.shape[0], experts_P.device
    # About the pairs of one expert: larger blocks pad more, smaller ones copy matrices more often.
    M = min(max(1 << (P // num_experts).bit_length() - 1, 16), 64)
    N = -(-(P + num_experts * (M - 1)) // M)
    counts = (experts_P[:, None] == torch.arange(num_experts, device=device)).sum(0)
    blocks = (counts + M - 1) // M
    last_block, last_pair = blocks.cumsum(0), counts.cumsum(0)
    order = experts_P.argsort(stable=True)
    expert_sorted = experts_P[order]
    shift = (last_block - blocks) * M - (last_pair - counts)
    place_sorted = torch.arange(P, device=device) + shift[expert_sorted]
    place = torch.empty_like(order).scatter(0, order, place_sorted)
    pair = torch.full((N * M,), P - 1, dtype=torch.int64, device=device)
    pair = pair.scatter(0, place_sorted, order).view(N, M)
    block = torch.arange(N, device=device)
    expert = torch.searchsorted(last_block, block, right=True).clamp_max(num_experts - 1)
    return pair, expert, place
