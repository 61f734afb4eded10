"""DSpark draft layers (arXiv 2607.05147, as two public inference engines implement them for V4).

They attend to rows made of the main model's features, one a token and layer; a block of the newest
token and noise tokens behind it drafts one token a row. A row of the block reads the `window`
features up to the newest one and all rows of its block.

Shape suffixes: T tokens, R requests, N residual streams, D hidden, F target layers, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from v4graph.model.drafting import HEAD
from v4graph.model.projections import linear, linear_rows
from v4graph.model.sublayers import AttentionSublayer, Head
from v4graph.ops.norm import rms_norm
from v4graph.spec.model import DsparkSpeculation, ModelSpec

Tensors = dict[str, Tensor]


def features(*outputs_TND: Tensor) -> Tensor:
    """What the draft layers take over of the main model: `[T, F D]`, the mean over the residual
    streams of each target layer's output."""
    return torch.cat([x.mean(1) for x in outputs_TND], dim=-1)


def context(features_TF: Tensor, w: Tensors, norm_eps: float) -> Tensor:
    """`RMS(main_proj features)`, `[T, D]`: shared by all draft layers.

    `w` are the first layer's tensors by name below `mtp.0.`.
    """
    return rms_norm(linear(features_TF, w, "main_proj.weight"), w["main_norm.weight"], norm_eps)


def markov(base_V: Tensor, previous: Tensor, w: Tensors) -> Tensor:
    """Logits `[..., V]` of a draft behind the token `previous [...]`: `base + W2 W1[previous]`.

    `w` are the last layer's tensors by name below `mtp.N.`.
    """
    low = w["markov_head.markov_w1.weight"][previous].float()
    return base_V + F.linear(low, w["markov_head.markov_w2.weight"].float())


class BlockAttention(AttentionSublayer):
    """Attention of a draft layer: over context rows, and within the block without order."""

    def __init__(
        self, spec: ModelSpec, name: str, mode: DsparkSpeculation, operators: bool = False
    ) -> None:
        super().__init__(spec, name, operators)
        self.block_size = mode.block_size

    def write(self, main_TD: Tensor, w: Tensors, pools: Tensors, m: Tensors) -> None:
        """Write the context rows of the step's tokens; `main` is what `context` returns."""
        a = self.config
        kv = linear_rows(main_TD, w, "attn.in", a.q_lora_rank, a.head_dim)
        self.rows.write_window(kv, w["attn.kv_norm.weight"], self.rope(m), pools, m)

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
        """Run the sublayer over whole blocks; arguments as in `AttentionSublayer`."""
        rope = self.rope(m)
        queries, kv, _ = self.project(h, w)
        row = torch.arange(len(kv), device=kv.device)[:, None]
        block = row - row % self.block_size + torch.arange(self.block_size, device=kv.device)
        norm, sink = w["attn.kv_norm.weight"], w["attn.attn_sink"]
        out = self.rows.attend_block(queries, kv, norm, rope, block, sink, pools, m)
        return self.leave(x_TND, out, post, comb, w, rope)


class BlockHead:
    """From the last layer's streams to logits."""

    def __init__(self, spec: ModelSpec, mode: DsparkSpeculation) -> None:
        self.head = Head(spec)
        self.block_size = mode.block_size

    def base(self, x_TND: Tensor, w: Tensors, head: Tensor) -> Tensor:
        """Float32 logits `[R, block_size, V]` before the Markov head."""
        tensors = {k: w[k] for k in HEAD if k in w} | {"head.weight": head}
        return self.head.logits(x_TND, None, tensors).unflatten(0, (-1, self.block_size))

    def next_draft(self, table: Tensors, slots: Tensor, base_RBV: Tensor, w: Tensors) -> Tensor:
        """Logits `[R, V]` of each request's next draft, behind those that the table holds."""
        count = table["num_drafts"][slots]
        newest = table["token_ids"][slots, (table["num_tokens"][slots] - 1).clamp_min(0)]
        drafts = table["draft_tokens"][slots]
        last = drafts.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]
        row = torch.arange(len(slots), device=slots.device)
        base = base_RBV[row, count.clamp_max(self.block_size - 1)]
        return markov(base, torch.where(count > 0, last, newest), w)
