"""One forward of a round: a mode at a bucket, its static buffers and its compiled regions.

Regions are pure functions of tensors; `Compiler` turns each into one compiled function per stage,
shared by the layers of a kind. Rounds of other sizes may share a stage: whatever it reads was
written by its own prepare in the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from v4graph.errors import ProgramError
from v4graph.model.dspark import features
from v4graph.model.sublayers import AttentionSublayer, FfnSublayer, Head, ResidualSite
from v4graph.plan.buffers import buffers, mode_groups
from v4graph.plan.types import Bucket, GroupPlan, LayerPlan, Mode, Plan
from v4graph.program import settle
from v4graph.program.compiler import Compiler
from v4graph.program.prepare import MODE_NUMBERS, prepare
from v4graph.program.table import RequestTable
from v4graph.program.variants import Variant
from v4graph.spec.model import ModelSpec
from v4graph.words import counted

Tensors = dict[str, Tensor]
_SETTLE: dict[Mode, tuple[settle.Settle, settle.Settle]] = {
    Mode.PREFILL: (settle.choose_greedy, settle.choose_sample),
    Mode.DECODE: (settle.choose_greedy, settle.choose_sample),
    Mode.TARGET_VERIFY: (settle.verify_drafts_greedy, settle.verify_drafts_sample),
}
_DRAFT: dict[Mode, tuple[settle.Draft, settle.Draft]] = {
    Mode.DRAFT_EXTEND: (settle.draft_greedy, settle.draft_sample),
    Mode.DRAFT_CHAIN: (settle.draft_greedy, settle.draft_sample),
    Mode.DRAFT_DECODE: (settle.draft_greedy, settle.draft_sample),
}
_PROCESS = {
    Mode.PREFILL: settle.process_choice,
    Mode.DECODE: settle.process_choice,
    Mode.TARGET_VERIFY: settle.process_verified,
    Mode.DRAFT_EXTEND: settle.process,
    Mode.DRAFT_CHAIN: settle.process,
    Mode.DRAFT_DECODE: settle.process,
}
_POISON = {torch.int64: -(2**62), torch.float32: float("nan"), torch.bool: True}


@dataclass(frozen=True)
class ModelState:
    """What all programs of a model share: weights, page pools, frequencies, the request table."""

    spec: ModelSpec
    plan: Plan
    layers: list[Tensors]
    """Weights of each layer by the name below `layers.N.`."""
    draft_layers: list[Tensors]
    """Weights of each draft layer by the name below `mtp.N.`."""
    top: Tensors
    """Embedding, head, final norm and stream collapse."""
    pools: list[Tensors]
    """Page pools of each layer by cache role, `GroupPlan.pool_shape`."""
    draft_pools: list[Tensors]
    freqs: Tensors
    table: RequestTable
    operators: bool = False
    """Whether regions call registered operators where there are some; packed cache rows and stored
    weights always need them."""

    def tensors(self) -> Iterator[Tensor]:
        """Everything that outlives a step, static buffers apart."""
        groups = (*self.layers, *self.draft_layers, *self.pools, *self.draft_pools)
        for group in (*groups, self.top, self.freqs, self.table.tensors()):
            yield from group.values()

    def all_pools(self) -> Iterator[tuple[str, LayerPlan, str, str, Tensor]]:
        """(`layers` or `mtp`, layer, cache role, group, pool) of every page pool."""
        for block, layers, pools in (
            ("layers", self.plan.layers, self.pools),
            ("mtp", self.plan.speculation.layers, self.draft_pools),
        ):
            for layer, own in zip(layers, pools, strict=True):
                for role, name in dict(self.spec.attention[layer.attention].caches).items():
                    yield block, layer, role, name, own[role]

    def poison_pages(self, group: str, pages: list[int]) -> None:
        """Fill pages of every layer's pool with NaN, so that no earlier owner's rows remain."""
        g = self.plan.group(group)
        index = torch.tensor(pages, device=self.table.device)
        for _, _, _, name, pool in self.all_pools():
            if name == group:
                by_page(pool, g)[index] = pool_poison(pool)

    def copy_pages(self, group: str, pages: list[tuple[int, int]]) -> None:
        """Copy pages (from, to) in every layer's pool, behind all that was launched before."""
        g = self.plan.group(group)
        for _, _, _, name, pool in self.all_pools():
            if name == group:
                view = by_page(pool, g)
                for source, target in pages:
                    view[target].copy_(view[source])


