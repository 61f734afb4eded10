"""One decoder sublayer over paged caches, as pure functions of tensors.

Each class holds only what the spec fixes for a kind of layer; weights, pools and step metadata are
arguments. So all layers of one kind run, and compile, as one region.

Shape suffixes: T tokens in the step, N residual streams, D hidden, H heads, E head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from v4graph.ops.attention import gather_rows, paged_attention
from v4graph.ops.blocks import (
    BLOCK_TOKENS,
    Blocks,
    block_attention,
    block_index_scores,
    token_blocks,
)
from v4graph.ops.cache import write_rows
from v4graph.ops.compress import pool_windows, state_rows
from v4graph.ops.hyper import hyper_head, hyper_post, hyper_pre
from v4graph.ops.indexer import index_scores, select_topk
from v4graph.ops.moe import moe_experts, route
from v4graph.ops.norm import rms_norm, swiglu
from v4graph.ops.rope import cos_sin, rotate
from v4graph.spec.model import (
    Attention,
    CompressedGroup,
    DenseFfn,
    Ffn,
    HashMoe,
    HyperConnections,
    ModelSpec,
    SlidingAttention,
    SparseAttention,
)

Tensors = dict[str, Tensor]


class ResidualSite:
    """How a sublayer hangs on the residual streams; one region serves every sublayer of a model."""

    def __init__(self, spec: ModelSpec) -> None:
        self.config = spec.residual
        self.norm_eps = spec.norm_eps

    def enter(self, x_TND: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The normalised sublayer input `[T, D]`, and the mixing weights that `leave` takes.

        `weights` are the norm's, then (hyper-connections only) `fn`, `base` and `scale`.
        """
        r = self.config
        if isinstance(r, HyperConnections):
            norm, fn, base, scale = weights
            u, post, comb = hyper_pre(
                x_TND, fn, base, scale, iters=r.sinkhorn_iters, eps=r.eps, norm_eps=self.norm_eps
            )
            return rms_norm(u, norm, self.norm_eps), post, comb
        unused = x_TND.new_empty(0)
        return rms_norm(x_TND[:, 0], weights[0], self.norm_eps), unused, unused

    def leave(self, x_TND: Tensor, y_TD: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Put the sublayer's output back on the streams."""
        if isinstance(self.config, HyperConnections):
            return hyper_post(x_TND, y_TD, post, comb)
        return x_TND + y_TD[:, None]

    def weights(self, w: Tensors, sublayer: str) -> list[Tensor]:
        """What `enter` takes for `sublayer` (`attn` or `ffn`) of a layer's tensors."""
        names = [f"{sublayer}_norm.weight"]
        if isinstance(self.config, HyperConnections):
            names += [f"hc_{sublayer}_{part}" for part in ("fn", "base", "scale")]
        return [w[name] for name in names]


class AttentionSublayer:
    """Attention of one spec entry: writes its cache rows, closes windows, attends."""

    def __init__(self, spec: ModelSpec, name: str) -> None:
        self.config: Attention = spec.attention[name]
        self.residual = ResidualSite(spec)
        self.eps = spec.norm_eps
        self.caches: dict[str, str] = dict(self.config.caches)
        self.compressed: dict[str, CompressedGroup] = {
            role: group
            for role, group_name in self.caches.items()
            if isinstance(group := spec.cache_groups[group_name], CompressedGroup)
        }

    def pack(self, w: Tensors) -> Tensors:
        """Stack the projections that share an input; compressor projections become float32.

        `attn.in`: q_low, kv and the indexer's head weights; `attn.q`: the heads' and the indexer's
        queries; `attn.compress`: (kv, gate) of the compressor, then of the indexer's.
        """
        out = dict(w)
        sparse = isinstance(self.config, SparseAttention)
        index = ["attn.indexer.weights_proj.weight"] if sparse else []
        queries = ["attn.indexer.wq_b.weight"] if sparse else []
        _stack(out, "attn.in", ["attn.wq_a.weight", "attn.wkv.weight", *index])
        _stack(out, "attn.q", ["attn.wq_b.weight", *queries])
        compressors = [f"attn.{p}compressor" for p in ("", "indexer.")[: 1 + sparse]]
        if self.compressed:
            names = [f"{p}.{part}.weight" for p in compressors for part in ("wkv", "wgate")]
            _stack(out, "attn.compress", names)
            out["attn.compress"] = out["attn.compress"].float()
        return out

    def __call__(
        self,
        x_TND: Tensor,
        h: Tensor,
        post: Tensor,
        comb: Tensor,
        w: Tensors,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        """Run the sublayer.

        Args:
            x_TND: residual streams; h, post, comb: what `ResidualSite.enter` made of them.
            w: the layer's tensors by name below `layers.N.`, as `pack` left them.
            pools: `[rows, dim]` by cache role (`window`, `compressed`, ...), written in place.
            m: the program's static buffers, and `freqs.<rope>`.
        """
        a = self.config
        cos, sin = self.rope(m)
        projected, queries, q, kv = self.project(h, w, cos, sin)
        width = a.heads * a.head_dim
        window = self.caches["window"]
        write_rows(pools["window"], m[f"{window}.slot_mapping"], kv)

        rows = slots = chosen = None
        blocks = self._blocks(m)
        if not isinstance(a, SlidingAttention):
            states = F.linear(h.float(), w["attn.compress"])
            own = w["attn.compressor.ape"].shape[1] * 2
            self._close_windows(
                "attn.compressor", "compressed", "state", states[:, :own], h.dtype, w, pools, m
            )
            rows, slots = pools["compressed"], m[f"{self.caches['compressed']}.read_slots"]
        if isinstance(a, SparseAttention):
            self._close_windows(
                "attn.indexer.compressor",
                "index",
                "index_state",
                states[:, own:],
                h.dtype,
                w,
                pools,
                m,
            )
            head_weights = projected[:, a.q_lora_rank + a.head_dim :]
            chosen = self._index(a, queries[:, width:], head_weights, cos, sin, blocks, pools, m)
        out = self._attend(q, rows, slots, chosen, blocks, w, pools, m)
        return self.leave(x_TND, out, post, comb, w, cos, sin)

    def rope(self, m: Tensors) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the step's positions, `[T, rope_dim / 2]` each."""
        return m[f"rope.{self.config.rope}.cos"], m[f"rope.{self.config.rope}.sin"]

    def project(
        self, h: Tensor, w: Tensors, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `attn.in` and `attn.q` make of `h [T, D]`, and of these the heads' rotated queries
        `[T, H, E]` and the rotated row `[T, E]` of each token."""
        a, eps = self.config, self.eps
        projected = F.linear(h, w["attn.in"])
        q_low, kv = projected[:, : a.q_lora_rank], projected[:, a.q_lora_rank :][:, : a.head_dim]
        q_low = rms_norm(q_low, w["attn.q_norm.weight"], eps)
        queries = F.linear(q_low, w["attn.q"])
        q = queries[:, : a.heads * a.head_dim].unflatten(-1, (a.heads, a.head_dim))
        q = rotate(rms_norm(q, None, eps), cos[:, None], sin[:, None])
        kv = rotate(rms_norm(kv, w["attn.kv_norm.weight"], eps), cos, sin)
        return projected, queries, q, kv

    def leave(
        self,
        x_TND: Tensor,
        out_THE: Tensor,
        post: Tensor,
        comb: Tensor,
        w: Tensors,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        """Rotate the heads' outputs back, project them in groups, put them on the streams."""
        a = self.config
        out = rotate(out_THE, cos[:, None], -sin[:, None])
        grouped = out.flatten(1).unflatten(-1, (a.o_groups, -1)).transpose(0, 1)
        wo_a = w["attn.wo_a.weight"].unflatten(0, (a.o_groups, a.o_lora_rank))
        low = torch.bmm(grouped, wo_a.transpose(1, 2)).transpose(0, 1).flatten(1)
        return self.residual.leave(x_TND, F.linear(low, w["attn.wo_b.weight"]), post, comb)

    def _blocks(self, m: Tensors) -> Blocks | None:
        """Blocks of neighbouring tokens, where a step has many tokens of few requests."""
        slots = m[f"{self.caches['window']}.read_slots"]
        if "logits_rows" not in m or slots.shape[1] < 2:
            return None
        num_requests = m["logits_rows"].shape[0]
        few = num_requests * BLOCK_TOKENS <= slots.shape[0]
        return token_blocks(slots, num_requests) if few else None

    def _attend(
        self,
        q: Tensor,
        rows: Tensor | None,
        slots: Tensor | None,
        chosen: Tensor | None,
        blocks: Blocks | None,
        w: Tensors,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        """Attention to the window and to compressed `rows` at `slots [T, C]`.

        `chosen [T, K]` names the columns of `slots` that count, -1 where fewer.
        """
        a = self.config
        window, sink, scale = pools["window"], w["attn.attn_sink"], a.head_dim**-0.5
        near = m[f"{self.caches['window']}.read_slots"]
        # A block multiplies every visible row, so it pays only while most of them are chosen.
        sparse = chosen is not None and slots is not None and slots.shape[1] > 4 * chosen.shape[1]
        if blocks is not None and not sparse:
            mask = None
            if chosen is not None and slots is not None:
                beyond = slots.shape[1]
                mask = torch.zeros(len(slots), beyond + 1, dtype=torch.bool, device=slots.device)
                mask = mask.scatter(1, torch.where(chosen < 0, beyond, chosen), True)[:, :beyond]
            return block_attention(q, window, near, rows, slots, mask, sink, scale, blocks)
        if chosen is not None and slots is not None:
            slots = torch.where(chosen >= 0, slots.gather(1, chosen.clamp_min(0)), -1)
        return paged_attention(q, window, near, rows, slots, sink, scale)

    def _close_windows(
        self,
        p: str,
        role: str,
        state: str,
        projected: Tensor,
        dtype: torch.dtype,
        w: Tensors,
        pools: Tensors,
        m: Tensors,
    ) -> None:
        """Write this step's state rows, then the compressed rows of the windows it closes."""
        group, state_name = self.compressed[role], self.caches[state]
        kv, score = projected.chunk(2, dim=-1)
        new = state_rows(kv, score, w[f"{p}.ape"], m["positions"])
        write_rows(pools[state], m[f"{state_name}.slot_mapping"], new)
        read = m[f"{state_name}.read_slots"]
        last = m[f"closing_positions.{group.ratio}"]
        start = (last - (group.ratio - 1)).clamp_min(0)
        cos, sin = cos_sin(start, m[f"freqs.{self.config.rope}"])
        pooled = pool_windows(
            gather_rows(pools[state], read),
            read >= 0,
            w[f"{p}.norm.weight"],
            cos,
            sin,
            overlap=group.overlap,
            norm_eps=self.eps,
            dtype=dtype,
        )
        write_rows(pools[role], m[f"{self.caches[role]}.slot_mapping"], pooled)

    def _index(
        self,
        a: SparseAttention,
        queries: Tensor,
        head_weights: Tensor,
        cos: Tensor,
        sin: Tensor,
        blocks: Blocks | None,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        """Which of its visible compressed rows each token attends to, `[T, K]`, -1 where fewer."""
        index = a.indexer
        q = queries.unflatten(-1, (index.heads, index.dim))
        q = rotate(q, cos[:, None], sin[:, None])
        weights = head_weights.float() * (index.dim * index.heads) ** -0.5
        name = self.caches["index"]
        slots = m[f"{name}.read_slots"]
        if blocks is None:
            scores = index_scores(q, gather_rows(pools["index"], slots), weights)
        else:
            scores = block_index_scores(q, pools["index"], slots, weights, blocks)
        return select_topk(scores, m[f"{name}.num_entries"], index.topk)


class FfnSublayer:
    """Feed-forward of one spec entry: routed and shared experts, or a dense SwiGLU."""

    def __init__(self, spec: ModelSpec, name: str) -> None:
        self.config: Ffn = spec.ffn[name]
        self.residual = ResidualSite(spec)

    def pack(self, w: Tensors) -> Tensors:
        """Stack gate and up of dense SwiGLUs; the router becomes float32."""
        out = dict(w)
        p = "ffn" if isinstance(self.config, DenseFfn) else "ffn.shared_experts"
        if f"{p}.w1.weight" in out:
            _stack(out, f"{p}.w13", [f"{p}.w1.weight", f"{p}.w3.weight"])
        if "ffn.gate.weight" in out:
            out["ffn.gate.weight"] = out["ffn.gate.weight"].float()
        return out

    def __call__(
        self, x_TND: Tensor, h: Tensor, post: Tensor, comb: Tensor, w: Tensors, m: Tensors
    ) -> Tensor:
        """Run the sublayer; arguments as in `AttentionSublayer`."""
        f = self.config
        if isinstance(f, DenseFfn):
            y = _swiglu(h, w, "ffn", f.clamp)
            return self.residual.leave(x_TND, y, post, comb)
        hashed = isinstance(f, HashMoe)
        weights, experts = route(
            F.linear(h.float(), w["ffn.gate.weight"]),
            None if hashed else w["ffn.gate.bias"],
            w["ffn.gate.tid2eid"][m["input_ids"]] if hashed else None,
            topk=f.topk,
            scoring=f.scoring,
            norm_topk=f.norm_topk,
            scale=f.scale,
        )
        y = moe_experts(h, weights, experts, w["ffn.experts.w13"], w["ffn.experts.w2"], f.clamp)
        if f.shared_experts:
            y = y + _swiglu(h, w, "ffn.shared_experts", f.clamp)
        return self.residual.leave(x_TND, y, post, comb)


def _swiglu(h: Tensor, w: Tensors, p: str, clamp: float | None) -> Tensor:
    gate, up = F.linear(h, w[f"{p}.w13"]).chunk(2, dim=-1)
    hidden = swiglu(gate.float(), up.float(), clamp).to(h.dtype)
    return F.linear(hidden, w[f"{p}.w2.weight"])


def _stack(w: Tensors, name: str, parts: list[str]) -> None:
    """Replace `parts` by their concatenation along the output axis."""
    w[name] = torch.cat([w.pop(part) for part in parts])


class Head:
    """Embedding at one end, stream collapse, final norm and vocabulary projection at the other."""

    def __init__(self, spec: ModelSpec) -> None:
        self.config = spec.residual
        self.norm_eps = spec.norm_eps

    def embed(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """Token embeddings on every stream, `[T, N, D]`."""
        streams = self.config.streams if isinstance(self.config, HyperConnections) else 1
        return embedding[ids][:, None].expand(-1, streams, -1).contiguous()

    def logits(self, x_TND: Tensor, rows: Tensor | None, w: Tensors) -> Tensor:
        """Float32 logits `[R, V]` of the tokens at `rows [R]`; of all of them without `rows`."""
        x = x_TND if rows is None else x_TND[rows]
        if isinstance(self.config, HyperConnections):
            x = hyper_head(
                x,
                w["hc_head_fn"],
                w["hc_head_base"],
                w["hc_head_scale"],
                eps=self.config.eps,
                norm_eps=self.norm_eps,
            )
        else:
            x = x[:, 0]
        x = rms_norm(x, w["norm.weight"], self.norm_eps)
        return F.linear(x.float(), w["head.weight"].float())
