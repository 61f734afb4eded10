"""The whole model as one uncached forward over full sequences: the oracle of every engine path.

Plain, differentiable PyTorch, written for reading and for checking the paged step programs against;
it also trains v4-nano. Section numbers refer to the DeepSeek-V4 technical report
(arXiv 2606.19348).

Shape suffixes: B sequences, S positions, D hidden, N residual streams, H heads, E head_dim,
W compressed rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from v4graph.model.rope import inverse_frequencies
from v4graph.ops.hyper import hyper_head, hyper_post, hyper_pre
from v4graph.ops.moe import route
from v4graph.ops.norm import rms_norm, swiglu
from v4graph.ops.rope import cos_sin, rotate
from v4graph.ops.rows import stored_rows
from v4graph.plan.weights import head_tensor
from v4graph.spec.model import (
    Attention,
    CompressedGroup,
    CompressorStateGroup,
    DenseFfn,
    Ffn,
    HashMoe,
    HeavyAttention,
    HyperConnections,
    ModelSpec,
    MtpSpeculation,
    SlidingWindowGroup,
    SparseAttention,
)

Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class Recomputed:
    """`logits [B, S, V]` in float32 and `streams [B, S, N, D]` after the last block."""

    logits: Tensor
    streams: Tensor
    outputs: tuple[Tensor, ...] = ()
    """Streams after the blocks that were asked for."""


class RecomputeModel:
    """Uncached forward of a spec over `params` (see `v4graph.model.params`).

    Methods are the seams of the architecture; the trainer overrides `attend` with a faster one.
    """

    def __init__(self, spec: ModelSpec, params: Params) -> None:
        self.spec = spec
        self.params = params
        device = next(iter(params.values())).device
        self.freqs = {k: inverse_frequencies(r).to(device) for k, r in spec.rope.items()}

    # Model -----------------------------------------------------------------------------------

    def forward(self, ids: Tensor, keep: Collection[int] = ()) -> Recomputed:
        """Run `ids [B, S]` from position 0; `keep` names blocks whose outputs are returned too."""
        x = self.embed(ids)
        outputs = []
        for i, (attention, ffn) in enumerate(self.spec.layer_kinds):
            x = self.block(f"layers.{i}", x, ids, attention, ffn)
            outputs += [x] if i in keep else []
        return Recomputed(self.logits(x, "", "norm.weight"), x, tuple(outputs))

    def draft(
        self, streams: Tensor, next_ids: Tensor, mode: MtpSpeculation, layer: int = 0
    ) -> Recomputed:
        """One MTP layer over whole sequences (section 2.4): row t takes the streams at t and the
        token at t + 1, sits at position t (rotated as t + `position_offset`) and predicts
        token t + 2.

        Args:
            streams: `[B, S, N, D]`, the main model's (or the previous draft step's) streams.
            next_ids: `[B, S]`, the token after each row's own.
        """
        y = self.draft_streams(streams, next_ids, mode, layer)
        return Recomputed(self.draft_logits(y, layer), y)

    def draft_streams(
        self, streams: Tensor, next_ids: Tensor, mode: MtpSpeculation, layer: int = 0
    ) -> Tensor:
        """The MTP layer's own streams `[B, S, N, D]`: what the next draft step starts from."""
        p, eps = f"mtp.{layer}", self.spec.norm_eps
        e = rms_norm(self.params["embed.weight"][next_ids], self.params[f"{p}.enorm.weight"], eps)
        if mode.mask_position_zero:
            e = torch.cat((torch.zeros_like(e[:, :1]), e[:, 1:]), dim=1)
        h = rms_norm(streams, self.params[f"{p}.hnorm.weight"], eps)
        e = F.linear(e, self.params[f"{p}.e_proj.weight"])
        h = F.linear(h, self.params[f"{p}.h_proj.weight"])
        x = h + e[:, :, None]
        return self.block(p, x, next_ids, mode.attention, mode.ffn, mode.position_offset)

    def draft_logits(self, streams: Tensor, layer: int = 0) -> Tensor:
        """Logits `[B, S, V]` of an MTP layer's streams: its own collapse and norm, shared head."""
        return self.logits(streams, f"mtp.{layer}.", f"mtp.{layer}.norm.weight")

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings repeated over the residual streams, `[B, S, N, D]`."""
        r = self.spec.residual
        streams = r.streams if isinstance(r, HyperConnections) else 1
        return self.params["embed.weight"][ids][:, :, None].expand(-1, -1, streams, -1)

    def logits(self, x_BSND: Tensor, head_prefix: str, norm: str) -> Tensor:
        """Collapse the streams, normalise and project on the vocabulary, in float32."""
        x = self.collapse_head(x_BSND, head_prefix)
        x = rms_norm(x, self.params[norm], self.spec.norm_eps)
        return F.linear(x.float(), self.params[head_tensor(self.spec)].float())

    def block(
        self, p: str, x: Tensor, ids: Tensor, attention: str, ffn: str, position_offset: int = 0
    ) -> Tensor:
        """One decoder block on the streams `[B, S, N, D]`."""
        a, f = self.spec.attention[attention], self.spec.ffn[ffn]
        eps = self.spec.norm_eps
        u, mix = self.hyper_pre(x, f"{p}.hc_attn")
        u = rms_norm(u, self.params[f"{p}.attn_norm.weight"], eps)
        y = self.attention(f"{p}.attn", a, u, position_offset)
        x = self.hyper_post(x, y, mix)
        u, mix = self.hyper_pre(x, f"{p}.hc_ffn")
        y = self.ffn(f"{p}.ffn", f, rms_norm(u, self.params[f"{p}.ffn_norm.weight"], eps), ids)
        return self.hyper_post(x, y, mix)

    # Hyper-connections (section 2.2) ---------------------------------------------------------

    def hyper_pre(self, x: Tensor, p: str) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Collapse streams into the sublayer input `[B, S, D]`; also `post [B, S, N]` and
        `comb [B, S, N, N]`."""
        r = self.spec.residual
        if not isinstance(r, HyperConnections):
            return x[:, :, 0], None
        u, post, comb = hyper_pre(
            x,
            self.params[f"{p}_fn"],
            self.params[f"{p}_base"],
            self.params[f"{p}_scale"],
            iters=r.sinkhorn_iters,
            eps=r.eps,
            norm_eps=self.spec.norm_eps,
        )
        return u, (post, comb)

    def hyper_post(self, x: Tensor, y: Tensor, mix: tuple[Tensor, Tensor] | None) -> Tensor:
        """Put a sublayer's output back on the streams."""
        return x + y[:, :, None] if mix is None else hyper_post(x, y, *mix)

    def collapse_head(self, x: Tensor, prefix: str) -> Tensor:
        """The final stream collapse `hc_head`, `[B, S, D]`."""
        r = self.spec.residual
        if not isinstance(r, HyperConnections):
            return x[:, :, 0]
        return hyper_head(
            x,
            self.params[f"{prefix}hc_head_fn"],
            self.params[f"{prefix}hc_head_base"],
            self.params[f"{prefix}hc_head_scale"],
            eps=r.eps,
            norm_eps=self.spec.norm_eps,
        )

    # Attention (section 2.3) -----------------------------------------------------------------

    def attention(self, p: str, a: Attention, x: Tensor, position_offset: int = 0) -> Tensor:
        """Sliding-window attention over raw rows plus the kind's compressed rows, `[B, S, D]`.

        `position_offset` is added to the rotary positions of raw rows and queries; compressed rows
        have none, so it is for sliding attention alone.
        """
        B, S, _ = x.shape
        freqs, eps = self.freqs[a.rope], self.spec.norm_eps
        positions = torch.arange(S, device=x.device)
        cos, sin = cos_sin(positions + position_offset, freqs)
        q_low = rms_norm(self.linear(f"{p}.wq_a", x), self.params[f"{p}.q_norm.weight"], eps)
        q = self.linear(f"{p}.wq_b", q_low).unflatten(-1, (a.heads, a.head_dim))
        q = rotate(rms_norm(q, None, eps), cos[:, None], sin[:, None])
        kv = rms_norm(self.linear(f"{p}.wkv", x), self.params[f"{p}.kv_norm.weight"], eps)
        kv = self.stored(a.caches.window, a, rotate(kv, cos, sin))

        rows, visible = None, None
        if isinstance(a, SparseAttention | HeavyAttention):
            group = self.spec.cache_groups[a.caches.compressed]
            assert isinstance(group, CompressedGroup)  # noqa: S101 (spec.check proved it)
            rows = self.compress(f"{p}.compressor", group, x, freqs)
            rows = self.stored(a.caches.compressed, a, rows)
            entries = torch.arange(rows.shape[1], device=x.device)
            visible = (entries < ((positions + 1) // group.ratio)[:, None]).expand(B, -1, -1)
            if isinstance(a, SparseAttention):
                visible = self.index_select(f"{p}.indexer", a, x, q_low, visible, cos, sin)
        window = self.spec.cache_groups[a.caches.window]
        assert isinstance(window, SlidingWindowGroup)  # noqa: S101 (spec.check proved it)
        out = self.attend(q, kv, rows, visible, self.params[f"{p}.attn_sink"], window.window)
        out = rotate(out, cos[:, None], -sin[:, None])
        grouped = out.flatten(2).unflatten(-1, (a.o_groups, -1))
        wo_a = self.params[f"{p}.wo_a.weight"].unflatten(0, (a.o_groups, a.o_lora_rank))
        low = torch.einsum("bsgi,goi->bsgo", grouped, wo_a).flatten(2)
        return self.linear(f"{p}.wo_b", low)

    def stored(self, group_name: str, a: Attention, rows: Tensor) -> Tensor:
        """Rows `[..., dim]` as a cache group would give them back: rounded as its format does."""
        group = self.spec.cache_groups[group_name]
        assert not isinstance(group, CompressorStateGroup)  # noqa: S101 (spec.check proved it)
        return stored_rows(rows, group.row.format, self.spec.rope[a.rope].dim)

    def attend(
        self,
        q_BSHE: Tensor,
        kv_BSE: Tensor,
        rows_BWE: Tensor | None,
        visible_BSW: Tensor | None,
        sink_H: Tensor,
        window: int,
    ) -> Tensor:
        """Softmax over window rows, visible compressed rows and the value-less sink."""
        positions = torch.arange(kv_BSE.shape[1], device=kv_BSE.device)
        age = positions[:, None] - positions
        mask = ((age >= 0) & (age < window)).expand(kv_BSE.shape[0], -1, -1)
        keys = kv_BSE
        if rows_BWE is not None and visible_BSW is not None:
            keys = torch.cat((kv_BSE, rows_BWE), dim=1)
            mask = torch.cat((mask, visible_BSW), dim=2)
        scores = torch.einsum("bshe,bke->bshk", q_BSHE, keys).float() * q_BSHE.shape[-1] ** -0.5
        scores = scores.masked_fill(~mask[:, :, None], float("-inf"))
        sink = sink_H.float()[:, None].expand(*scores.shape[:3], 1)
        probs = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        return torch.einsum("bshk,bke->bshe", probs.to(keys.dtype), keys)

    def compress(self, p: str, group: CompressedGroup, x: Tensor, freqs: Tensor) -> Tensor:
        """Compressed rows `[B, S // ratio, dim]` (eqs. 9-12 and 20-23), roped at window starts."""
        ratio, dim = group.ratio, group.row.dim
        W = x.shape[1] // ratio
        x = x[:, : W * ratio].float()
        kv = F.linear(x, self.params[f"{p}.wkv.weight"].float()).unflatten(1, (W, ratio))
        score = F.linear(x, self.params[f"{p}.wgate.weight"].float()).unflatten(1, (W, ratio))
        score = score + self.params[f"{p}.ape"].float()
        if group.overlap:
            # Window w pools the first half (Ca) of window w - 1 and the second (Cb) of its own.
            kv = torch.cat((_shift(kv[..., :dim], 0.0), kv[..., dim:]), dim=2)
            score = torch.cat((_shift(score[..., :dim], float("-inf")), score[..., dim:]), dim=2)
        pooled = (score.softmax(2) * kv).sum(2).to(self.params[f"{p}.wkv.weight"].dtype)
        pooled = rms_norm(pooled, self.params[f"{p}.norm.weight"], self.spec.norm_eps)
        starts = torch.arange(W, device=x.device) * ratio
        return rotate(pooled, *cos_sin(starts, freqs))

    def index_select(
        self,
        p: str,
        a: SparseAttention,
        x: Tensor,
        q_low: Tensor,
        causal_BSW: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Which compressed rows each query attends to, bool `[B, S, W]` (eqs. 13-17).

        Ties go to the lowest position: a stable descending sort decides.
        """
        scores = self.index_scores(p, a, x, q_low, cos, sin)
        scores = scores.masked_fill(~causal_BSW, float("-inf"))
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        picked = torch.zeros_like(causal_BSW).scatter(-1, order[..., : a.indexer.topk], True)
        return picked & causal_BSW

    def index_scores(
        self, p: str, a: SparseAttention, x: Tensor, q_low: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """`sum_h w_h relu(q_h . k_j)`, float32 `[B, S, W]`."""
        index = a.indexer
        group = self.spec.cache_groups[a.caches.index]
        assert isinstance(group, CompressedGroup)  # noqa: S101 (spec.check proved it)
        keys = self.compress(f"{p}.compressor", group, x, self.freqs[a.rope])
        keys = self.stored(a.caches.index, a, keys)
        q = self.linear(f"{p}.wq_b", q_low).unflatten(-1, (index.heads, index.dim))
        q = rotate(q, cos[:, None], sin[:, None])
        weight = F.linear(x, self.params[f"{p}.weights_proj.weight"]).float()
        weight = weight * (index.dim * index.heads) ** -0.5
        scores = torch.einsum("bshe,bke->bshk", q.float(), keys.float()).relu()
        return torch.einsum("bshk,bsh->bsk", scores, weight)

    # Feed-forward (section 2.1) --------------------------------------------------------------

    def ffn(self, p: str, f: Ffn, x: Tensor, ids: Tensor) -> Tensor:
        """Routed experts plus the shared expert, `[B, S, D]`."""
        if isinstance(f, DenseFfn):
            return self.swiglu(p, x, f.clamp)
        weights, chosen = self.route(p, f, x, ids)
        w13, w2 = self.params[f"{p}.experts.w13"], self.params[f"{p}.experts.w2"]
        flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1), dtype=torch.float32)
        chosen, weights = chosen.flatten(0, 1), weights.flatten(0, 1)
        for e in range(f.experts):
            token, slot = torch.where(chosen == e)
            gate, up = F.linear(flat[token], w13[e]).chunk(2, dim=-1)
            h = swiglu(gate.float(), up.float(), f.clamp) * weights[token, slot, None]
            out = out.index_add(0, token, F.linear(h.to(x.dtype), w2[e]).float())
        routed = out.view(x.shape).to(x.dtype)
        if f.shared_experts:
            routed = routed + self.swiglu(f"{p}.shared_experts", x, f.clamp)
        return routed

    def route(self, p: str, f: Ffn, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Routing weights (float32) and expert ids, both `[B, S, topk]`."""
        assert not isinstance(f, DenseFfn)  # noqa: S101
        logits = F.linear(x.float(), self.params[f"{p}.gate.weight"].float())
        hashed = isinstance(f, HashMoe)
        return route(
            logits,
            None if hashed else self.params[f"{p}.gate.bias"],
            self.params[f"{p}.gate.tid2eid"][ids] if hashed else None,
            topk=f.topk,
            scoring=f.scoring,
            norm_topk=f.norm_topk,
            scale=f.scale,
        )

    def swiglu(self, p: str, x: Tensor, clamp: float | None) -> Tensor:
        """A dense SwiGLU of the tensors `p.w1`, `p.w2`, `p.w3`."""
        gate, up = self.linear(f"{p}.w1", x), self.linear(f"{p}.w3", x)
        return self.linear(f"{p}.w2", swiglu(gate.float(), up.float(), clamp).to(x.dtype))

    def linear(self, p: str, x: Tensor) -> Tensor:
        return F.linear(x, self.params[f"{p}.weight"])


def _shift(x_BWRE: Tensor, fill: float) -> Tensor:
    """Move windows one later; the first window sees `fill`."""
    return torch.cat((torch.full_like(x_BWRE[:, :1], fill), x_BWRE[:, :-1]), dim=1)
