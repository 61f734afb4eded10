"""Requests, sampling parameters and what a step reports about them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from v4graph.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How a request chooses tokens and when it ends.

    Raises:
        RequestError: a value out of range; `field` names it.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    """Keeps tokens of at least this share of the largest probability; 0 keeps all."""
    seed: int | None = None
    """Equal seeds give equal tokens, alone or in any batch."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1)
        _integer("top_k", self.top_k, 0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        _number("temperature", self.temperature, 0.0, 2.0**31)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0 and at most 1, got 0", "top_p")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)


def _integer(name: str, value: object, low: int, high: int = 2**63 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer of {low} or more, got {value!r}", name)


def _number(name: str, value: object, low: float, high: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type]
        raise RequestError(f"{name} must be a number in {low:g}..{high:g}, got {value!r}", name)


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class StepOutput:
    """New tokens of one request; the token that ended it is included."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(eq=False)
class Request:
    """A request inside the engine.

    Attributes:
        token_ids: prompt and generated tokens.
        num_computed_tokens: tokens whose cache rows are valid once every launched step is done; of
            a round whose tokens are not read yet, the one that it surely adds.
        num_unread_drafts: drafts of such a round: it may have computed so many tokens more.
        slot: request-table row while running, 0 while waiting.
        num_unread_rounds: launched rounds that it takes part in and whose tokens are not read.
        arrival: admission order; the latest is preempted first.
        unit_keys: keys of its first units in the prefix cache, as far as they were asked for.
        num_published_units: units whose pages the prefix cache was offered or gave.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    arrival: int
    num_computed_tokens: int = 0
    num_unread_drafts: int = 0
    num_unread_rounds: int = 0
    slot: int = 0
    num_preemptions: int = 0
    pages: dict[str, dict[int, int]] = field(default_factory=dict)
    """Page of each block (absolute block index) by group."""
    unit_keys: list[bytes] = field(default_factory=list)
    num_published_units: int = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens that the model has chosen so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is still to be computed.

        Also True before the first step; False from the launch of a prompt's last chunk on.
        """
        return self.num_tokens - self.num_computed_tokens > 1
