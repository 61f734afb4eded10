"""Drive step programs directly: chosen chunks, chosen batches, logits of every step."""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.engine.pages import PageManager
from v4graph.engine.request import Request, SamplingParams
from v4graph.plan.lower import lower
from v4graph.plan.types import Limits, Mode
from v4graph.program.build import ProgramSet, build_state
from v4graph.program.compiler import Compiler
from v4graph.spec.model import ModelSpec


class Runner:
    """Requests over one program set, without a scheduler; always in checked mode."""

    def __init__(
        self, spec: ModelSpec, params: dict[str, Tensor], limits: Limits, compiled: bool = False
    ) -> None:
        self.plan = lower(spec, limits)
        state = build_state(spec, self.plan, params, torch.device("cpu"), checked=True)
        self.programs = ProgramSet(state, Compiler(compiled), checked=True)
        self.pages = PageManager(self.plan, state.table, poison=state.poison_pages)
        self._slots = list(range(limits.max_num_seqs, 0, -1))
        self._count = 0
        self._step = 0

    def add(self, token_ids: list[int]) -> Request:
        """Admit a request whose tokens are all known."""
        self._count += 1
        request = Request(
            f"r{self._count}", list(token_ids), len(token_ids), SamplingParams(), 0, self._count
        )
        request.slot = self._slots.pop()
        self.pages.table.admit(
            request.slot, request.token_ids, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0
        )
        return request

    def drop(self, request: Request) -> None:
        """Free a request."""
        self.pages.free_all(request)
        self.pages.table.release(request.slot)
        self._slots.append(request.slot)

    def step(self, batch: list[tuple[Request, int]], mode: Mode = Mode.PREFILL) -> Tensor:
        """Compute the given token counts; logits `[requests, V]` of the last tokens."""
        for request, count in batch:
            missing = self.pages.missing(request, count)
            assert self.pages.can_allocate(missing)
            self.pages.allocate(request, missing)
        counts = [count for _, count in batch]
        program = self.programs.dispatch(mode, sum(counts), len(counts))
        self._step += 1
        result = program.run([r.slot for r, _ in batch], counts, self._step, False)
        for (request, count), tokens in zip(batch, result.tokens.tolist(), strict=False):
            request.num_computed_tokens += count
            request.token_ids += [t for t in tokens if t >= 0]
            self.pages.free_unreadable(request)
        return result.logits[: len(batch)]


def relative_error(logits: Tensor, oracle: Tensor) -> float:
    """Largest logit error over the largest logit."""
    assert not logits.isnan().any()
    return float((logits - oracle).abs().max() / oracle.abs().max())


def top2_gap(logits: Tensor) -> float:
    """Distance between the best two logits."""
    best = logits.topk(2).values
    return float(best[0] - best[1])
