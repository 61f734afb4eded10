"""Log-probabilities in OpenAI's shapes: one entry for every token that `usage` counts."""

from __future__ import annotations

from typing import Any

import pytest
from fake_server import DEFAULT_ANSWER, MODEL, Server
from test_completions_api import events

from v4graph.engine.request import TokenLogprobs
from v4graph.server.logprobs import CompletionTeller, chat_logprobs
from v4graph.text.chat import EOS
from v4graph.text.tokenizer import Tokenizer

USER: Any = {"role": "user", "content": "the fox"}
CHAT = "/v1/chat/completions"
WORDS = ["the", " quick", " brown", " fox", EOS]
PER_STEP = pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 8])


def test_completion(server: Server, tokenizer: Tokenizer) -> None:
    create: Any = server.client.completions.create
    answer = create(model=MODEL, prompt="the fox", logprobs=2)
    told = answer.choices[0].logprobs
    assert told.tokens == WORDS
    assert told.token_logprobs == [-1.0] * 5
    assert told.text_offset == [0, 3, 9, 15, 19]
    assert [len(top) for top in told.top_logprobs] == [2] * 5
    first = tokenizer.encode("the")[0]
    assert told.top_logprobs[0]["the"] == -1.0
    assert server.engine.params[0].logprobs == 2
    assert len(told.tokens) == answer.usage.completion_tokens
    assert first in server.engine.told(first, 2).top[0]


def test_zero_alternatives_tell_the_token_itself(server: Server) -> None:
    create: Any = server.client.completions.create
    told = create(model=MODEL, prompt="the fox", logprobs=0).choices[0].logprobs
    assert told.top_logprobs == [{word: -1.0} for word in WORDS]


def test_without_the_wish_there_are_none(server: Server) -> None:
    answer = server.client.completions.create(model=MODEL, prompt="the fox")
    assert answer.choices[0].logprobs is None
    assert server.engine.params[0].logprobs is None
    chat: Any = server.client.chat.completions.create
    assert chat(model=MODEL, messages=[USER], logprobs=False).choices[0].logprobs is None
    assert server.engine.params[1].logprobs is None


def test_chat(server: Server, tokenizer: Tokenizer) -> None:
    create: Any = server.client.chat.completions.create
    answer = create(model=MODEL, messages=[USER], logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == WORDS
    assert bytes(content[1].bytes) == b" quick"
    for entry in content:
        assert entry.logprob == -1.0
        assert [top.logprob for top in entry.top_logprobs] == [-1.0, -2.0, -3.0]
    assert len(content) == answer.usage.completion_tokens
    bare = create(model=MODEL, messages=[USER], logprobs=True)
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content] == [[]] * 5
    assert [p.logprobs for p in server.engine.params] == [3, 0]


@PER_STEP
def test_streams_tell_the_same(server: Server, tokens_per_step: int) -> None:
    """However many tokens a step brings; each in the chunk of its text, or of later text."""
    server.engine.tokens_per_step = tokens_per_step
    pieces = events(server, prompt="the fox", logprobs=2)[:-1]
    whole = server.http.post("/v1/completions", json={"prompt": "the fox", "logprobs": 2}).json()
    joined: dict[str, list[Any]] = {}
    for piece in pieces:
        for name, values in piece["choices"][0]["logprobs"].items():
            joined[name] = joined.get(name, []) + values
    assert joined == whole["choices"][0]["logprobs"]
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 1}
    content = [
        entry
        for chunk in events(server, CHAT, **body)[:-1]
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert content == server.http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == WORDS


@PER_STEP
@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [("quick", "the ", 2), (" br", "the quick", 3), ("k b", "the quic", 3), ("fox", None, 4)],
)
def test_a_stop_string_ends_everything_alike(
    server: Server, tokens_per_step: int, stop: str, text: str | None, count: int
) -> None:
    """Text, tokens, log-probabilities and usage end with the token that completes it."""
    server.engine.tokens_per_step = tokens_per_step
    create: Any = server.client.completions.create
    answer = create(model=MODEL, prompt="the fox", logprobs=1, stop=stop)
    (choice,) = answer.choices
    assert choice.text == ("the quick brown " if text is None else text)
    assert choice.finish_reason == "stop"
    assert choice.logprobs.tokens == WORDS[:count]
    assert answer.usage.completion_tokens == count
    options = {"include_usage": True}
    body = {"prompt": "the fox", "logprobs": 1, "stop": stop, "stream_options": options}
    *chunks, usage, _ = events(server, **body)
    tokens = [t for chunk in chunks for t in chunk["choices"][0]["logprobs"]["tokens"]]
    assert tokens == choice.logprobs.tokens
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice.text
    assert usage["usage"]["completion_tokens"] == count


