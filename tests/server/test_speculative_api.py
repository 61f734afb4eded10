"""One request, answered with and without speculation: text, log-probabilities, usage and reason
agree wherever in an accepted span the text ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_server import MODEL, Server, serve

from tests.support import nano
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.spec.load import spec_path
from v4graph.text.tokenizer import Tokenizer

PROMPT = nano.prompts(24)[0]
RULES: dict[str, Any] = {"repetition_penalty": 1.2, "logit_bias": {"263": -3}, "min_tokens": 4}


def engine(k: int) -> LLMEngine:
    config = EngineConfig(
        max_num_seqs=1,
        max_num_batched_tokens=32,
        max_model_len=80,
        compile=False,
        device="cpu",
        speculative="mtp" if k else "none",
        num_draft_tokens=k or None,
    )
    return LLMEngine.from_params(nano.spec(), dict(nano.params()), config)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """Without drafts, and with 1 and 5 a round."""
    folder = spec_path("v4-nano").with_suffix("")
    running = serve(Tokenizer.from_directory(folder, nano.spec().bos_token_id))
    start: Any = next(running)
    yield [start(engine(k)) for k in (0, 1, 5)]
    next(running, None)


def answers(servers: list[Server], **body: Any) -> dict[str, Any]:
    """The answer of all servers, which is one; log-probabilities within rounding."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0} | body
    whole = [server.http.post("/v1/completions", json=body).json() for server in servers]
    first = whole[0]["choices"][0]
    for answer in whole:
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (first["text"], first["finish_reason"])
        assert answer["usage"] == whole[0]["usage"]
        if body.get("logprobs") is not None:
            told, expected = choice["logprobs"], first["logprobs"]
            assert len(told["tokens"]) == answer["usage"]["completion_tokens"]
            assert told["tokens"] == expected["tokens"]
            assert told["text_offset"] == expected["text_offset"]
            close = pytest.approx(expected["token_logprobs"], abs=5e-5)
            assert told["token_logprobs"] == close
            for one, other in zip(told["top_logprobs"], expected["top_logprobs"], strict=True):
                assert one == pytest.approx(other, abs=5e-5)
    return whole[0]


@pytest.mark.parametrize("more", [{}, RULES], ids=["plain", "rules"])
def test_a_stop_string_anywhere(servers: list[Server], more: dict[str, Any]) -> None:
    full = answers(servers, logprobs=2, ignore_eos=True, **more)
    text, least = full["choices"][0]["text"], more.get("min_tokens", 0)
    offsets = full["choices"][0]["logprobs"]["text_offset"]
    assert full["usage"]["completion_tokens"] == 16
    for begin in range(offsets[least], len(text) - 2, 5):
        stop = text[begin : begin + 3]
        cut = answers(servers, logprobs=2, ignore_eos=True, stop=stop, **more)
        assert cut["choices"][0]["finish_reason"] == "stop"
        where = text.index(stop, offsets[least])
        assert cut["choices"][0]["text"] == text[:where]
        # Every token up to the one that completed the stop string counts, and no other.
        used = sum(offset < where + len(stop) for offset in offsets)
        assert cut["usage"]["completion_tokens"] == used


def test_a_stop_token_and_a_cap_anywhere(servers: list[Server]) -> None:
    llm: Any = servers[0].engine
    ids = answers(servers, logprobs=0, ignore_eos=True)["choices"][0]["logprobs"]["tokens"]
    for count in range(1, 8):
        cut = answers(servers, logprobs=3, ignore_eos=True, max_tokens=count)
        assert cut["choices"][0]["logprobs"]["tokens"] == ids[:count]
        assert cut["choices"][0]["finish_reason"] == "length"
    tokenizer = Tokenizer.from_directory(spec_path("v4-nano").with_suffix(""))
    for place in (0, 2, 5):
        (stop,) = [i for i in range(llm.spec.vocab_size) if tokenizer.token_text(i) == ids[place]]
        cut = answers(servers, logprobs=1, ignore_eos=True, stop_token_ids=[stop])
        assert cut["choices"][0]["logprobs"]["tokens"] == ids[: ids.index(ids[place]) + 1]
        assert cut["choices"][0]["finish_reason"] == "stop"


def test_streams_tell_what_whole_answers_tell(servers: list[Server]) -> None:
    body: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "logprobs": 1, "prompt": PROMPT}
    whole = answers(servers, **body)["choices"][0]
    for server in servers:
        create: Any = server.client.completions.create
        chunks = [c.choices[0] for c in create(model=MODEL, stream=True, **body)]
        assert "".join(c.text for c in chunks) == whole["text"]
        told = [c.logprobs for c in chunks if c.logprobs is not None]
        tokens = [token for piece in told for token in piece.tokens]
        assert tokens == whole["logprobs"]["tokens"]


def test_banned_words_and_an_early_end(servers: list[Server]) -> None:
    """Tokens by their text; an EOS that is certain as soon as it may stand."""
    free = answers(servers, ignore_eos=True, logprobs=0)["choices"][0]["logprobs"]["tokens"]
    words = [token for token in free if token.strip()][2:5]
    other = answers(servers, ignore_eos=True, bad_words=words, logprobs=1)["choices"][0]
    assert not set(words) & set(other["logprobs"]["tokens"])
    end = answers(servers, logit_bias={"1": 100}, min_tokens=3, logprobs=1)
    assert end["choices"][0]["finish_reason"] == "stop"
    assert end["usage"]["completion_tokens"] == 4


def test_chat(servers: list[Server]) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}
    body |= {"temperature": 0, "logprobs": True, "top_logprobs": 2, "presence_penalty": 0.5}
    told = []
    for server in servers:
        answer = server.http.post("/v1/chat/completions", json=body).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        told.append([(entry["token"], entry["logprob"]) for entry in content])
    for one in told[1:]:
        for (token, value), (expected, wanted) in zip(one, told[0], strict=True):
            assert (token, value) == (expected, pytest.approx(wanted, abs=5e-5))
