"""Find stop strings in a text stream, holding back no more text than could begin one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a stream at the first stop string to complete; the result ignores chunk borders.

    Of stop strings that complete at the same character the longest counts. The stop text itself
    is never part of the output.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the stream."""
        self.remainder = ""
        """Text after the match, of the chunk that completed it."""

    def push(self, text: str, may_end: bool = True) -> str:
        """Take a chunk; return the text that is certain not to belong to a stop string.

        A stop string that completes in a chunk that may not end the stream is ordinary text.
        """
        if self.matched is not None:
            self.remainder += text
            return ""
        if not self._stops:
            return text
        buffer, old = self._held + text, len(self._held)
        hits = [
            (at + len(stop), at)
            for stop in self._stops
            # Not what is complete within the held text: that was not allowed to end the stream.
            if (at := buffer.find(stop, max(old - len(stop) + 1, 0))) >= 0
        ]
        if hits and may_end:
            end, start = min(hits)
            self.matched, self.remainder = buffer[start:end], buffer[end:]
            self._held = ""
            return buffer[:start]
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """End the stream: a held beginning that never became a stop string is ordinary text."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
