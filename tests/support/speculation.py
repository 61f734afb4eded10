"""Engine runs whose every round is kept, and their check against a full recompute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from v4graph.engine.engine import LLMEngine
from v4graph.engine.request import FinishReason, SamplingParams
from v4graph.engine.rounds import RoundRecord
from v4graph.model.rounds import Difference, EngineRound, RoundOracle

NEAR_TIE = 1e-4


def greedy(max_tokens: int, stop_token_ids: tuple[int, ...] = ()) -> SamplingParams:
    """Greedy output that no end of text cuts short."""
    return SamplingParams(
        max_tokens=max_tokens, temperature=0.0, ignore_eos=True, stop_token_ids=stop_token_ids
    )


@dataclass
class Session:
    """What an engine did with some requests."""

    prompts: dict[str, list[int]]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    rounds: dict[str, list[RoundRecord]] = field(default_factory=dict)
    steps: int = 0

    def differences(self, oracle: RoundOracle) -> list[Difference]:
        """Every difference to the recompute that no near-tie explains."""
        out: list[Difference] = []
        for name, records in self.rounds.items():
            full = [*self.prompts[name], *self.tokens[name]]
            last = records[-1]
            full = [*full[: last.num_tokens], *last.tokens]
            rounds = [EngineRound(r.num_tokens, tuple(r.drafts), tuple(r.tokens)) for r in records]
            out += [d for d in oracle.check(full, rounds) if d.gap >= NEAR_TIE]
        return out

    @property
    def num_drafts(self) -> int:
        """Drafts that were verified."""
        return sum(len(r.drafts) for own in self.rounds.values() for r in own)

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted."""
        return sum(len(r.tokens) - 1 for own in self.rounds.values() for r in own)


def run(
    llm: LLMEngine,
    prompts: Mapping[str, list[int]],
    params: SamplingParams | Mapping[str, SamplingParams],
    *,
    join: Mapping[str, int] | None = None,
    abort: Mapping[str, int] | None = None,
    record: bool = True,
    every_step: Callable[[int], None] | None = None,
) -> Session:
    """Serve prompts to the end.

    Args:
        params: of all requests, or by name.
        join: step at which a request arrives; at once if left out.
        abort: step before which a request is aborted.
        record: keep rounds; off where their waits would count.
    """
    session = Session(dict(prompts), {name: [] for name in prompts})

    def keep(r: RoundRecord) -> None:
        session.rounds.setdefault(r.request_id, []).append(r)

    llm.recorder = keep if record else None
    waiting = dict(join or {})
    while True:
        for name, ids in prompts.items():
            if waiting.get(name, 0) == session.steps:
                own = params if isinstance(params, SamplingParams) else params[name]
                llm.add_request(name, ids, own)
        for name, step in (abort or {}).items():
            if step == session.steps:
                llm.abort(name)
        if not llm.has_unfinished() and session.steps >= max(waiting.values(), default=0):
            break
        for out in llm.step():
            session.tokens[out.request_id] += out.token_ids
            if out.finish_reason is not None:
                session.reasons[out.request_id] = out.finish_reason
        session.steps += 1
        if every_step is not None:
            every_step(session.steps)
        if session.steps % 8 == 0:
            llm.check_integrity()
    llm.check_integrity()
    assert all(pool.num_used == 0 for pool in llm.pages.pools.values())
    llm.recorder = None
    return session
