"""DSpark drafts by full recompute: the oracle of the paged stages that draft blocks.

Shape suffixes: B branches (one a round), K block rows, S context positions, N residual streams,
D hidden, H heads, E head_dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from v4graph.model.recompute import Recomputed, RecomputeModel
from v4graph.ops.norm import rms_norm
from v4graph.ops.rope import cos_sin, rotate
from v4graph.spec.model import DsparkSpeculation, SlidingWindowGroup


class DsparkRecompute:
    """The draft layers of a mode over what one forward of the main model left."""

    def __init__(
        self, model: RecomputeModel, mode: DsparkSpeculation, ids_S: Tensor, main: Recomputed
    ) -> None:
        """`main` is `model.forward(ids[None], mode.target_layer_ids)`."""
        self.model, self.mode, self.ids = model, mode, ids_S
        self.attention = model.spec.attention[mode.attention]
        window = model.spec.cache_groups[dict(self.attention.caches)["window"]]
        assert isinstance(window, SlidingWindowGroup)  # noqa: S101 (spec.check proved it)
        self.window = window.window
        found = torch.cat([x[0].mean(1) for x in main.outputs], dim=-1)
        projected = model.linear("mtp.0.main_proj", found)
        context = self._norm("mtp.0.main_norm.weight", projected)
        positions = torch.arange(len(ids_S), device=ids_S.device)
        rope = cos_sin(positions, model.freqs[self.attention.rope])
        self.rows = [
            self._stored(rotate(self._row(f"mtp.{i}.attn", context), *rope))
            for i in range(mode.num_layers)
        ]

    def _stored(self, rows: Tensor) -> Tensor:
        return self.model.stored(self.attention.caches.window, self.attention, rows)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.model.params[name], self.model.spec.norm_eps)

    def _row(self, p: str, x: Tensor) -> Tensor:
        return self._norm(f"{p}.kv_norm.weight", self.model.linear(f"{p}.wkv", x))

    def drafts(self, known: Sequence[int], forced: Sequence[Sequence[int | None]]) -> list[Tensor]:
        """Logits `[k, V]` of the drafts behind each known length.

        Args:
            known: tokens known before each round; the newest of them has no features yet.
            forced: what each branch goes on with; None is the layers' own choice.
        """
        base = self._base(torch.tensor(list(known), device=self.ids.device))
        last = f"mtp.{self.mode.num_layers - 1}.markov_head"
        w1, w2 = (self.model.params[f"{last}.markov_w{i}.weight"].float() for i in (1, 2))
        out = []
        for rows, n, own in zip(base, known, forced, strict=True):
            previous, logits = int(self.ids[n - 1]), []
            for row, draft in zip(rows, own, strict=False):
                logits.append(row + w2 @ w1[previous])
                previous = int(logits[-1].argmax()) if draft is None else draft
            out.append(torch.stack(logits))
        return out

    def _base(self, known_B: Tensor) -> Tensor:
        """Logits `[B, K, V]` of the blocks, before the Markov head."""
        mode, model = self.mode, self.model
        ids = torch.full((len(known_B), mode.block_size), mode.noise_token_id).to(known_B)
        ids[:, 0] = self.ids[known_B - 1]
        positions = known_B[:, None] - 1 + torch.arange(mode.block_size, device=ids.device)
        x = model.embed(ids)
        ffn = model.spec.ffn[mode.ffn]
        for i in range(mode.num_layers):
            p = f"mtp.{i}"
            u, mix = model.hyper_pre(x, f"{p}.hc_attn")
            h = self._norm(f"{p}.attn_norm.weight", u)
            x = model.hyper_post(x, self._attend(f"{p}.attn", h, positions, self.rows[i]), mix)
            u, mix = model.hyper_pre(x, f"{p}.hc_ffn")
            h = self._norm(f"{p}.ffn_norm.weight", u)
            x = model.hyper_post(x, model.ffn(f"{p}.ffn", ffn, h, ids), mix)
        return model.logits(x, f"mtp.{mode.num_layers - 1}.", f"{p}.norm.weight")

    def _attend(self, p: str, h_BKD: Tensor, positions_BK: Tensor, rows_SE: Tensor) -> Tensor:
        a, model = self.attention, self.model
        cos, sin = cos_sin(positions_BK, model.freqs[a.rope])
        q_low = self._norm(f"{p}.q_norm.weight", model.linear(f"{p}.wq_a", h_BKD))
        q = model.linear(f"{p}.wq_b", q_low).unflatten(-1, (a.heads, a.head_dim))
        q = rotate(rms_norm(q, None, model.spec.norm_eps), cos[:, :, None], sin[:, :, None])
        block = self._stored(rotate(self._row(p, h_BKD), cos, sin))
        # The newest features lie right before the block.
        age = positions_BK[:, :1] - 1 - torch.arange(len(rows_SE), device=h_BKD.device)
        seen = (age >= 0) & (age < self.window)
        scores = torch.cat(
            (
                torch.einsum("bkhe,se->bkhs", q, rows_SE).masked_fill(
                    ~seen[:, None, None], float("-inf")
                ),
                torch.einsum("bkhe,bje->bkhj", q, block),
            ),
            dim=-1,
        )
        sink = model.params[f"{p}.attn_sink"].float()[:, None].expand(*q.shape[:3], 1)
        scores = torch.cat((scores.float() * a.head_dim**-0.5, sink), dim=-1)
        probs = scores.softmax(-1)[..., :-1].to(h_BKD.dtype)
        near, own = probs.split([len(rows_SE), block.shape[1]], dim=-1)
        out = torch.einsum("bkhs,se->bkhe", near, rows_SE)
        out = out + torch.einsum("bkhj,bje->bkhe", own, block)
        out = rotate(out, cos[:, :, None], -sin[:, :, None])
        grouped = out.flatten(2).unflatten(-1, (a.o_groups, -1))
        wo_a = model.params[f"{p}.wo_a.weight"].unflatten(0, (a.o_groups, a.o_lora_rank))
        return model.linear(f"{p}.wo_b", torch.einsum("bsgi,goi->bsgo", grouped, wo_a).flatten(2))
