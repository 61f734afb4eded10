"""A step program: the fixed sequence of regions that one forward mode runs at one bucket.

prepare -> embed -> (attention, feed-forward) x layers -> head -> sample -> commit. Each region is a
pure function of tensors; `Compiler` turns it into one compiled function per program, shared by the
layers of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from v4graph.errors import ProgramError
from v4graph.model.sublayers import AttentionSublayer, FfnSublayer, Head, ResidualSite
from v4graph.ops.sampling import greedy, sample, uniform
from v4graph.plan.buffers import buffers
from v4graph.plan.types import Bucket, Mode, Plan
from v4graph.program.compiler import Call, Compiler
from v4graph.program.prepare import commit, prepare
from v4graph.program.table import RequestTable
from v4graph.program.tape import Tape
from v4graph.spec.model import ModelSpec

Tensors = dict[str, Tensor]
MODE_NUMBERS = {mode: i for i, mode in enumerate(Mode)}
_POISON = {torch.int64: -(2**62), torch.float32: float("nan"), torch.bool: True}


@dataclass(frozen=True)
class ModelState:
    """What all programs of a model share: weights, page pools, frequencies, the request table."""

    spec: ModelSpec
    plan: Plan
    layers: list[Tensors]
    """Weights of each layer by the name below `layers.N.`."""
    top: Tensors
    """Embedding, head, final norm and stream collapse."""
    pools: list[Tensors]
    """Page pools of each layer by cache role, `[rows, dim]`."""
    freqs: Tensors
    table: RequestTable

    def tensors(self, meta: Tensors) -> Iterator[Tensor]:
        """Everything that outlives a step of the program with buffers `meta`."""
        for group in (*self.layers, *self.pools, self.top, self.freqs, self.table.tensors(), meta):
            yield from group.values()

    def poison_pages(self, group: str, pages: list[int]) -> None:
        """Fill pages of every layer's pool with NaN, so that no earlier owner's rows remain."""
        rows = self.plan.group(group).page_rows
        index = torch.tensor(pages, device=self.table.device)
        for layer, pools in zip(self.plan.layers, self.pools, strict=True):
            for role, name in dict(self.spec.attention[layer.attention].caches).items():
                if name == group:
                    pools[role].unflatten(0, (-1, rows))[index] = float("nan")


@dataclass(frozen=True)
class StepResult:
    """What a step leaves in its static output buffers: read before the program's next run."""

    tokens: Tensor
    """`[R]` int64, -1 where a request sampled nothing."""
    logits: Tensor
    """`[R, V]` float32."""


