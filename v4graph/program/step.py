"""A step program: the fixed sequence of stages that one round runs.

A round begins with prefill, decode or target-verify of the main model and commits what that
settles; with draft layers it goes on over the same rows (draft-extend) and then token by token
(draft-decode). Nothing in between returns to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from v4graph.errors import ProgramError
from v4graph.plan.types import Bucket, Mode
from v4graph.program.compiler import Call, Compiler
from v4graph.program.drafting import make_stage
from v4graph.program.graph import CapturedTape
from v4graph.program.stage import ModelState, Stage, Tensors
from v4graph.program.tape import Tape
from v4graph.program.variants import Variant, choose, variants
from v4graph.words import counted


@dataclass(frozen=True)
class StepResult:
    """What a round leaves in its static output buffers: read before the program's next run."""

    tokens: Tensor
    """`[R, W]` int64, the new tokens of each request; -1 behind the last one. `settle.FAULT` ends
    those of a request whose logits are not finite."""
    logits: Tensor
    """`[R, V]` float32, or `[R x W, V]` after target-verify: the model's own."""
    logprobs: tuple[Tensor, Tensor, Tensor] | None = None
    """Of the tokens, and ids and values of the likeliest, from the model's own logits
    (`ops.logits.logprobs`); only in variants that tell them."""
    num_drafts: Tensor | None = None
    """`[R]` int64, the drafts that target-verify has verified."""