@PER_STEP
def test_a_cap_ends_everything_alike(server: Server, tokens_per_step: int) -> None:
    server.engine.tokens_per_step = tokens_per_step
    create: Any = server.client.completions.create
    answer = create(model=MODEL, prompt="the fox", logprobs=1, max_tokens=3)
    assert answer.choices[0].logprobs.tokens == WORDS[:3]
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


@PER_STEP
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_told_too(server: Server, tokens_per_step: int, stream: bool) -> None:
    server.engine.answer = "the quick</think> brown fox"
    server.engine.tokens_per_step = tokens_per_step
    body: dict[str, Any] = {"messages": [USER], "logprobs": True}
    body["chat_template_kwargs"] = {"thinking": True}
    if stream:
        told = [c["choices"][0]["logprobs"] for c in events(server, CHAT, **body)[:-1]]
        content = [entry for piece in told if piece for entry in piece["content"]]
    else:
        content = server.http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [*WORDS[:2], "</think>", *WORDS[2:]]


@PER_STEP
def test_stop_strings_wait_for_min_tokens(server: Server, tokens_per_step: int) -> None:
    server.engine.tokens_per_step = tokens_per_step
    server.engine.answer = f"{DEFAULT_ANSWER} {DEFAULT_ANSWER}"
    create: Any = server.client.completions.create

    def text(least: int) -> str:
        answer = create(model=MODEL, prompt="x", stop=[" quick"], extra_body={"min_tokens": least})
        return answer.choices[0].text

    assert text(0) == text(1) == "the"
    assert text(2) == text(5) == f"{DEFAULT_ANSWER} the"


def test_characters_cut_in_two_keep_their_bytes(tokenizer: Tokenizer) -> None:
    """Tokens that are no text have names of their own, and offsets count whole characters."""
    ids = tokenizer.encode("aé€b")
    assert len(ids) == 7  # every byte is a token of this vocabulary
    entries = [TokenLogprobs(i, -0.5, [(ids[1], -0.1), (ids[2], -0.2)]) for i in ids]
    told = CompletionTeller(tokenizer).tell(entries)
    assert told.tokens[:4] == ["a", "bytes:\\xc3", "bytes:\\xa9", "bytes:\\xe2"]
    assert told.text_offset == [0, 1, 1, 2, 2, 2, 3]
    assert told.top_logprobs[0] == {"bytes:\\xc3": -0.1, "bytes:\\xa9": -0.2, "a": -0.5}
    content = chat_logprobs(tokenizer, entries).content
    assert bytes(b for entry in content for b in entry.bytes).decode() == "aé€b"


def test_json_has_no_infinity(tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("the")[0]
    for value in (float("-inf"), float("nan"), -1e30):
        entry = TokenLogprobs(token, value, [(token, value)])
        told = CompletionTeller(tokenizer).tell([entry])
        assert told.token_logprobs == [-9999.0]
        assert told.top_logprobs == [{"the": -9999.0}]


def test_ids_without_a_token(tokenizer: Tokenizer) -> None:
    """A model's vocabulary may be padded beyond its tokenizer's."""
    entry = TokenLogprobs(10**6, -1.0, [])
    assert CompletionTeller(tokenizer).tell([entry]).tokens == [""]


def test_parameters_reach_the_engine(server: Server, tokenizer: Tokenizer) -> None:
    server.client.completions.create(
        model=MODEL,
        prompt="the fox",
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={"5": -100, "7": 1},
        extra_body={
            "min_p": 0.1,
            "min_tokens": 3,
            "repetition_penalty": 1.2,
            "bad_words": ["the", "lazy dog"],
        },
    )
    (params,) = server.engine.params
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.25)
    assert (params.min_p, params.min_tokens, params.repetition_penalty) == (0.1, 3, 1.2)
    assert params.logit_bias == {5: -100.0, 7: 1.0}
    spelled = ["the", " the", "lazy dog", " lazy dog"]
    assert params.bad_words == tuple(tuple(tokenizer.encode(text)) for text in spelled)


def test_min_tokens_is_capped_by_the_context_only(server: Server) -> None:
    create: Any = server.client.chat.completions.create
    create(model=MODEL, messages=[USER], extra_body={"min_tokens": 10**6})
    (params,) = server.engine.params
    assert params.min_tokens == params.max_tokens
