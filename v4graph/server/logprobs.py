"""Log-probabilities in the shapes of OpenAI's two endpoints."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from v4graph.engine.request import TokenLogprobs
from v4graph.server.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)
from v4graph.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST) if math.isfinite(logprob) else LEAST


class CompletionTeller:
    """The log-probabilities of one choice of `/v1/completions`, in pieces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0

    def tell(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """The next tokens."""
        offsets = []
        for entry in entries:
            offsets.append(self._num_chars)
            if not self._tokenizer.is_special(entry.token_id):
                new = self._decoder.decode(self._tokenizer.token_bytes(entry.token_id))
                self._num_chars += len(new)
        return CompletionLogprobs(
            tokens=[self._tokenizer.token_text(entry.token_id) for entry in entries],
            token_logprobs=[finite(entry.logprob) for entry in entries],
            top_logprobs=[self._alternatives(entry) for entry in entries],
            text_offset=offsets,
        )

    def _alternatives(self, entry: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            found.setdefault(self._tokenizer.token_text(token_id), finite(logprob))
        return found


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Those of a chat's tokens."""

    def told(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=tokenizer.token_text(token_id),
            logprob=finite(logprob),
            bytes=list(tokenizer.token_bytes(token_id)),
        )

    content = [
        ChatTokenLogprob(
            **told(entry.token_id, entry.logprob).model_dump(),
            top_logprobs=[told(token_id, logprob) for token_id, logprob in entry.top],
        )
        for entry in entries
    ]
    return ChatLogprobs(content=content, refusal=None)
