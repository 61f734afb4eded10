"""One block of the training forward: `RecomputeModel` up to rounding, in a form that compiles well.

Differences are of method only: banded window attention (blocks of one window against the block
before), all experts at once with masked weights, a mask of selected rows in place of index lists.
Sequences are a multiple of the window. `tests/model/test_nano_weights.py` checks it.

Shape suffixes: B sequences, S positions, D hidden, N residual streams, H heads, E head_dim,
W compressed rows, K experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nano.kernels import sinkhorn, top_rows
from v4graph.spec.model import HashMoe, HyperConnections, ModelSpec

Params = Mapping[str, Tensor]
TIE_MARGIN = 0.1


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the last channels of `x` in adjacent pairs; `cos [S, pairs]` broadcasts."""
    dim = 2 * cos.shape[-1]
    if x.dim() == 4:
        cos, sin = cos[:, None], sin[:, None]
    pairs = x[..., -dim:].float().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-dim], turned.to(x.dtype)), dim=-1)


@dataclass(frozen=True)
class Block:
    """One kind of block as a pure function of its parameters; layers of a kind share it."""

    spec: ModelSpec
    attention: str
    ffn: str
    compute: torch.dtype

    def build(self) -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]]:
        """The function `(params, streams, ids, cos, sin, dense, kv_true, kv_drafted) ->
        (streams, index loss, tie loss, load, kv)`.

        `dense` is a 0-dim bool: attend to every row, selected or not. `kv_true` and `kv_drafted`
        belong to recurrent drafting: window rows of the first draft step, and the rows of deeper
        steps that this query sees instead of them, youngest last.
        """
        spec, eps, dtype = self.spec, self.spec.norm_eps, self.compute
        a, f = spec.attention[self.attention], spec.ffn[self.ffn]
        residual = spec.residual
        if not isinstance(residual, HyperConnections):
            raise TypeError("the trainer knows hyper-connections only")
        n, iters, hc_eps = residual.streams, residual.sinkhorn_iters, residual.eps
        heads, width, groups = a.heads, a.head_dim, a.o_groups
        window = spec.cache_groups[a.caches.window].window
        kind, hashed = a.kind, isinstance(f, HashMoe)
        group = index_group = None
        topk = index_heads = index_dim = 0
        if kind != "sliding_attention":
            group = spec.cache_groups[a.caches.compressed]
        if kind == "compressed_sparse_attention":
            index_group = spec.cache_groups[a.caches.index]
            topk, index_heads, index_dim = a.indexer.topk, a.indexer.heads, a.indexer.dim
        experts, chosen, inner = f.experts, f.topk, f.intermediate
        scoring, scale, clamp = f.scoring, f.scale, f.clamp
        if scoring != "sqrtsoftplus" or not f.norm_topk or chosen != 2 or not f.shared_experts:
            raise ValueError("the trainer knows top-2 sqrtsoftplus routing with a shared expert")
        shape = (group.ratio, group.row.dim, group.overlap) if group else None
        index_shape = (
            (index_group.ratio, index_group.row.dim, index_group.overlap) if index_group else None
        )

        def hyper_pre(x: Tensor, p: Params, site: str) -> tuple[Tensor, Tensor, Tensor]:
            flat = x.flatten(-2)
            mixes = F.linear(flat, p[f"{site}_fn"].to(dtype)).float()
            mixes = mixes * torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + eps)
            s, b = p[f"{site}_scale"], p[f"{site}_base"]
            pre = torch.sigmoid(mixes[..., :n] * s[0] + b[:n]) + hc_eps
            post = 2 * torch.sigmoid(mixes[..., n : 2 * n] * s[1] + b[n : 2 * n])
            comb = (mixes[..., 2 * n :] * s[2] + b[2 * n :]).unflatten(-1, (n, n))
            u = (pre[..., None] * x.float()).sum(-2).to(dtype)
            return u, post, sinkhorn(comb, iters, hc_eps)

        def hyper_post(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
            # sum over j of comb[j, k] x[j], spelt out so that it fuses into one pass.
            mixed = post[..., None] * y[..., None, :].float()
            for j in range(n):
                mixed = mixed + comb[..., j, :, None] * x[..., j : j + 1, :].float()
            return mixed.to(dtype)

        def compress(
            x: Tensor, p: Params, site: str, cut: tuple[int, int, bool], cos: Tensor, sin: Tensor
        ) -> Tensor:
            ratio, dim, overlap = cut
            kv = F.linear(x, p[f"{site}.wkv.weight"].to(dtype)).unflatten(1, (-1, ratio)).float()
            score = F.linear(x, p[f"{site}.wgate.weight"].to(dtype)).unflatten(1, (-1, ratio))
            score = score.float() + p[f"{site}.ape"]
            if overlap:
                kv = torch.cat((_shift(kv[..., :dim], 0.0), kv[..., dim:]), dim=2)
                score = torch.cat((_shift(score[..., :dim], -1e9), score[..., dim:]), dim=2)
            pooled = (score.softmax(2) * kv).sum(2).to(dtype)
            pooled = norm(pooled, p[f"{site}.norm.weight"], eps)
            return rotate(pooled, cos[::ratio], sin[::ratio])

        def attention(
            x: Tensor,
            p: Params,
            cos: Tensor,
            sin: Tensor,
            dense: Tensor,
            kv_true: Tensor | None,
            kv_drafted: Sequence[Tensor],
        ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
            B, S, _ = x.shape
            q_low = norm(F.linear(x, p["attn.wq_a.weight"].to(dtype)), p["attn.q_norm.weight"], eps)
            q = F.linear(q_low, p["attn.wq_b.weight"].to(dtype)).unflatten(-1, (heads, width))
            q = rotate(norm(q, None, eps), cos, sin)
            kv = norm(F.linear(x, p["attn.wkv.weight"].to(dtype)), p["attn.kv_norm.weight"], eps)
            kv = rotate(kv, cos, sin)
            sink = p["attn.attn_sink"].float()
            newest = len(kv_drafted) + 1 if kv_true is not None else 0
            weights, keys = _band(q, kv if kv_true is None else kv_true, window, newest)
            total = weights.sum(-1).view(B, S, heads) + sink.exp()
            out = torch.bmm(weights.to(dtype), keys).view(B, S, heads, width).float()
            for row in (*kv_drafted, kv) if kv_true is not None else ():
                weight = _weigh((q.float() * row[:, :, None].float()).sum(-1), width)
                total = total + weight
                out = out + weight[..., None] * row[:, :, None].float()
            index_loss = tie_loss = None
            if shape is not None:
                rows = compress(x, p, "attn.compressor", shape, cos, sin)
                t = torch.arange(S, device=x.device)
                visible = (
                    torch.arange(rows.shape[1], device=x.device) < ((t + 1) // shape[0])[:, None]
                )
                raw = torch.bmm(q.reshape(B, S * heads, width), rows.transpose(1, 2))
                mass = _weigh(raw.view(B, S, heads, -1).float(), width)
                mass = torch.where(visible[:, None], mass, 0.0)
                picked = mass
                if index_shape is not None:
                    scores, best = index(x.detach(), q_low.detach(), p, cos, sin)
                    scores = torch.where(visible, scores, -1e4)
                    mask = top_rows(scores, topk) | dense
                    picked = torch.where(mask[:, :, None], mass, 0.0)
                total = total + picked.sum(-1)
                summed = torch.bmm(picked.to(dtype).view(B, S * heads, -1), rows)
                out = out + summed.view(B, S, heads, width).float()
                if index_shape is not None:
                    target = (mass.detach() / total.detach()[..., None]).sum(2)
                    target = target / (target.sum(-1, keepdim=True) + 1e-9)
                    index_loss = -(target * scores.log_softmax(-1)).sum(-1).mean()
                    short = torch.where(visible, (TIE_MARGIN - best).relu(), 0.0)
                    tie_loss = short.sum(-1).mean()
            out = (out / total[..., None]).to(dtype)
            out = rotate(out, cos, -sin).flatten(2).unflatten(-1, (groups, -1))
            wo_a = p["attn.wo_a.weight"].to(dtype).unflatten(0, (groups, -1))
            low = torch.einsum("bsgi,goi->bsgo", out, wo_a).flatten(2)
            return F.linear(low, p["attn.wo_b.weight"].to(dtype)), index_loss, tie_loss, kv

        def index(
            x: Tensor, q_low: Tensor, p: Params, cos: Tensor, sin: Tensor
        ) -> tuple[Tensor, Tensor]:
            """Scores `[B, S, W]` and the best head's raw product, which must not be negative."""
            site = "attn.indexer"
            keys = compress(x, p, f"{site}.compressor", index_shape, cos, sin)
            q = F.linear(q_low, p[f"{site}.wq_b.weight"].to(dtype))
            q = rotate(q.unflatten(-1, (index_heads, index_dim)), cos, sin)
            weight = F.linear(x, p[f"{site}.weights_proj.weight"].to(dtype)).float()
            weight = weight * (index_dim * index_heads) ** -0.5
            raw = torch.bmm(q.flatten(1, 2), keys.transpose(1, 2))
            raw = raw.unflatten(1, (-1, index_heads)).float()
            return (raw.relu() * weight[..., None]).sum(2), raw.amax(2)

        def feed_forward(x: Tensor, p: Params, ids: Tensor) -> tuple[Tensor, Tensor]:
            scores = F.softplus(F.linear(x.float(), p["ffn.gate.weight"].float())).sqrt()
            if hashed:
                first, second = p["ffn.gate.tid2eid"][ids].unbind(-1)
            else:
                biased = (scores + p["ffn.gate.bias"]).detach()
                first = biased.argmax(-1)
                second = torch.where(_one_hot(first, experts), -1e9, biased).argmax(-1)
            mask = _one_hot(first, experts) | _one_hot(second, experts)
            gates = torch.where(mask, scores, 0.0)
            gates = gates / gates.sum(-1, keepdim=True) * scale
            w13, w2 = p["ffn.experts.w13"].to(dtype), p["ffn.experts.w2"].to(dtype)
            gate, up = F.linear(x, w13.flatten(0, 1)).unflatten(-1, (experts, 2, inner)).unbind(-2)
            h = (_swiglu(gate, up, clamp) * gates[..., None]).to(dtype)
            y = F.linear(h.flatten(-2), w2.transpose(0, 1).flatten(1))
            gate = F.linear(x, p["ffn.shared_experts.w1.weight"].to(dtype))
            up = F.linear(x, p["ffn.shared_experts.w3.weight"].to(dtype))
            h = _swiglu(gate, up, clamp).to(dtype)
            return y + F.linear(h, p["ffn.shared_experts.w2.weight"].to(dtype)), mask.sum((0, 1))

        def block(
            p: Params,
            x: Tensor,
            ids: Tensor,
            cos: Tensor,
            sin: Tensor,
            dense: Tensor,
            kv_true: Tensor | None = None,
            kv_drafted: Sequence[Tensor] = (),
        ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
            u, post, comb = hyper_pre(x, p, "hc_attn")
            u = norm(u, p["attn_norm.weight"], eps)
            y, kl, tie, kv = attention(u, p, cos, sin, dense, kv_true, kv_drafted)
            x = hyper_post(x, y, post, comb)
            u, post, comb = hyper_pre(x, p, "hc_ffn")
            y, load = feed_forward(norm(u, p["ffn_norm.weight"], eps), p, ids)
            return hyper_post(x, y, post, comb), kl, tie, load, kv

        return block


def _swiglu(gate: Tensor, up: Tensor, clamp: float | None) -> Tensor:
    gate, up = gate.float(), up.float()
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return F.silu(gate) * up


def _one_hot(index: Tensor, size: int) -> Tensor:
    return index[..., None] == torch.arange(size, device=index.device)


def _shift(x: Tensor, fill: float) -> Tensor:
    return torch.cat((torch.full_like(x[:, :1], fill), x[:, :-1]), dim=1)


def _weigh(raw: Tensor, width: int) -> Tensor:
    """Unnormalised softmax weights. Queries and keys are RMS-normalised, so scores stay small and
    no maximum is needed; the bound only guards against overflow."""
    return (raw * width**-0.5).clamp(max=60).exp()


def _band(q: Tensor, kv: Tensor, window: int, newest: int) -> tuple[Tensor, Tensor]:
    """Weights `[B S/window, window H, 2 window]` of window rows and the rows `[.., 2 window, E]`.

    Rows younger than `newest` positions are left out.
    """
    B, S, heads, width = q.shape
    blocks = S // window
    own = kv.view(B, blocks, window, width)
    keys = torch.cat((_shift(own, 0.0), own), dim=2).flatten(0, 1)
    raw = torch.bmm(q.reshape(B * blocks, window * heads, width), keys.transpose(1, 2))
    i = torch.arange(window, device=q.device)
    j = torch.arange(2 * window, device=q.device) - window
    age = i[:, None] - j
    mask = (age >= newest) & (age < window)
    first = torch.arange(blocks, device=q.device) == 0
    mask = mask & ~(first[:, None, None] & (j < 0))
    weights = _weigh(raw.view(B, blocks, window, heads, -1).float(), width)
    weights = torch.where(mask[:, :, None], weights, 0.0)
    return weights.view(B * blocks, window * heads, -1), keys
