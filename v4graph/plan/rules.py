"""How much of its own rules over logits one request may bring: fixed columns of its table row.

Programs have static shapes, so every request has room for the same number of entries, used or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

MAX_LOGIT_BIAS = 300
"""Token ids with a bias."""
MAX_END_IDS = 32
"""EOS and stop ids that `min_tokens` keeps away."""
MAX_BAD_WORDS = 64
"""Banned token sequences."""
MAX_BAD_WORD_TOKENS = 8
"""Tokens of one of them."""
MAX_LOGPROBS = 20
"""Alternatives of a token whose log-probabilities can be told."""

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1
"""Seeds: an int64 column of the request table."""
MIN_REPETITION, MAX_REPETITION = 1e-6, 100.0
"""Repetition penalties: a logit divided by the least one, and by the least temperature, is finite
in float32."""
_LEAST_NORMAL = 2.0**-126
_GREATEST = (2.0 - 2.0**-23) * 2.0**127


def float32_keeps(value: float) -> bool:
    """Whether float32 holds a number as zero or as a normal number.

    Others would become zero, which turns a parameter off or divides by nothing, or infinite;
    subnormal ones are zero on devices that flush them.
    """
    return value == 0 or _LEAST_NORMAL <= abs(value) <= _GREATEST


RULE_INTS = 2 + MAX_END_IDS + MAX_LOGIT_BIAS + MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS
"""int64 columns of a row: prompt length, `min_tokens`, then ids."""
RULE_FLOATS = 3 + MAX_LOGIT_BIAS
"""float32 columns of a row: three penalties, then biases."""


@dataclass(frozen=True)
class RuleRow:
    """The rules of one request, on the host; capacities are checked by whoever made it."""

    num_prompt_tokens: int = 0
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def ints(self) -> list[int]:
        """The int64 columns."""
        words = [-1] * (MAX_BAD_WORDS * MAX_BAD_WORD_TOKENS)
        for i, word in enumerate(self.bad_words):
            end = (i + 1) * MAX_BAD_WORD_TOKENS
            words[end - len(word) : end] = word
        return [
            self.num_prompt_tokens,
            self.min_tokens,
            *_padded(self.end_ids, MAX_END_IDS, -1),
            *_padded([token for token, _ in self.logit_bias], MAX_LOGIT_BIAS, -1),
            *words,
        ]

    def floats(self) -> list[float]:
        """The float32 columns."""
        biases = _padded([bias for _, bias in self.logit_bias], MAX_LOGIT_BIAS, 0.0)
        return [self.repetition, self.presence, self.frequency, *biases]


def _padded(values: Sequence[T], size: int, rest: T) -> list[T]:
    return [*values, *([rest] * (size - len(values)))]
