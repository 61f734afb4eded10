"""Runs with a fault planted in a prepare stage, and what tells of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.mutants import Mutant, Preparation, plant
from tests.support.rows import Key, difference, visible_rows
from tests.support.speculation import greedy, run
from tests.support.world import SMALL
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.pools import IntegrityError
from v4graph.engine.request import Request
from v4graph.errors import ProgramError
from v4graph.model.params import random_params
from v4graph.model.recompute import RecomputeModel
from v4graph.model.rounds import RoundOracle
from v4graph.plan.types import Mode
from v4graph.spec.model import ModelSpec, MtpSpeculation

K, NEW, TOLERANCE = 3, 18, 1e-4
TINY = replace(SMALL, max_len=64)


@cache
def spec() -> ModelSpec:
    """The first row of the draft layer is masked, so that positions are read there too."""
    data = TINY.data()
    data["speculative"]["mtp"]["mask_position_zero"] = True
    return ModelSpec.model_validate(data)


@cache
def params() -> dict[str, Tensor]:
    return random_params(spec(), 5)


def prompts() -> dict[str, list[int]]:
    """Three requests; the first chunk of the longest fills a prefill step alone."""
    gen = torch.Generator().manual_seed(1)
    return {
        name: torch.randint(2, TINY.vocab, (n,), generator=gen).tolist()
        for name, n in (("a", 43), ("b", 6), ("c", 26))
    }


def engine(k: int, **more: Any) -> LLMEngine:
    """Checked and eager; four slots, so that there is always padding."""
    config: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "compile": False,
        "checked": True,
        "device": "cpu",
        "greedy_only": True,
        "overlap": False,
        "speculative": "mtp" if k else "none",
        "num_draft_tokens": k or None,
        **more,
    }
    return LLMEngine.from_params(spec(), dict(params()), EngineConfig(**config))


class Truth:
    """What an honest engine writes, and the rows that it leaves."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[Key, Tensor]] = {name: {} for name in prompts()}
        honest = engine(0, max_num_batched_tokens=1)
        self.tokens = run(honest, prompts(), greedy(NEW), every_step=self.keeper(honest)).tokens
        single = engine(1, max_num_batched_tokens=1)
        single.draft_injector = lambda r: [(self.right(r, 0) + 1) % TINY.vocab]
        run(single, prompts(), greedy(NEW), every_step=self.keeper(single))

    def keeper(self, llm: LLMEngine) -> Callable[[int], None]:
        def keep(_: int) -> None:
            for request in llm.scheduler.running:
                for key, row in visible_rows(llm, request).items():
                    self.rows[request.request_id].setdefault(key, row)

        return keep

    def right(self, request: Request, ahead: int) -> int:
        tokens, place = self.tokens[request.request_id], request.num_generated_tokens + ahead
        return tokens[place] if place < len(tokens) else 2


@cache
def truth() -> Truth:
    return Truth()


def caught_by(llm: LLMEngine, every: int = 3) -> str | None:
    """What tells that an engine is not honest: `checks`, `rows`, `tokens`, `drafts`; or None.

    Some rounds (`num_tokens` a multiple of `every`) verify right drafts, so that rounds accept;
    the others verify the layer's own.
    """
    forced: set[tuple[str, int]] = set()
    wrong_rows = False

    def inject(request: Request) -> list[int] | None:
        if request.num_tokens % every:
            return None
        forced.add((request.request_id, request.num_tokens))
        return [truth().right(request, i) for i in range(K)]

    def look(_: int) -> None:
        nonlocal wrong_rows
        for request in llm.scheduler.running:
            if request.num_computed_tokens:
                rows = visible_rows(llm, request)
                error = difference(rows, truth().rows[request.request_id])
                wrong_rows |= not error < TOLERANCE

    llm.draft_injector = inject
    try:
        session = run(llm, prompts(), greedy(NEW), every_step=look)
    except (ProgramError, IntegrityError):
        return "checks"
    if wrong_rows:
        return "rows"
    if session.tokens != truth().tokens:
        return "tokens"
    mode = spec().speculative["mtp"]
    assert isinstance(mode, MtpSpeculation)
    oracle = RoundOracle(RecomputeModel(spec(), params()), mode)
    for name, records in session.rounds.items():
        own = [r for r in records if (name, r.num_tokens) not in forced]
        drafts = oracle.drafts(
            [*prompts()[name], *session.tokens[name], 0], [r.num_tokens for r in own], K
        )
        if any(r.drafts != d[: len(r.drafts)] for r, d in zip(own, drafts, strict=True)):
            return "drafts"
    return None


def betrayed(monkeypatch: pytest.MonkeyPatch, mutant: Mutant, mode: Mode | None) -> str | None:
    """What catches a mutant of one mode's prepare stage, or of all."""

    def mutated(p: Preparation) -> None:
        # Warm-up runs over padding; a fault there would hide nothing.
        if (mode is None or p.mode is mode) and int(p.host["step"]) > 0:
            mutant(p)
        else:
            p.run()

    truth()  # by an honest engine
    plant(monkeypatch, mutated)
    return caught_by(engine(K))


def buffer_names(llm: LLMEngine, mode: Mode) -> list[str]:
    """Every buffer that the prepare stage of a mode writes."""
    stages = [s for p in llm.programs.programs.values() for s in p.stages if s.mode is mode]
    return [b.name for b in stages[0].buffer_plans if b.name != "stamp"]
