"""One decoder sublayer over paged caches, as pure functions of tensors.

Each class holds only what the spec fixes for a kind of layer; weights, pools and step metadata are
arguments. So all layers of one kind run, and compile, as one region.

Shape suffixes: T tokens in the step, N residual streams, D hidden, H heads, E head_dim.
"""

from __future__ import annotations

from torch import Tensor

from v4graph.model.paged import Rope
from v4graph.model.paged_operators import paged_rows
from v4graph.model.projections import (
    StoredParam,
    experts,
    grouped_linear,
    joint_linear,
    linear,
    linear_float32,
    split_linear,
    stack,
)
from v4graph.ops.custom import hyper as hyper_operators
from v4graph.ops.hyper import hyper_head, hyper_post, hyper_pre
from v4graph.ops.moe import route
from v4graph.ops.norm import rms_norm, swiglu
from v4graph.spec.model import (
    Attention,
    CompressedGroup,
    DenseFfn,
    Ffn,
    HashMoe,
    HyperConnections,
    ModelSpec,
    SparseAttention,
)

Tensors = dict[str, Tensor]


class ResidualSite:
    """How a sublayer hangs on the residual streams; one region serves every sublayer of a model."""

    def __init__(self, spec: ModelSpec, operators: bool = False) -> None:
        """`operators`: whether to call registered operators where there are some."""
        self.config = spec.residual
        self.norm_eps = spec.norm_eps
        self.operators = operators

    def enter(self, x_TND: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The normalised sublayer input `[T, D]`, and the mixing weights that `leave` takes.

        `weights` are the norm's, then (hyper-connections only) `fn`, `base` and `scale`.
        """
        r = self.config
        if isinstance(r, HyperConnections):
            norm, *mixing = weights
            numbers = {"iters": r.sinkhorn_iters, "eps": r.eps, "norm_eps": self.norm_eps}
            if self.operators:
                return hyper_operators.hyper_enter(x_TND, *mixing, norm, **numbers)
            u, post, comb = hyper_pre(x_TND, *mixing, **numbers)
            return rms_norm(u, norm, self.norm_eps), post, comb
        unused = x_TND.new_empty(0)
        return rms_norm(x_TND[:, 0], weights[0], self.norm_eps), unused, unused

    def leave(self, x_TND: Tensor, y_TD: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Put the sublayer's output back on the streams."""
        if isinstance(self.config, HyperConnections):
            leave = hyper_operators.hyper_leave if self.operators else hyper_post
            return leave(x_TND, y_TD, post, comb)
        return x_TND + y_TD[:, None]

    def weights(self, w: Tensors, sublayer: str) -> list[Tensor]:
        """What `enter` takes for `sublayer` (`attn` or `ffn`) of a layer's tensors."""
        names = [f"{sublayer}_norm.weight"]
        if isinstance(self.config, HyperConnections):
            names += [f"hc_{sublayer}_{part}" for part in ("fn", "base", "scale")]
        return [w[name] for name in names]


class AttentionSublayer:
    """Attention of one spec entry: writes its cache rows, closes windows, attends."""

    def __init__(self, spec: ModelSpec, name: str, operators: bool = False) -> None:
        """`operators`: whether to call registered operators where there are some; packed cache rows
        and stored weights always need them."""
        self.config: Attention = spec.attention[name]
        self.residual = ResidualSite(spec, operators)
        self.rows = paged_rows(spec, name, operators)
        self.eps = spec.norm_eps
        groups = {r: spec.cache_groups[g] for r, g in dict(self.config.caches).items()}
        self.compressed = tuple(r for r, g in groups.items() if isinstance(g, CompressedGroup))
        """Cache roles of compressed rows: `compressed`, and `index` with an indexer."""

    def pack(self, w: dict[str, StoredParam]) -> dict[str, StoredParam]:
        """Stack the projections that share an input.

        `attn.in`: q_low, kv and the indexer's head weights; `attn.q`: the heads' and the indexer's
        queries; `attn.compress`: (kv, gate) of the compressor, then of the indexer's.
        """
        out = dict(w)
        sparse = isinstance(self.config, SparseAttention)
        index = ["attn.indexer.weights_proj.weight"] if sparse else []
        queries = ["attn.indexer.wq_b.weight"] if sparse else []
        stack(out, "attn.in", ["attn.wq_a.weight", "attn.wkv.weight", *index])
        stack(out, "attn.q", ["attn.wq_b.weight", *queries])
        if self.compressed:
            compressors = [f"attn.{p}compressor" for p in ("", "indexer.")[: 1 + sparse]]
            names = [f"{p}.{part}.weight" for p in compressors for part in ("wkv", "wgate")]
            stack(out, "attn.compress", names)
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
            w: the layer's tensors by name below `layers.N.`, packed and flattened.
            pools: `[rows, dim]` or uint8 pages by cache role (`window`, `compressed`, ...), written
                in place.
            m: the program's static buffers, and `freqs.<rope>`.
        """
        rope = self.rope(m)
        queries, kv, weights = self.project(h, w)
        q, q_index = self.rows.enter(queries, kv, w["attn.kv_norm.weight"], rope, pools, m)
        if self.compressed:
            states = linear_float32(h, w["attn.compress"])
            own = w["attn.compressor.ape"].shape[1] * 2
            parts = {"compressed": states[:, :own], "index": states[:, own:]}
            for role in self.compressed:
                self.rows.close_windows(role, parts[role], h.dtype, w, pools, m)
        index = None if weights is None else (q_index, weights)
        out = self.rows.attend(q, w["attn.attn_sink"], index, pools, m)
        return self.leave(x_TND, out, post, comb, w, rope)

    def rope(self, m: Tensors) -> Rope:
        """Cosines and sines of the step's positions, `[T, rope_dim / 2]` each."""
        return m[f"rope.{self.config.rope}.cos"], m[f"rope.{self.config.rope}.sin"]

    def project(self, h: Tensor, w: Tensors) -> tuple[Tensor, Tensor, Tensor | None]:
        """What a step needs of `h [T, D]`, before norms and rotation: the queries `[T, Q]` of the
        heads and the indexer, each token's row `[T, E]`, an indexer's head weights `[T, H']`."""
        a = self.config
        indexer = a.indexer if isinstance(a, SparseAttention) else None
        sizes = [a.q_lora_rank, a.head_dim, *([indexer.heads] if indexer is not None else [])]
        q_low, kv, *rest = split_linear(h, w, "attn.in", sizes)
        queries = joint_linear(rms_norm(q_low, w["attn.q_norm.weight"], self.eps), w, "attn.q")
        if indexer is None:
            return queries, kv, None
        return queries, kv, rest[0].float() * (indexer.dim * indexer.heads) ** -0.5

    def leave(
        self, x_TND: Tensor, out_THE: Tensor, post: Tensor, comb: Tensor, w: Tensors, rope: Rope
    ) -> Tensor:
        """Rotate the heads' outputs back, project them in groups, put them on the streams."""
        out = self.rows.leave(out_THE, rope)
        grouped = out.flatten(1).unflatten(-1, (self.config.o_groups, -1))
        low = grouped_linear(grouped, w, "attn.wo_a.weight").flatten(1)
        return self.residual.leave(x_TND, linear(low, w, "attn.wo_b.weight"), post, comb)


class FfnSublayer:
    """Feed-forward of one spec entry: routed and shared experts, or a dense SwiGLU."""

    def __init__(self, spec: ModelSpec, name: str, operators: bool = False) -> None:
        """`operators` as for `AttentionSublayer`."""
        self.config: Ffn = spec.ffn[name]
        self.residual = ResidualSite(spec, operators)

    def pack(self, w: dict[str, StoredParam]) -> dict[str, StoredParam]:
        """Stack gate and up of dense SwiGLUs."""
        out = dict(w)
        p = "ffn" if isinstance(self.config, DenseFfn) else "ffn.shared_experts"
        if f"{p}.w1.weight" in out:
            stack(out, f"{p}.w13", [f"{p}.w1.weight", f"{p}.w3.weight"])
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
        weights, chosen = route(
            linear_float32(h, w["ffn.gate.weight"]),
            None if hashed else w["ffn.gate.bias"],
            w["ffn.gate.tid2eid"][m["input_ids"]] if hashed else None,
            topk=f.topk,
            scoring=f.scoring,
            norm_topk=f.norm_topk,
            scale=f.scale,
        )
        y = experts(h, weights, chosen, m["is_valid_token"], w, "ffn.experts", f.clamp)
        if f.shared_experts:
            y = y + _swiglu(h, w, "ffn.shared_experts", f.clamp)
        return self.residual.leave(x_TND, y, post, comb)


def _swiglu(h: Tensor, w: Tensors, p: str, clamp: float | None) -> Tensor:
    width = w[f"{p}.w2.weight"].shape[1]
    gate, up = split_linear(h, w, f"{p}.w13", [width, width])
    hidden = swiglu(gate.float(), up.float(), clamp).to(h.dtype)
    return linear(hidden, w, f"{p}.w2.weight")


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
        return linear_float32(x, w["head.weight"])