class StepProgram:
    """One mode at one bucket: `run(slots, query_lens, random)` computes and commits a step."""

    def __init__(
        self, state: ModelState, mode: Mode, bucket: Bucket, compiler: Compiler, checked: bool
    ) -> None:
        self.state, self.mode, self.bucket, self.checked = state, mode, bucket, checked
        self._compiler = compiler
        self._tapes: dict[bool, Tape] = {}
        self._table = state.table.tensors()
        self.buffer_plans = buffers(state.plan, mode, bucket)
        device = state.table.device
        self.buf = {
            b.name: torch.zeros(b.shape, dtype=getattr(torch, b.dtype), device=device)
            for b in self.buffer_plans
        }
        self._addresses = {name: t.data_ptr() for name, t in self.buf.items()}
        self._meta = {**self.buf, **{f"freqs.{k}": v for k, v in state.freqs.items()}}
        spec, plan, head = state.spec, state.plan, Head(state.spec)
        self.regions: dict[str, Callable[..., Any]] = {}

        def region(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
            key = f"{mode.value}[{bucket.num_tokens}x{bucket.num_reqs}].{name}"
            self.regions[name] = compiler.region(key, fn, bucket.num_tokens)
            return self.regions[name]

        self._prepare = region(
            "prepare", lambda table, freqs, buf: prepare(plan, bucket, table, freqs, buf)
        )
        self._site = ResidualSite(spec)
        self._enter = region("enter", self._site.enter)
        self._embed = region("embed", head.embed)
        self._head = region("head", head.logits)
        self._greedy = region("greedy", greedy)
        self._sample = region("sample", self._draw)
        self._commit = region("commit", commit)
        kinds = {(layer.attention, layer.ffn) for layer in plan.layers}
        self._attention = {
            name: region(f"attention.{name}", AttentionSublayer(spec, name))
            for name in sorted({a for a, _ in kinds})
        }
        self._ffn = {
            name: region(f"ffn.{name}", FfnSublayer(spec, name))
            for name in sorted({f for _, f in kinds})
        }

    @staticmethod
    def _draw(logits: Tensor, table: Tensors, slots: Tensor) -> Tensor:
        draw = uniform(table["seed"][slots], table["num_tokens"][slots])
        temperature, top_k = table["temperature"][slots], table["top_k"][slots]
        return sample(logits, temperature, top_k, table["top_p"][slots], draw)

    def run(self, slots: list[int], query_lens: list[int], step: int, random: bool) -> StepResult:
        """Compute one step for the requests in `slots` (padded here up to the bucket).

        Args:
            slots: request-table rows, each at most once, none of them 0.
            query_lens: tokens of each request, at least 1.
            step: the engine's step number, stamped on everything the step writes.
            random: whether any request samples; False selects the greedy program.

        Raises:
            ProgramError: in checked mode, when a buffer was not rewritten, moved or is stale.
        """
        self._feed(slots, query_lens, step)
        with torch.no_grad():
            tape = self._tapes.get(random)
            if tape is not None:
                return StepResult(*tape.replay())
            return self._run_regions(len(slots), step, random)

    def _run_regions(self, num_reqs: int, step: int, random: bool) -> StepResult:
        table, buf = self._table, self.buf
        if self.checked:
            self._poison()
        self._prepare(table, self.state.freqs, buf)
        if self.checked:
            self._check_prepared(step)
        x = self._embed(buf["input_ids"], self.state.top["embed.weight"])
        for layer in self.state.plan.layers:
            w, pools = self.state.layers[layer.index], self.state.pools[layer.index]
            mix = self._enter(x, self._site.weights(w, "attn"))
            x = self._attention[layer.attention](x, *mix, w, pools, self._meta)
            mix = self._enter(x, self._site.weights(w, "ffn"))
            x = self._ffn[layer.ffn](x, *mix, w, self._meta)
        logits = self._head(x, buf["logits_rows"], self.state.top)
        if self.checked:
            self._check_logits(logits, num_reqs, step)
        sampled = self._sample(logits, table, buf["slots"]) if random else self._greedy(logits)
        return StepResult(self._commit(table, buf, sampled), logits)

    def warm_up(self) -> None:
        """Compile every region and record both variants, on padding only: nothing is committed."""
        for random in (False, True)[: 1 if self.state.plan.limits.greedy_only else 2]:
            self._tapes.pop(random, None)
            self.run([], [], 0, random)
            if self._compiler.enabled and not self.checked:
                self._tapes[random] = self._record(random)

    def calls_per_step(self) -> dict[str, int]:
        """Compiled calls of a recorded step, by variant; empty where nothing was recorded."""
        return {"sample" if random else "greedy": len(t) for random, t in self._tapes.items()}

    def _record(self, random: bool) -> Tape:
        calls: list[Call] = []
        self._compiler.calls = calls
        try:
            result = self.run([], [], 0, random)
        finally:
            self._compiler.calls = None
        return Tape(calls, (result.tokens, result.logits), self.state.tensors(self._meta))

    def _feed(self, slots: list[int], query_lens: list[int], step: int) -> None:
        R, T = self.bucket.num_reqs, self.bucket.num_tokens
        if len(slots) > R or sum(query_lens) > T or len(slots) != len(query_lens):
            raise ProgramError(
                f"{self.mode.value} program of {T} tokens and {R} requests was given "
                f"{sum(query_lens)} tokens in {len(slots)} requests"
            )
        pad = [0] * (R - len(slots))
        self.buf["slots"].copy_(torch.tensor(slots + pad))
        self.buf["query_lens"].copy_(torch.tensor(query_lens + pad))
        self.buf["step_stamp"].copy_(torch.tensor([MODE_NUMBERS[self.mode], step]))

    # Checked mode ------------------------------------------------------------------------------

    def _poison(self) -> None:
        for b in self.buffer_plans:
            if b.producer == "prepare":
                self.buf[b.name].fill_(_POISON[self.buf[b.name].dtype])

    def _check_prepared(self, step: int) -> None:
        """Every buffer was rewritten by this step's prepare stage, at its fixed address."""
        stamp = self.buf["stamp"].tolist()
        expected = [MODE_NUMBERS[self.mode], step]
        if stamp != expected:
            raise ProgramError(f"{self.mode.value}: stamp {stamp}, expected {expected}")
        for b in self.buffer_plans:
            t = self.buf[b.name]
            if t.data_ptr() != self._addresses[b.name]:
                raise ProgramError(f"{self.mode.value}: buffer {b.name} has moved")
            if t.dtype is torch.int64:
                low, high = int(t.min()), int(t.max())
                limit = self._limit(b.name)
                if low < -1 or high >= limit:
                    raise ProgramError(
                        f"{self.mode.value}: buffer {b.name} holds {low}..{high} in step {step}, "
                        f"expected -1..{limit - 1}: not written, or out of range"
                    )
            elif t.dtype is torch.float32 and bool(t.isnan().any()):
                raise ProgramError(f"{self.mode.value}: buffer {b.name} was not fully written")
        valid = int(self.buf["is_valid_token"].sum())
        if valid != int(self.buf["query_lens"].sum()):
            raise ProgramError(f"{self.mode.value}: {valid} tokens marked valid in step {step}")

    def _limit(self, name: str) -> int:
        """One past the largest value that the buffer may hold."""
        plan = self.state.plan
        group, _, field = name.rpartition(".")
        if field in ("slot_mapping", "read_slots"):
            g = plan.group(group)
            return g.num_pages * g.page_rows
        if name in ("step_stamp", "stamp"):
            return 2**62
        if name == "input_ids":
            return self.state.spec.vocab_size
        return max(plan.max_model_len, self.bucket.num_tokens, plan.limits.max_num_seqs) + 1

    def _check_logits(self, logits: Tensor, num_reqs: int, step: int) -> None:
        due = self.buf["do_sample"][:num_reqs]
        if bool(logits[:num_reqs][due].isnan().any()):
            raise ProgramError(
                f"{self.mode.value}: NaN logits in step {step}: a layer read a row that was "
                "never written"
            )
