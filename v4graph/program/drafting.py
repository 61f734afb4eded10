"""The stages that draft, by speculative mode: what a round runs behind the main model."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from v4graph.model.drafting import DraftLayer
from v4graph.model.dspark import BlockAttention, BlockHead, context
from v4graph.model.sublayers import AttentionSublayer, FfnSublayer, ResidualSite
from v4graph.plan.types import Bucket, Mode
from v4graph.program.chain import hand_over
from v4graph.program.compiler import Compiler
from v4graph.program.stage import ModelState, Stage, Tensors
from v4graph.program.variants import Variant
from v4graph.spec.model import DsparkSpeculation, MtpSpeculation


def make_stage(
    state: ModelState, mode: Mode, bucket: Bucket, compiler: Compiler, layer: int = 0
) -> Stage:
    """The stage of `mode` in the plan's speculative mode; `layer` as for `Stage`."""
    kind: type[Stage] = Stage
    if state.plan.mode(mode).layers == "draft":
        kinds = {Mode.DRAFT_EXTEND: ContextStage, Mode.DRAFT_DECODE: BlockStage}
        kind = kinds[mode] if state.plan.speculation.kind == "dspark" else MtpStage
    return kind(state, mode, bucket, compiler, layer)


class MtpStage(Stage):
    """One MTP layer: draft-extend, draft-chain or draft-decode.

    It is all that the stage runs, so that one region holds it: on a CPU a call costs as much as the
    arithmetic of a few rows.
    """

    def _build_layers(self) -> None:
        spec = self.state.spec
        mode = spec.speculative[self.state.plan.speculation.name]
        assert isinstance(mode, MtpSpeculation)  # noqa: S101 (the plan was lowered from it)
        operators = self.state.operators
        draft, site = DraftLayer(spec, mode), ResidualSite(spec, operators)
        (kinds,) = self._layers
        attention = AttentionSublayer(spec, kinds.attention, operators)
        ffn = FfnSublayer(spec, kinds.ffn, operators)
        hands_on = self._hands_on

        def layer(
            streams: Tensor, top: Tensors, w: Tensors, pools: Tensors, m: Tensors
        ) -> tuple[Tensor, Tensor]:
            x = draft.enter(streams, m["input_ids"], m["positions"], top["embed.weight"], w)
            x = attention(x, *site.enter(x, site.weights(w, "attn")), w, pools, m)
            x = ffn(x, *site.enter(x, site.weights(w, "ffn")), w, m)
            logits, due = draft.leave(x, m["logits_rows"], w, top["head.weight"])
            return logits, x if hands_on else due

        self._layer = self.region("layer", layer)
        if self.mode is Mode.DRAFT_CHAIN:
            self._hand_over = self.region("hand_over", hand_over)

    def draft(self, streams: Tensor, host: Tensors, variant: Variant) -> Tensor:
        """The layer over the stage before's `streams [T, N, D]`, and a draft of each due row.

        Returns the due rows' streams, or those of all rows where another layer takes them over.
        """
        state = self.state
        if self.mode is Mode.DRAFT_CHAIN:
            carried = self._table[f"carried_streams.{self.layer}"]
            streams = self._hand_over(carried, host["slots"], self.buf, streams)
        w, pools = state.draft_layers[self.layer], state.draft_pools[self.layer]
        logits, streams = self._layer(streams, state.top, w, pools, self._meta)
        self.settle(host, logits, variant)
        return streams


def _mode(state: ModelState) -> DsparkSpeculation:
    mode = state.spec.speculative[state.plan.speculation.name]
    assert isinstance(mode, DsparkSpeculation)  # noqa: S101 (the plan was lowered from it)
    return mode


class ContextStage(Stage):
    """DSpark's draft-extend: the context rows of the round's tokens, in every draft layer."""

    def _build_layers(self) -> None:
        spec, mode = self.state.spec, _mode(self.state)
        self._context = self.region("context", partial(context, norm_eps=spec.norm_eps))
        attention = BlockAttention(spec, mode.attention, mode, self.state.operators)
        self._write = self.region("write", attention.write)

    def draft(self, streams: Tensor, host: Tensors, variant: Variant) -> Tensor:
        """Write the rows; `streams` are the main model's features `[T, F D]`."""
        state = self.state
        main = self._context(streams, state.draft_layers[0])
        for w, pools in zip(state.draft_layers, state.draft_pools, strict=True):
            self._write(main, w, pools, self._meta)
        return streams


class BlockStage(Stage):
    """DSpark's draft-decode: a block through all layers, then its drafts one behind the other."""

    def _build_layers(self) -> None:
        super()._build_layers()
        spec, mode = self.state.spec, _mode(self.state)
        head = BlockHead(spec, mode)
        attention = BlockAttention(spec, mode.attention, mode, self.state.operators)
        self._attention = {mode.attention: self.region(f"attention.{mode.attention}", attention)}
        self._base = self.region("head", head.base)
        self._next = self.region("next", head.next_draft)

    def draft(self, streams: Tensor, host: Tensors, variant: Variant) -> Tensor:
        """Draft for every request that is due; the features pass through."""
        state, top = self.state, self.state.top
        x = self._run(self._embed(self.buf["input_ids"], top["embed.weight"]))
        last = state.draft_layers[-1]
        base = self._base(x, last, top["head.weight"])
        for _ in range(state.plan.speculation.num_draft_tokens):
            logits = self._next(self._table, host["slots"], base, last)
            self.settle(host, logits, variant)
        return streams
