"""The input and the head of an MTP draft layer (V4 report section 2.4).

The layer between them is an ordinary decoder block (`sublayers.py`) with caches of its own.

Shape suffixes: T tokens in the step, N residual streams, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.model.projections import linear
from v4graph.model.sublayers import Head
from v4graph.ops.norm import rms_norm
from v4graph.spec.model import ModelSpec, MtpSpeculation

Tensors = dict[str, Tensor]
HEAD = ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight")


class DraftLayer:
    """What one MTP layer does before and after its block."""

    def __init__(self, spec: ModelSpec, mode: MtpSpeculation) -> None:
        self.mode = mode
        self.eps = spec.norm_eps
        self.head = Head(spec)

    def enter(
        self, streams_TND: Tensor, ids: Tensor, positions: Tensor, embedding: Tensor, w: Tensors
    ) -> Tensor:
        """The block's streams `[T, N, D]`: `e_proj(RMS(embedding)) + h_proj(RMS(stream))`.

        Args:
            streams_TND: the main model's streams after its last block, or the draft layer's own
                from the row before.
            ids: `[T]`, the token behind each row's own.
            positions: `[T]`; used only where the spec masks position 0.
            w: the layer's tensors by name below `mtp.N.`.
        """
        e = rms_norm(embedding[ids], w["enorm.weight"], self.eps)
        if self.mode.mask_position_zero:
            e = torch.where((positions == 0)[:, None], 0.0, e)
        h = rms_norm(streams_TND, w["hnorm.weight"], self.eps)
        e = linear(e, w, "e_proj.weight")
        return linear(h, w, "h_proj.weight") + e[:, None]

    def leave(self, y_TND: Tensor, rows: Tensor, w: Tensors, head: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 logits `[R, V]` of the tokens at `rows [R]`, and their streams `[R, N, D]`."""
        y = y_TND[rows]
        tensors = {k: w[k] for k in HEAD if k in w} | {"head.weight": head}
        return self.head.logits(y, None, tensors), y
