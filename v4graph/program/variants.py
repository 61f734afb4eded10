"""What ends a round, chosen by the host: the least that the requests of its batch need.

Variants share every region but the last ones. All of them give the same tokens to a request that
needs less, so a request's output does not depend on its company.
"""

from __future__ import annotations

from dataclasses import dataclass

from v4graph.errors import ProgramError
from v4graph.plan.types import Limits


@dataclass(frozen=True)
class Variant:
    """One way to go from logits to tokens."""

    random: bool = False
    """Draw from distributions; requests without a temperature get their likeliest token."""
    processed: bool = False
    """Apply the requests' rules (penalties, biases, bans) first."""
    logprobs: bool = False
    """Give log-probabilities of the tokens too."""

    @property
    def name(self) -> str:
        """`greedy`, `sample` or `processed`, and `+logprobs`."""
        name = "processed" if self.processed else "sample" if self.random else "greedy"
        return f"{name}+logprobs" if self.logprobs else name


def variants(limits: Limits) -> tuple[Variant, ...]:
    """Every variant that batches under these limits can need, the cheapest first."""
    out = []
    for logprobs in (False, True)[: 1 + (limits.max_logprobs > 0)]:
        out += [choose(limits, False, False, logprobs), choose(limits, True, False, logprobs)]
        out += [choose(limits, True, True, logprobs)] if limits.logits_processing else []
    return tuple(dict.fromkeys(out))


def choose(limits: Limits, random: bool, processed: bool, logprobs: bool) -> Variant:
    """The variant that does at least what is asked for; rare ones are not split further.

    Raises:
        ProgramError: the limits leave it out.
    """
    if processed and not limits.logits_processing:
        raise ProgramError("a request has rules over logits; the plan's limits leave them out")
    if logprobs and not limits.max_logprobs:
        raise ProgramError("a request wants logprobs; the plan's limits leave them out")
    drawing = (random or processed or logprobs) and not limits.greedy_only
    return Variant(drawing, processed, logprobs)
