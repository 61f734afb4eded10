"""Turn text into token ids and token ids back into text, whole or as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from v4graph.errors import RequestError, WeightsError

REPLACEMENT = "\ufffd"
# An unfinished UTF-8 character has at most 3 bytes, so it sits in the last 3 tokens.
UNFINISHED_TOKENS = 3
MAX_HELD_TOKENS = 16


class Tokenizer:
    """A `tokenizer.json` with the special ids that the model spec names."""

    def __init__(self, backend: Backend, bos_token_id: int | None = None) -> None:
        self.backend = backend
        self.bos_token_id = bos_token_id

    @classmethod
    def from_directory(cls, directory: Path, bos_token_id: int | None = None) -> Tokenizer:
        """Load `tokenizer.json` of a checkpoint directory.

        Raises:
            WeightsError: the file is missing or is not a tokenizer.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise WeightsError(f"{path}: no tokenizer here; expected the checkpoint's own file")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the backend raises bare Exception
            raise WeightsError(f"{path}: not a tokenizer file: {error}") from error
        return cls(backend, bos_token_id)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Id of one token by its text; None when the vocabulary has no such token."""
        return self.backend.token_to_id(token)

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Encode text; special tokens spelled out in it become their ids.

        Args:
            text: what to encode.
            add_bos: prepend the BOS id unless the text already begins with it.

        Raises:
            RequestError: the text has lone surrogates, so it is no Unicode text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"not valid Unicode text: {error.reason}", "prompt") from error
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        bos = self.bos_token_id
        if add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode whole ids; cut characters show as U+FFFD (unlike in `Detokenizer`)."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one request."""
        return Detokenizer(self.backend)


class Detokenizer:
    """Incremental decoding: whole characters only, special tokens skipped."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Take one token; return the text that it completes (often one word, maybe empty)."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._backend, token_id)
        except Exception:  # the backend raises bare Exception on a prefix that it cannot extend
            return self.flush()
        if text is not None:
            self._held.clear()
            return text
        if len(self._held) >= MAX_HELD_TOKENS:
            # A long run of invalid bytes: step() re-decodes all held tokens each time.
            return self._restart()
        return ""

    def flush(self) -> str:
        """End the stream: release what is held, less one character that never got finished."""
        text = self._decode(self._held)
        self._held.clear()
        self._stream = DecodeStream(skip_special_tokens=True)
        return text.removesuffix(REPLACEMENT)

    def _restart(self) -> str:
        released, kept = self._held[:-UNFINISHED_TOKENS], self._held[-UNFINISHED_TOKENS:]
        text = self._decode(released)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._held = []
        for token_id in kept:
            text += self.push(token_id)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=True)
