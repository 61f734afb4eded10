"""Turn text into token ids and token ids back into text, whole or as a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from v4graph.errors import RequestError, WeightsError

REPLACEMENT = "\ufffd"
# An unfinished UTF-8 character has at most 3 bytes, so it sits in the last 3 tokens.
UNFINISHED_TOKENS = 3
MAX_HELD_TOKENS = 16


def _byte_names() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary: its own where that is
    visible, else the next from U+0100 on (GPT-2's `bytes_to_unicode`)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    names = {chr(byte): byte for byte in visible}
    return names | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_names()


def _has_type(part: Any, name: str) -> bool:
    """Whether a decoder's description, or a part of it, is of this type."""
    return part.get("type") == name or any(_has_type(p, name) for p in part.get("decoders", ()))


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

    def token_bytes(self, token_id: int) -> bytes:
        """One token's own bytes, a special token's text included; not always whole characters.

        A vocabulary that is not byte-level gives the UTF-8 of the token decoded alone.
        """
        if token_id in self._added:
            return self._added[token_id].content.encode()
        name = self.backend.id_to_token(token_id)
        if name is None:
            return b""  # a model's padded vocabulary has ids without a token
        if self._is_byte_level:
            return bytes(_BYTE_OF[char] for char in name)
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """One token's text; bytes that are no whole characters as `bytes:\\xe2\\x80`, so that
        different tokens keep different names."""
        own = self.token_bytes(token_id)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)

    def is_special(self, token_id: int) -> bool:
        """Whether a token has no text in an output."""
        return token_id in self._added and self._added[token_id].special

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return self.backend.get_added_tokens_decoder()

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self.backend.decoder
        return decoder is not None and _has_type(json.loads(decoder.__getstate__()), "ByteLevel")

    def banned_sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell words, as a text's first word and as a later one.

        Other spellings of a word (in other case, or cut into other tokens) are not among them.

        Raises:
            RequestError: a word is empty, or no Unicode text.
        """
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip()
            try:
                spellings = [
                    self.encode(text) for text in ((bare, " " + bare) if bare else (word,))
                ]
            except RequestError as error:
                raise RequestError(f"bad_words: {error}", "bad_words") from error
            if not all(spellings):
                raise RequestError("bad_words: a word must not be empty", "bad_words")
            found |= {tuple(ids): None for ids in spellings}
        return tuple(found)

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
