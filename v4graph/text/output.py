"""Turn the token ids of one request into its output text: detokenise, stop, split reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from v4graph.text.chat import END_THINK
from v4graph.text.stop import StopMatcher
from v4graph.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextDelta:
    """New text of one step."""

    text: str = ""
    reasoning: str = ""
    num_tokens: int = 0
    """Tokens consumed: fewer than given when a stop string ended the text early."""
    stopped: bool = False
    """A stop string completed; later tokens are not part of the output."""


class OutputText:
    """The text of one request.

    Tokens go through one at a time, so that a step of several tokens (speculation) gives the same
    text and the same count as steps of one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        thinking: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`min_tokens`: no stop string ends the text within so many tokens."""
        self._detokenizer = tokenizer.detokenizer()
        self._min_tokens, self._num_tokens = min_tokens, 0
        self._stop = StopMatcher(stops)
        # The prompt ends with <think>, so the output begins inside the reasoning.
        self._reasoning = StopMatcher([END_THINK]) if thinking else None
        self._end_think_id = tokenizer.token_id(END_THINK) if thinking else None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Take the tokens of a step; the caller leaves out an EOS or stop token that ended it."""
        delta = TextDelta()
        for count, token_id in enumerate(token_ids, 1):
            if token_id == self._end_think_id:
                # A special token has no text of its own in the stream.
                text = self._detokenizer.flush() + END_THINK
            else:
                text = self._detokenizer.push(token_id)
            self._num_tokens += 1
            text = self._stop.push(text, self._num_tokens > self._min_tokens)
            delta = self._join(delta, text, count)
            if delta.stopped:
                break
        if delta.stopped:
            return self._join(delta, "", delta.num_tokens, last=True)
        return delta

    def flush(self) -> TextDelta:
        """End the output: what was held back is text after all."""
        text = self._stop.push(self._detokenizer.flush()) + self._stop.flush()
        return self._join(TextDelta(), text, 0, last=True)

    def _join(self, delta: TextDelta, text: str, num_tokens: int, last: bool = False) -> TextDelta:
        reasoning = ""
        if self._reasoning is not None:
            reasoning = self._reasoning.push(text)
            text = ""
            if last:
                reasoning += self._reasoning.flush()
            if self._reasoning.matched is not None:
                text, self._reasoning = self._reasoning.remainder, None
        return TextDelta(
            text=delta.text + text,
            reasoning=delta.reasoning + reasoning,
            num_tokens=num_tokens,
            stopped=self._stop.matched is not None,
        )
