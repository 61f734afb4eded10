"""The training forward of a whole model and of its recurrent drafts (`block.py` has the layers)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nano.block import Block, norm
from v4graph.model.rope import inverse_frequencies
from v4graph.spec.model import ModelSpec, MtpSpeculation


@dataclass
class Aux:
    """What a block reports besides its output: the indexer's losses and the experts' load [K]."""

    kl: Tensor | None = None
    tie: Tensor | None = None
    load: Tensor | None = None
    kv: Tensor | None = None


class FastModel:
    """The whole model over `[B, S]` ids, its drafts to any depth, and the parts of the loss."""

    def __init__(
        self,
        spec: ModelSpec,
        params: dict[str, Tensor],
        length: int,
        compute: torch.dtype = torch.float32,
        compile_: bool = False,
    ) -> None:
        self.spec, self.params, self.compute = spec, params, compute
        device = params["embed.weight"].device
        self.dense = torch.zeros((), dtype=torch.bool, device=device)
        self.angles: dict[str, tuple[Tensor, Tensor]] = {}
        for name, rope in spec.rope.items():
            angle = torch.outer(torch.arange(length).float(), inverse_frequencies(rope)).to(device)
            self.angles[name] = (angle.cos(), angle.sin())
        modes = [m for m in spec.speculative.values() if isinstance(m, MtpSpeculation)]
        self.mtp = modes[0]
        self.layers = [(f"layers.{i}", *kinds) for i, kinds in enumerate(spec.layer_kinds)]
        self.draft_layer = ("mtp.0", self.mtp.attention, self.mtp.ffn)
        wrap = partial(torch.compile, fullgraph=True, dynamic=False) if compile_ else lambda f: f
        self.blocks = {
            kinds: wrap(Block(spec, *kinds, compute).build())
            for kinds in {(a, f) for _, a, f in [*self.layers, self.draft_layer]}
        }
        self._enter = wrap(self._enter_eager)
        self._collapse = wrap(self._collapse_eager)
        self.inside = {
            p: {k.removeprefix(f"{p}."): v for k, v in params.items() if k.startswith(f"{p}.")}
            for p, _, _ in [*self.layers, self.draft_layer]
        }

    def run(
        self,
        layer: tuple[str, str, str],
        x: Tensor,
        ids: Tensor,
        kv_true: Tensor | None = None,
        kv_drafted: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Aux]:
        """One block."""
        p, attention, ffn = layer
        cos, sin = self.angles[self.spec.attention[attention].rope]
        block = self.blocks[attention, ffn]
        inside = self.inside[p]
        x, kl, tie, load, kv = block(inside, x, ids, cos, sin, self.dense, kv_true, kv_drafted)
        return x, Aux(kl, tie, load, kv)

    def main(self, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Aux]]:
        """Normalised hidden rows `[B, S, D]` before the head, streams `[B, S, N, D]`, reports."""
        n = self.spec.residual.streams
        x = F.embedding(ids, self.params["embed.weight"]).to(self.compute)
        x = x[:, :, None].expand(-1, -1, n, -1).contiguous()
        reports = {}
        for layer in self.layers:
            x, reports[layer[0]] = self.run(layer, x, ids)
        hidden = self._collapse(x, *self._head(""), self.params["norm.weight"])
        return hidden, x, reports

    def drafts(self, streams: Tensor, ids: Tensor, depth: int) -> list[tuple[Tensor, Aux]]:
        """Hidden rows of every recurrent draft step: step d's row s predicts token s + 2.

        Step 1 takes the main streams at s; step d takes step d - 1's at s - 1 and sees what the
        engine's draft cache holds: rows up to s - d + 1 of step 1, then one row of each step.
        Rows s < d - 1 have no such history; their losses are masked by the caller.

        Args:
            ids: `[B, S + 1]`.
        """
        out: list[tuple[Tensor, Aux]] = []
        rows: list[Tensor] = []
        embedded = F.embedding(ids[:, 1:], self.params["embed.weight"]).to(self.compute)
        x = streams
        for d in range(depth):
            p = self.inside["mtp.0"]
            x = self._enter(
                x,
                embedded,
                p["enorm.weight"],
                p["hnorm.weight"],
                p["e_proj.weight"],
                p["h_proj.weight"],
            )
            drafted = tuple(_later(rows[j], d - j) for j in range(1, d))
            x, aux = self.run(self.draft_layer, x, ids[:, 1:], rows[0] if d else None, drafted)
            rows.append(aux.kv)
            out.append((self._collapse(x, *self._head("mtp.0."), p["norm.weight"]), aux))
            x = _later(x, 1)
        return out

    def _head(self, p: str) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(self.params[f"{p}hc_head_{k}"] for k in ("fn", "base", "scale"))

    def _enter_eager(
        self, x: Tensor, e: Tensor, enorm: Tensor, hnorm: Tensor, e_proj: Tensor, h_proj: Tensor
    ) -> Tensor:
        eps = self.spec.norm_eps
        e = F.linear(norm(e, enorm, eps), e_proj.to(self.compute))
        return F.linear(norm(x, hnorm, eps), h_proj.to(self.compute)) + e[:, :, None]

    def _collapse_eager(
        self, x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight: Tensor
    ) -> Tensor:
        eps, flat = self.spec.norm_eps, x.flatten(-2)
        mixes = F.linear(flat, fn.to(self.compute)).float()
        mixes = mixes * torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + eps)
        pre = torch.sigmoid(mixes * scale + base) + self.spec.residual.eps
        return norm((pre[..., None] * x.float()).sum(-2).to(self.compute), weight, eps)


def _later(x: Tensor, by: int) -> Tensor:
    """Rows moved `by` positions later along the sequence; zeros come in."""
    return torch.cat((torch.zeros_like(x[:, :by]), x[:, :-by]), dim=1)
