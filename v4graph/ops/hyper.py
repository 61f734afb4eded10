"""Manifold-constrained hyper-connections: pre, Sinkhorn, post and head (V4 report section 2.2).

Shape suffixes: any leading axes (T once flattened), N residual streams, D hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from v4graph.ops.norm import rms_norm


def sinkhorn(comb: Tensor, iters: int, eps: float) -> Tensor:
    """Project `exp(comb) [..., N, N]` towards doubly stochastic matrices, float32.

    `eps` is added after the softmax and in every denominator; columns are normalised first.

    Only the factors of rows and columns change from one iteration to the next, so these are what
    the loop carries: 2 N divisions an iteration instead of 2 N^2. Tokens are the innermost axis,
    which a compiler can vectorise.
    """
    n = comb.shape[-1]
    c_NNT = (comb.softmax(-1) + eps).reshape(-1, n, n).permute(1, 2, 0).contiguous()
    cols_NT = 1 / (c_NNT.sum(0) + eps)
    rows_NT = torch.ones_like(cols_NT)
    for _ in range(iters - 1):
        rows_NT = rows_NT / (rows_NT * (c_NNT * cols_NT).sum(1) + eps)
        cols_NT = cols_NT / (cols_NT * (c_NNT * rows_NT[:, None]).sum(0) + eps)
    out = c_NNT * rows_NT[:, None] * cols_NT
    return out.permute(2, 0, 1).reshape(comb.shape)


def hyper_pre(
    x_ND: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse the streams into a sublayer's input and derive its mixing weights.

    Args:
        x_ND: streams `[..., N, D]`.
        fn, base, scale: `[(2 + N) N, N D]`, `[(2 + N) N]` and `[3]`, float32.

    Returns:
        `u [..., D]` in the dtype of `x`, `post [..., N]` and `comb [..., N, N]` in float32.
    """
    n = x_ND.shape[-2]
    flat = rms_norm(x_ND.flatten(-2).float(), None, norm_eps)
    mixes = F.linear(flat, fn)
    pre = torch.sigmoid(mixes[..., :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(mixes[..., n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (mixes[..., 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    u = (pre[..., None] * x_ND.float()).sum(-2).to(x_ND.dtype)
    return u, post, sinkhorn(comb, iters, eps)


def hyper_post(x_ND: Tensor, y_D: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`x'_k = post_k y + sum_j comb[j, k] x_j`: the sum runs over the first index of `comb`."""
    mixed = comb.transpose(-1, -2) @ x_ND.float()
    return (post[..., None] * y_D.float().unsqueeze(-2) + mixed).to(x_ND.dtype)


def hyper_head(
    x_ND: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, eps: float, norm_eps: float
) -> Tensor:
    """The final stream collapse, `[..., D]`; `fn [N, N D]`, `base [N]`, `scale [1]`."""
    flat = rms_norm(x_ND.flatten(-2).float(), None, norm_eps)
    pre = torch.sigmoid(F.linear(flat, fn) * scale + base) + eps
    return (pre[..., None] * x_ND.float()).sum(-2).to(x_ND.dtype)