class HostLists:
    """What the host hands a round: request slots, token counts, the step number.

    One copy a round, which on a GPU the host does not wait for.
    """

    def __init__(self, num_reqs: int, device: torch.device) -> None:
        size = 2 * num_reqs + 1
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self.tensors: Tensors = {
            "slots": self._device[:num_reqs],
            "query_lens": self._device[num_reqs:-1],
            "step": self._device[-1:],
        }
        # Two, in turn: at most one round is unread when the next is launched, so that a buffer is
        # written again only when the round that it was copied for has been read.
        pinned = device.type == "cuda"
        self._staged = [torch.zeros(size, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]

    def write(self, slots: list[int], query_lens: list[int], step: int) -> None:
        """Hand over a batch, padded with the null request."""
        self._staged.reverse()
        staged = self._staged[0]
        pad = [0] * ((len(staged) - 1) // 2 - len(slots))
        staged.copy_(torch.tensor([*slots, *pad, *query_lens, *pad, step]))
        self._device.copy_(staged, non_blocking=True)


class StepProgram:
    """The round that begins with one mode at one bucket: `run` computes and commits it."""

    def __init__(
        self,
        state: ModelState,
        mode: Mode,
        bucket: Bucket,
        compiler: Compiler,
        checked: bool,
        stage: Callable[[Mode, Bucket, int], Stage] | None = None,
        graph_pool: Any = None,
    ) -> None:
        """`stage` finds a stage that programs share; each has its own if left out. With a
        `graph_pool`, recorded rounds become CUDA graphs."""
        self.state, self.mode, self.bucket, self.checked = state, mode, bucket, checked
        self._compiler = compiler
        self._tapes: dict[Variant, Tape | CapturedTape] = {}
        self._table = state.table.tensors()
        find = stage or (lambda m, b, layer: make_stage(state, m, b, compiler, layer))
        plans = state.plan.stages(mode, bucket)
        self.stages: Sequence[Stage] = [find(p.mode, p.bucket, p.layer) for p in plans]
        self._repeats = [p.repeat for p in plans]
        self._graph_pool = graph_pool
        self._lists = HostLists(bucket.num_reqs, state.table.device)
        self.host: Tensors = self._lists.tensors

    @property
    def buf(self) -> Tensors:
        """The host's lists and the static buffers of the first stage."""
        return {**self.host, **self.stages[0].buf}

    def run(
        self,
        slots: list[int],
        query_lens: list[int],
        step: int,
        random: bool,
        processed: bool = False,
        logprobs: bool = False,
    ) -> StepResult:
        """Compute one round for the requests in `slots` (padded here up to the bucket).

        Args:
            slots: request-table rows, each at most once, none of them 0.
            query_lens: tokens of each request, at least 1; a program of fixed width takes that.
            step: the engine's step number, stamped on everything the round writes.
            random: whether any request samples.
            processed: whether any request has rules over logits.
            logprobs: whether any request wants log-probabilities.

        Raises:
            ProgramError: a batch that does not fit, a slot given twice; in checked mode, a buffer
                that was not rewritten, moved or is stale.
        """
        variant = choose(self.state.plan.limits, random, processed, logprobs)
        self._feed(slots, query_lens, step)
        result = self._run(len(slots), step, variant)
        return replace(result, num_drafts=self.stages[0].buf.get("num_drafts"))

    def _run(self, num_reqs: int, step: int, variant: Variant) -> StepResult:
        with torch.no_grad():
            tape = self._tapes.get(variant)
            if tape is not None:
                return _result(tape.replay())
            return self._run_stages(num_reqs, step, variant)

    def _run_stages(self, num_reqs: int, step: int, variant: Variant) -> StepResult:
        first, checked = self.stages[0], self.checked
        first.prepare(self.host, step, checked)
        if self.mode is Mode.IDLE:
            return StepResult(self.host["slots"][:0], self.host["slots"][:0])
        logits, finite, streams = first.main()
        if checked:
            self._check_logits(logits, num_reqs, step)
        tokens = first.settle(self.host, logits, variant, finite)
        told = first.logprobs(logits, tokens) if variant.logprobs else None
        for stage, repeat in zip(self.stages[1:], self._repeats[1:], strict=True):
            for _ in range(repeat):
                stage.prepare(self.host, step, checked)
                streams = stage.draft(streams, self.host, variant)
        return StepResult(tokens, logits, told)

    def warm_up(self) -> None:
        """Compile every region and record all variants, on padding only: nothing is committed."""
        needed = variants(self.state.plan.limits)
        if not self._compiler.enabled:
            # Nothing to compile: a run of the common ones shows that the step works.
            needed = tuple(v for v in needed if not v.processed and not v.logprobs)
        for variant in needed[:1] if self.mode is Mode.IDLE else needed:
            self._tapes.pop(variant, None)
            self._warm_up(variant)
            if self._compiler.enabled and not self.checked and self.mode is not Mode.IDLE:
                tape = self._record(variant)
                pool = self._graph_pool
                self._tapes[variant] = tape if pool is None else CapturedTape(tape, pool)

    def calls_per_step(self) -> dict[str, int]:
        """Compiled calls of a recorded round, by variant; empty where nothing was recorded."""
        return {variant.name: len(tape) for variant, tape in self._tapes.items()}

    def _warm_up(self, variant: Variant) -> StepResult:
        self._feed([], [], 0)
        return self._run(0, 0, variant)

    def _record(self, variant: Variant) -> Tape:
        calls: list[Call] = []
        self._compiler.calls = calls
        try:
            result = self._warm_up(variant)
        finally:
            self._compiler.calls = None
        static = [*self.state.tensors(), *self.host.values()]
        static += [t for stage in self.stages for t in stage.buf.values()]
        return Tape(calls, (result.tokens, result.logits, *(result.logprobs or ())), static)

    def _feed(self, slots: list[int], query_lens: list[int], step: int) -> None:
        R, T, width = self.bucket.num_reqs, self.bucket.num_tokens, self.bucket.tokens_per_req
        uneven = width > 0 and any(n != width for n in query_lens)
        if len(slots) > R or sum(query_lens) > T or len(slots) != len(query_lens) or uneven:
            raise ProgramError(
                f"{self.mode.value} program of {counted(T, 'token')} and {counted(R, 'request')} "
                f"was given {counted(sum(query_lens), 'token')} in {counted(len(slots), 'request')}"
            )
        if len(set(slots)) != len(slots) or 0 in slots:
            raise ProgramError(f"{self.mode.value}: request slots {slots}: each once, none 0")
        self._lists.write(slots, query_lens, step)

    def _check_logits(self, logits: Tensor, num_reqs: int, step: int) -> None:
        buf = self.stages[0].buf
        rows = logits[:num_reqs][buf["do_sample"][:num_reqs]]
        if self.bucket.tokens_per_req > 1:
            rows = logits[buf["is_valid_token"]]
        if bool(rows.isnan().any()):
            raise ProgramError(
                f"{self.mode.value}: NaN logits in step {step}: a layer read a row that was "
                "never written"
            )


def _result(outputs: list[Tensor]) -> StepResult:
    tokens, logits, *told = outputs
    return StepResult(tokens, logits, (told[0], told[1], told[2]) if told else None)