def by_page(pool: Tensor, group: GroupPlan) -> Tensor:
    """A pool with its pages on the first axis."""
    return pool if pool.dtype is torch.uint8 else pool.unflatten(0, (-1, group.page_rows))


def pool_poison(pool: Tensor) -> float:
    """What marks rows that nobody wrote: NaN, which bytes of 255 are in every packed format."""
    return 255 if pool.dtype is torch.uint8 else float("nan")


class Stage:
    """The buffers and regions of one mode at one bucket."""

    def __init__(
        self, state: ModelState, mode: Mode, bucket: Bucket, compiler: Compiler, layer: int = 0
    ) -> None:
        """`layer` is the draft layer that a stage of draft layers runs."""
        self.state, self.mode, self.bucket, self.layer = state, mode, bucket, layer
        self._compiler = compiler
        device = state.table.device
        self.buffer_plans = [
            b for b in buffers(state.plan, mode, bucket) if b.producer == "prepare"
        ]
        self.buf = {
            b.name: torch.zeros(b.shape, dtype=getattr(torch, b.dtype), device=device)
            for b in self.buffer_plans
        }
        self._addresses = {name: t.data_ptr() for name, t in self.buf.items()}
        self._meta = {**self.buf, **{f"freqs.{k}": v for k, v in state.freqs.items()}}
        self._table = state.table.tensors()
        self.regions: dict[str, Callable[..., Any]] = {}
        plan = state.plan
        self._prepare = self.region(
            "prepare",
            lambda table, freqs, host, buf: prepare(
                plan, mode, bucket, table, freqs, host, buf, layer
            ),
        )
        kind = plan.mode(mode).layers
        self._layers = {"main": plan.layers, "draft": plan.speculation.layers, "none": ()}[kind]
        self._drafting = kind == "draft"
        if self._drafting and plan.speculation.kind == "mtp":
            self._layers = self._layers[layer : layer + 1]
        self._hands_on = layer < plan.speculation.num_chained
        if self._layers:
            self._build_layers()
        if "do_sample" in self.buf:
            self._settle = {
                random: self.region("sample" if random else "greedy", fn)
                for random, fn in zip((False, True), self._settles(), strict=True)
            }
        limits = plan.limits
        if self._layers and limits.logits_processing:
            self._process = self.region("process", _PROCESS[mode])
        if kind == "main" and limits.max_logprobs:
            self._logprobs = self.region(
                "logprobs", partial(settle.tell_logprobs, count=limits.max_logprobs)
            )

    def region(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` as a region of this stage."""
        which = f".{self.layer}" if self.layer else ""
        key = f"{self.mode.value}{which}[{self.bucket.num_tokens}x{self.bucket.num_reqs}].{name}"
        self.regions[name] = self._compiler.region(key, fn, self.bucket.num_tokens)
        return self.regions[name]

    def _settles(self) -> Sequence[Callable[..., Any]]:
        """What the logits decide: greedy, sampled."""
        drafting = self.state.plan.speculation
        if self.mode in _DRAFT:
            return _DRAFT[self.mode]
        if drafting.kind != "ngram":
            return _SETTLE[self.mode]
        k, ngram = drafting.num_draft_tokens, drafting.ngram
        return [settle.with_lookup(fn, k, ngram) for fn in _SETTLE[self.mode]]

    def _build_layers(self) -> None:
        spec, head = self.state.spec, Head(self.state.spec)

        def logits_of(x: Tensor, rows: Tensor | None, top: Tensors) -> tuple[Tensor, Tensor]:
            logits = head.logits(x, rows, top)
            return logits, settle.finite_rows(logits)

        self._embed = self.region("embed", head.embed)
        self._head = self.region("head", logits_of)
        if self.state.plan.speculation.target_layers:
            self._features = self.region("features", features)
        operators = self.state.operators
        self._site = ResidualSite(spec, operators)
        self._enter = self.region("enter", self._site.enter)
        self._attention = {
            name: self.region(f"attention.{name}", AttentionSublayer(spec, name, operators))
            for name in sorted({layer.attention for layer in self._layers})
        }
        self._ffn = {
            name: self.region(f"ffn.{name}", FfnSublayer(spec, name, operators))
            for name in sorted({layer.ffn for layer in self._layers})
        }

    # Forward -----------------------------------------------------------------------------------

    def prepare(self, host: Tensors, step: int, checked: bool) -> None:
        """Derive this step's metadata; `host` holds `slots`, `query_lens` and `step`."""
        if checked:
            self.poison()
        self._prepare(self._table, self.state.freqs, host, self.buf)
        if checked:
            self.check_prepared(host, step)

    def main(self) -> tuple[Tensor, Tensor, Tensor]:
        """The main model: logits (of the due rows, or of all), which of these rows are finite, and
        of all rows what the stages behind take over: the streams, or the features of DSpark's
        target layers."""
        targets = self.state.plan.speculation.target_layers
        kept: list[Tensor] = []
        x = self._embed(self.buf["input_ids"], self.state.top["embed.weight"])
        x = self._run(x, targets, kept)
        logits, finite = self._head(x, self.buf.get("logits_rows"), self.state.top)
        return logits, finite, self._features(*kept) if targets else x

    def draft(self, streams: Tensor, host: Tensors, variant: Variant) -> Tensor:
        """A stage behind the main model (`program/drafting.py`): what it drafts is settled.

        Args:
            streams: what the stage before hands on. Returned is what the next one takes over.
        """
        raise ProgramError(f"{self.mode.value} drafts nothing")

    def settle(
        self, host: Tensors, logits: Tensor, variant: Variant, finite: Tensor | None = None
    ) -> Tensor:
        """Commit what the logits decide; new tokens after a stage of the main model, which hands
        over which rows are `finite`."""
        if variant.processed:
            logits = self._process(self._table, host, self.buf, logits)
        flags = () if finite is None else (finite,)
        return self._settle[variant.random](self._table, host, self.buf, logits, *flags)

    def logprobs(self, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of the new tokens and of the likeliest ones (`ops.logits.logprobs`)."""
        return self._logprobs(logits, tokens)

    def _run(
        self, x: Tensor, targets: Collection[int] = (), kept: list[Tensor] | None = None
    ) -> Tensor:
        """All layers; the outputs of layers in `targets` are added to `kept`."""
        state = self.state
        weights, pools = (
            (state.draft_layers, state.draft_pools)
            if self._drafting
            else (state.layers, state.pools)
        )
        for layer in self._layers:
            w, own = weights[layer.index], pools[layer.index]
            mix = self._enter(x, self._site.weights(w, "attn"))
            x = self._attention[layer.attention](x, *mix, w, own, self._meta)
            mix = self._enter(x, self._site.weights(w, "ffn"))
            x = self._ffn[layer.ffn](x, *mix, w, self._meta)
            if kept is not None and layer.index in targets:
                kept.append(x)
        return x

    # Checked mode ------------------------------------------------------------------------------

    def poison(self) -> None:
        """Fill every buffer with a value that no step may read."""
        for b in self.buffer_plans:
            self.buf[b.name].fill_(_POISON[self.buf[b.name].dtype])

    def check_prepared(self, host: Tensors, step: int) -> None:
        """Every buffer was rewritten by this step's prepare stage, at its fixed address.

        Raises:
            ProgramError: a buffer that was not rewritten, has moved, is stale or out of range.
        """
        where = self.mode.value
        stamp, expected = self.buf["stamp"].tolist(), [MODE_NUMBERS[self.mode], step]
        if stamp != expected:
            raise ProgramError(f"{where}: stamp {stamp}, expected {expected}")
        for b in self.buffer_plans:
            t = self.buf[b.name]
            if t.data_ptr() != self._addresses[b.name]:
                raise ProgramError(f"{where}: buffer {b.name} has moved")
            if t.dtype is torch.int64:
                low, high, limit = int(t.min()), int(t.max()), self._limit(b.name)
                if low < -1 or high >= limit:
                    raise ProgramError(
                        f"{where}: buffer {b.name} holds {low}..{high} in step {step}, "
                        f"expected -1..{limit - 1}: not written, or out of range"
                    )
            elif t.dtype is torch.float32 and bool(t.isnan().any()):
                raise ProgramError(f"{where}: buffer {b.name} was not fully written")
        # A flag has no value to poison it with; it is told by what it must not mark.
        if "do_sample" in self.buf:
            padding = host["query_lens"] == 0
            if bool((self.buf["do_sample"] & padding).any()):
                raise ProgramError(f"{where}: buffer do_sample marks padding in step {step}")
        if "is_valid_token" in self.buf:
            found, count = int(self.buf["is_valid_token"].sum()), self._num_valid(host)
            if found > count:
                raise ProgramError(
                    f"{where}: buffer is_valid_token marks {counted(found, 'row')} in step {step}, "
                    f"expected at most {count}"
                )

        for g in mode_groups(self.state.plan, self.mode):
            self._check_pages(g, step)

    def _check_pages(self, g: GroupPlan, step: int) -> None:
        """Real rows lie in real pages, and nothing else does."""
        real = self.buf["is_valid_token"]
        if g.kind == "compressed":
            real = self.buf[f"closing_positions.{g.ratio}"] >= 0
        faults: list[tuple[Tensor, str]] = []
        if (written := self.buf.get(f"{g.name}.slot_mapping")) is not None:
            on_null = written < g.page_rows
            faults += [
                (real & on_null, "writes a real row to the null page"),
                (~real & ~on_null, "writes padding to a real page"),
            ]
        if (read := self.buf.get(f"{g.name}.read_slots")) is not None:
            faults.append(((read >= 0) & (read < g.page_rows), "lists a row of the null page"))
        for fault, what in faults:
            if bool(fault.any()):
                raise ProgramError(f"{self.mode.value}: group {g.name} {what} in step {step}")

    def _num_valid(self, host: Tensors) -> int:
        """Most rows of this step that are no padding."""
        if self.mode is Mode.TARGET_VERIFY:
            return int((self.buf["num_drafts"] + (host["query_lens"] > 0)).sum())
        if self.mode is Mode.DRAFT_EXTEND:
            return int(self._table["num_committed"][host["slots"]].sum())
        if self.mode is Mode.DRAFT_CHAIN:
            committed = int(self._table["num_committed"][host["slots"]].sum())
            return committed + self.layer * int((host["query_lens"] > 0).sum())
        if self.mode is Mode.DRAFT_DECODE:
            width = max(self.state.plan.speculation.block_size, 1)
            return int(self.buf["do_sample"].sum()) * width
        return int(host["query_lens"].sum())

    def _limit(self, name: str) -> int:
        """One past the largest value that the buffer may hold."""
        plan = self.state.plan
        group, _, field = name.rpartition(".")
        if field in ("slot_mapping", "read_slots"):
            g = plan.group(group)
            return g.num_pages * g.page_rows
        if name == "stamp":
            return 2**62
        if name == "input_ids":
            return self.state.spec.vocab_size
        longest = plan.max_model_len + plan.speculation.block_size
        return max(longest, self.bucket.num_tokens, plan.limits.max_num_seqs) + 1
