"""What the host keeps of a launched round until it reads the round's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from v4graph.engine.request import Request, TokenLogprobs
from v4graph.engine.scheduler import ScheduledBatch
from v4graph.program.settle import FAULT


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of one request's new tokens, on the host."""

    own: list[float]
    ids: list[list[int]]
    values: list[list[float]]

    def tell(self, tokens: list[int], count: int) -> list[TokenLogprobs]:
        """Of the first tokens of the row, each with its `count` likeliest."""
        return [
            TokenLogprobs(
                token,
                self.own[i],
                list(zip(self.ids[i][:count], self.values[i][:count], strict=True)),
            )
            for i, token in enumerate(tokens)
        ]


class Readback:
    """A copy of a step's outcome on its way to the host; `wait` is the only synchronisation."""

    num_waits = 0
    """Times that any host code waited for a device, over the life of the process."""

    def __init__(
        self,
        tokens: Tensor,
        num_drafts: Tensor | None,
        logprobs: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        """`num_drafts [R]` comes along in the same copy as `tokens [R, W]`."""
        self._with_drafts = num_drafts is not None
        if num_drafts is not None:
            tokens = torch.cat((tokens, num_drafts[:, None]), dim=1)
        self._event: torch.cuda.Event | None = None
        self._tokens = _copy(tokens)
        self._logprobs = None if logprobs is None else [_copy(t) for t in logprobs]
        if tokens.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> tuple[list[list[int]], list[int], list[bool]]:
        """The tokens of every request, without the -1 behind the last; the drafts of each that
        were verified; and whether its logits behind these tokens were not finite."""
        Readback.num_waits += 1
        if self._event is not None:
            self._event.synchronize()
        rows = self._tokens.tolist()
        drafts = [row.pop() if self._with_drafts else 0 for row in rows]
        faults = [FAULT in row for row in rows]
        return [[t for t in row if t >= 0] for row in rows], drafts, faults

    def logprobs(self) -> list[RowLogprobs] | None:
        """After `wait`: of every request, if the round told them."""
        if self._logprobs is None:
            return None
        own, ids, values = (t.tolist() for t in self._logprobs)
        return [RowLogprobs(*row) for row in zip(own, ids, values, strict=True)]


def _copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        # The program's next run writes its own output again.
        return tensor.clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class Round:
    """A launched round."""

    batch: ScheduledBatch
    tokens: Readback
    preemptions: list[int]
    """How often each request had been preempted at launch: if it has been since, its counts have
    started anew."""
    drafts: list[list[int]] = field(default_factory=list)
    """The drafts that it verifies; only read back for a recorder."""


@dataclass(frozen=True)
class RoundRecord:
    """One verification of one request, as a recorder sees it."""

    request_id: str
    num_tokens: int
    """Known tokens before the round."""
    drafts: list[int]
    tokens: list[int]
    """What the round committed, before any end of the request was applied."""


Recorder = Callable[[RoundRecord], None]
Injector = Callable[[Request], "list[int] | None"]
"""Forced drafts of a request's next round; None leaves the model's own."""


@dataclass
class DraftCounts:
    """Sums over verified rounds; the three rates are never the same figure (design: each under
    its own name)."""

    rounds: int = 0
    drafts: int = 0
    accepted: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count one verification."""
        self.rounds += 1
        self.drafts += num_drafts
        self.accepted += num_accepted
        longest = max(num_drafts, len(self.proposed_at))
        for counts in (self.proposed_at, self.accepted_at):
            counts.extend([0] * (longest - len(counts)))
        for i in range(num_drafts):
            self.proposed_at[i] += 1
            self.accepted_at[i] += i < num_accepted

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens of a round, the main model's own included."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def draft_acceptance(self) -> float:
        """Accepted drafts over proposed ones."""
        return self.accepted / self.drafts if self.drafts else 0.0

    @property
    def approximate_rate(self) -> float:
        """`1 - 1 / tokens_per_round`: the rate that evaluators derive from the output alone."""
        return 1 - 1 / self.tokens_per_round if self.rounds else 0.0
