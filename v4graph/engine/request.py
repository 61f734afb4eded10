"""Requests, sampling parameters and what a step reports about them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from v4graph.errors import RequestError
from v4graph.plan.rules import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_END_IDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_REPETITION,
    MAX_SEED,
    MIN_REPETITION,
    MIN_SEED,
    RuleRow,
    float32_keeps,
)


@dataclass(frozen=True)
class SamplingParams:
    """How a request chooses tokens and when it ends.

    Raises:
        RequestError: a value out of range, or one that float32 cannot hold; `field` names it.
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
    """Equal seeds give equal tokens, alone or in any batch, in one speculative mode and number of
    drafts."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """Keeps EOS and stop ids away until so many tokens are generated."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and output less likely; 1 is off."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token of the output so far."""
    frequency_penalty: float = 0.0
    """Taken as often as the token is in the output so far."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of token ids, each in -100..100."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output never contains."""
    logprobs: int | None = None
    """Tell every token's log-probability and that of so many likeliest ones; None is off. They
    are of the model's own logits, before temperature, rules and cuts."""

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1)
        _integer("top_k", self.top_k, 0)
        if self.seed is not None:
            _integer("seed", self.seed, MIN_SEED, MAX_SEED)
        _number("temperature", self.temperature, 0.0, 2.0**31)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0 and at most 1, got 0", "top_p")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        _integer("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}",
                "min_tokens",
            )
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION, MAX_REPETITION)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_tables()

    def _check_tables(self) -> None:
        """What a row of the request table has room for."""
        _at_most("logit_bias", "entries", len(self.logit_bias), MAX_LOGIT_BIAS)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0)
            _number("logit_bias", bias, -100.0, 100.0)
        _at_most("bad_words", "token sequences", len(self.bad_words), MAX_BAD_WORDS)
        for word in self.bad_words:
            if not word:
                raise RequestError("bad_words: a sequence must not be empty", "bad_words")
            _at_most("bad_words", "tokens in a sequence", len(word), MAX_BAD_WORD_TOKENS)
            for token in word:
                _integer("bad_words", token, 0)

    @property
    def rule_fields(self) -> list[str]:
        """The fields that change the model's logits before a token is chosen."""
        used = {
            "min_tokens": bool(self.min_tokens),
            "repetition_penalty": self.repetition_penalty != 1,
            "presence_penalty": bool(self.presence_penalty),
            "frequency_penalty": bool(self.frequency_penalty),
            "logit_bias": bool(self.logit_bias),
            "bad_words": bool(self.bad_words),
        }
        return [name for name, on in used.items() if on]

    def end_ids(self, eos: Collection[int]) -> set[int]:
        """Ids that end the request, of them the model's own `eos` unless it goes past these."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else eos)}

    def rules(self, num_prompt_tokens: int, eos: Collection[int]) -> RuleRow | None:
        """The request table's row of rules; None if there are none.

        Args:
            eos: the model's own end ids.

        Raises:
            RequestError: `min_tokens` with more end ids than a row holds.
        """
        if not self.rule_fields:
            return None
        ends = self.end_ids(eos)
        if self.min_tokens:
            _at_most("stop_token_ids", "ids, EOS included, with min_tokens", len(ends), MAX_END_IDS)
        return RuleRow(
            num_prompt_tokens=num_prompt_tokens,
            min_tokens=self.min_tokens,
            end_ids=tuple(sorted(ends)) if self.min_tokens else (),
            logit_bias=tuple(self.logit_bias.items()),
            bad_words=self.bad_words,
            repetition=self.repetition_penalty,
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
        )


def _at_most(name: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(f"{name}: {count} {what}, at most {most}", name)


def _integer(name: str, value: object, low: int, high: int = 2**63 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name} must be an integer of {low} to {high}, got {value!r}", name)


def _number(name: str, value: object, low: float, high: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    # False for NaN as well.
    if not good or not low <= value <= high:  # type: ignore[operator]
        raise RequestError(f"{name} must be a number in {low:g}..{high:g}, got {value!r}", name)
    if not float32_keeps(value):  # type: ignore[arg-type]
        raise RequestError(
            f"{name} must be 0 or of a size that float32 holds, at least 1.2e-38, got {value!r}",
            name,
        )


class FinishReason(str, Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    """The model's logits became NaN or infinite behind its last token."""


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's natural log-probability under the model's own logits."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """The likeliest tokens and theirs, in descending order."""


@dataclass(frozen=True)
class StepOutput:
    """New tokens of one request; the token that ended it is included."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None
    """One a token, for a request that asked for them."""
    num_cached_tokens: int = 0
    """Prompt tokens that the request found in the prefix cache when it was first admitted."""


@dataclass(eq=False)
class Request:
    """A request inside the engine.

    Attributes:
        token_ids: prompt and generated tokens.
        num_computed_tokens: tokens whose cache rows are valid once every launched step is done; of
            a round whose tokens are not read yet, the one that it surely adds.
        num_cached_tokens: prompt tokens that its first admission found in the prefix cache.
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
    rules: RuleRow | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
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
    def num_prefill_tokens(self) -> int:
        """Tokens that prefill steps compute: the prompt, and after a preemption all but the newest.

        So a request goes on with the round that it would have had: the same positions are drafted,
        and its random numbers serve the same ends.
        """
        return self.num_tokens - (self.num_generated_tokens > 0)

    @property
    def is_prefilling(self) -> bool:
        """Whether prefill steps are to come: False from the launch of the last chunk on."""
        return self.num_computed_tokens < self.num_prefill_tokens
