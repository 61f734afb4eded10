"""Routing and routed experts (V4 report section 2.1).

Shape suffixes: T tokens, E experts, K experts per token, I intermediate, D hidden.
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
        experts = biased.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    weights = scores.gather(-1, experts)
    if norm_topk:
        # The floor keeps a row whose scores all underflow finite; it is below float32 resolution.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts


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
    activation in float32, as in the official code. Shapes are static: few tokens read just their
    experts' matrices, many run every expert and mask, so nothing depends on the routing.
    """
    T, topk = experts_TK.shape
    num_experts = w13.shape[0]
    if T * topk <= 2 * num_experts:
        # Products and sums, not bmm: the compiler then reads each matrix in place, where bmm would
        # first copy the gathered experts.
        flat = experts_TK.flatten()
        x = x_TD.repeat_interleave(topk, 0)
        gate, up = (w13[flat].float() * x[:, None].float()).sum(-1).chunk(2, dim=-1)
        h = swiglu(gate, up, clamp) * weights_TK.flatten()[:, None]
        h = h.to(x_TD.dtype).float()
        y = (w2[flat].float() * h[:, None]).sum(-1)
        return y.view(T, topk, -1).sum(1).to(x_TD.dtype)
    dense = torch.zeros(T, num_experts, dtype=torch.float32, device=x_TD.device)
    dense = dense.scatter_add(1, experts_TK, weights_TK)
    gate, up = (x_TD @ w13.flatten(0, 1).t()).view(T, num_experts, -1).chunk(2, dim=-1)
    h = swiglu(gate.float(), up.float(), clamp) * dense[..., None]
    return torch.bmm(h.to(x_TD.dtype).transpose(0, 1), w2.transpose(1, 2)).sum(0)
