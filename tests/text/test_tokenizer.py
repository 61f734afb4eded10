from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from v4graph.errors import RequestError, WeightsError
from v4graph.text.chat import BOS, EOS, USER
from v4graph.text.tokenizer import Tokenizer

EMOJI = "a😀b👩‍👩‍👧é漢"


def stream(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(i) for i in token_ids), detokenizer.flush()]


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    if not text.endswith("\ufffd") and "\uff5c" not in text:
        assert "".join(stream(tokenizer, token_ids)) == text


def test_bos_is_added_once(tokenizer: Tokenizer) -> None:
    bos = tokenizer.token_id(BOS)
    assert bos is not None
    assert tokenizer.encode("hello", add_bos=True)[0] == bos
    assert tokenizer.encode(BOS + "hello", add_bos=True).count(bos) == 1
    assert tokenizer.encode("hello").count(bos) == 0
    assert tokenizer.encode("", add_bos=True) == [bos]
    assert Tokenizer(tokenizer.backend).encode("", add_bos=True) == []


def test_special_tokens_are_not_output_text(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode(f"hello{EOS}{USER} there")
    assert "".join(stream(tokenizer, token_ids)) == "hello there"


@pytest.mark.parametrize("max_tokens", range(1, 25))
def test_cut_inside_a_character_ends_cleanly(tokenizer: Tokenizer, max_tokens: int) -> None:
    # E7: output that ends inside a character.
    text = "".join(stream(tokenizer, tokenizer.encode(EMOJI)[:max_tokens]))
    assert EMOJI.startswith(text)
    assert "\ufffd" not in text


def test_every_chunk_is_whole_characters(tokenizer: Tokenizer) -> None:
    chunks = stream(tokenizer, tokenizer.encode(EMOJI))
    assert "".join(chunks) == EMOJI
    assert not any("\ufffd" in chunk for chunk in chunks)


def test_text_is_released_as_soon_as_it_is_whole(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("hello there")
    assert all(stream(tokenizer, token_ids)[:-1])


def test_invalid_bytes_show_as_replacement_once_followed_by_text(tokenizer: Tokenizer) -> None:
    continuation = tokenizer.encode("é")[-1]
    token_ids = [continuation, *tokenizer.encode("hello")]
    assert "".join(stream(tokenizer, token_ids)) == "\ufffdhello"


def test_long_invalid_run_stays_linear(tokenizer: Tokenizer) -> None:
    continuation = tokenizer.encode("é")[-1]
    start = time.perf_counter()
    text = "".join(stream(tokenizer, [continuation] * 8000 + tokenizer.encode("😀")))
    assert time.perf_counter() - start < 2
    assert text == "\ufffd" * 8000 + "😀"


def test_ids_out_of_range_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert "".join(stream(tokenizer, [10**6, *tokenizer.encode("hello")])) == "hello"


def test_lone_surrogate_is_a_request_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode("\ud83d")


def test_from_directory(tmp_path: Path, backend: Backend) -> None:
    with pytest.raises(WeightsError, match=r"tokenizer\.json: no tokenizer here"):
        Tokenizer.from_directory(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(WeightsError, match="not a tokenizer file"):
        Tokenizer.from_directory(tmp_path)
    backend.save(str(path))
    loaded = Tokenizer.from_directory(tmp_path)
    assert loaded.encode("hello there") == backend.encode("hello there").ids
    assert loaded.vocab_size == backend.get_vocab_size()


def test_a_token_is_its_bytes(tokenizer: Tokenizer) -> None:
    """Together they are the text, wherever characters are cut; special tokens are spelled out."""
    text = f"the fox {EMOJI}\n{EOS}<think>"
    ids = tokenizer.encode(text)
    assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == text
    assert [i for i in ids if tokenizer.is_special(i)] == [tokenizer.token_id(EOS)]
    names = {tokenizer.token_text(i) for i in ids}
    assert {"the", " fox", "bytes:\\xf0", EOS, "<think>"} <= names
    assert tokenizer.token_bytes(10**9) == b""


def test_bytes_of_every_token(tokenizer: Tokenizer) -> None:
    """All 256 bytes have a token, and the backend agrees on each."""
    ids = range(tokenizer.vocab_size)
    assert {tokenizer.token_bytes(i) for i in ids} >= {bytes([b]) for b in range(256)}
    for i in ids:
        own = tokenizer.token_bytes(i).decode(errors="replace")
        assert own == tokenizer.decode([i], skip_special_tokens=False)


def test_bytes_of_a_vocabulary_of_words() -> None:
    backend = Backend(models.WordLevel({"a": 0, "é": 1, "?": 2}, unk_token="?"))
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_bytes(i) for i in range(3)] == [b"a", "é".encode(), b"?"]


def test_banned_words_are_banned_at_the_start_and_later(tokenizer: Tokenizer) -> None:
    found = tokenizer.banned_sequences(["fox", " lazy dog", "\n"])
    texts = [tokenizer.decode(ids) for ids in found]
    assert texts == ["fox", " fox", "lazy dog", " lazy dog", "\n"]
    assert tokenizer.banned_sequences([]) == ()
    assert tokenizer.banned_sequences(["fox", " fox"]) == found[:2]


@pytest.mark.parametrize("word", ["", "\ud83d"])
def test_words_that_cannot_be_banned(tokenizer: Tokenizer, word: str) -> None:
    with pytest.raises(RequestError) as caught:
        tokenizer.banned_sequences(["fox", word])
    assert caught.value.field == "bad_words"
