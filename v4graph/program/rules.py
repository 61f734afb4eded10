"""Rows of the request table that hold rules over logits, and those rules as operators take them.

Rows at rest are neutral: a request without rules in a batch of requests with some is untouched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.ops.logits import Rules
from v4graph.plan.rules import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_END_IDS,
    MAX_LOGIT_BIAS,
    RULE_FLOATS,
    RULE_INTS,
    RuleRow,
)

_NUMBERS, _PENALTIES = 2, 3
_ENDS = _NUMBERS + MAX_END_IDS
_BIASES = _ENDS + MAX_LOGIT_BIAS


def empty_rules(num_slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Neutral rows: `[S, RULE_INTS]` int64 and `[S, RULE_FLOATS]` float32."""
    row = RuleRow()
    ints = torch.tensor(row.ints(), dtype=torch.int64, device=device)
    floats = torch.tensor(row.floats(), dtype=torch.float32, device=device)
    return (
        ints.expand(num_slots, RULE_INTS).contiguous(),
        floats.expand(num_slots, RULE_FLOATS).contiguous(),
    )


def unpack(ints: Tensor, floats: Tensor) -> Rules:
    """Rows `[R, RULE_INTS]` and `[R, RULE_FLOATS]` by name."""
    words = ints[:, _BIASES:].unflatten(1, (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS))
    return Rules(
        num_prompt_tokens=ints[:, 0],
        min_tokens=ints[:, 1],
        end_ids=ints[:, _NUMBERS:_ENDS],
        bias_ids=ints[:, _ENDS:_BIASES],
        biases=floats[:, _PENALTIES:],
        bad_words=words,
        repetition=floats[:, 0],
        presence=floats[:, 1],
        frequency=floats[:, 2],
    )
