from __future__ import annotations

from typing import Any

import pytest
from fake_server import DEFAULT_ANSWER, MODEL, FakeEngine, Server, StartServer
from test_completions_api import events

from v4graph.text.chat import ChatMessage, render_chat
from v4graph.text.tokenizer import Tokenizer

USER: Any = {"role": "user", "content": "the fox"}
CHAT = "/v1/chat/completions"


def test_whole_answer(server: Server, tokenizer: Tokenizer) -> None:
    answer = server.client.chat.completions.create(model=MODEL, messages=[USER])
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", DEFAULT_ANSWER)
    assert choice.finish_reason == "stop"
    assert not hasattr(choice.message, "reasoning_content")
    prompt = render_chat([ChatMessage("user", "the fox")])
    assert server.engine.prompts == [tokenizer.encode(prompt)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(server.engine.prompts[0])
    assert answer.usage.completion_tokens == 5


def test_an_answer_can_be_sent_back(server: Server, tokenizer: Tokenizer) -> None:
    create = server.client.chat.completions.create
    message = create(model=MODEL, messages=[USER]).choices[0].message
    parts: Any = {"role": "user", "content": [{"type": "text", "text": "over"}]}
    sent: Any = message.model_dump()
    create(model=MODEL, messages=[{"role": "system", "content": "Be."}, USER, sent, parts])
    assert server.engine.prompts[1] == tokenizer.encode(
        render_chat(
            [
                ChatMessage("system", "Be."),
                ChatMessage("user", "the fox"),
                ChatMessage("assistant", DEFAULT_ANSWER),
                ChatMessage("user", "over"),
            ]
        )
    )


def test_stream_is_exactly_openais(server: Server) -> None:
    # E22: golden transcript; the role comes first, the last delta is empty.
    *chunks, done = events(server, CHAT, messages=[USER], max_tokens=2)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    for chunk in chunks:
        assert set(chunk) == {"id", "object", "created", "model", "choices"}
        assert chunk["object"] == "chat.completion.chunk"

    def choice(delta: dict[str, str], finish: str | None = None) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]

    assert [chunk["choices"] for chunk in chunks] == [
        choice({"role": "assistant", "content": ""}),
        choice({"content": "the"}),
        choice({"content": " quick"}),
        choice({}, "length"),
    ]


def test_usage_chunk_precedes_done(server: Server) -> None:
    # E2
    *chunks, usage, done = events(
        server, CHAT, messages=[USER], stream_options={"include_usage": True}
    )
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5


def test_openai_client_reads_the_stream(server: Server) -> None:
    stream = server.client.chat.completions.create(model=MODEL, messages=[USER], stream=True)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == DEFAULT_ANSWER
    assert [c.choices[0].finish_reason for c in chunks[-2:]] == [None, "stop"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_either_name_caps(server: Server, field: str) -> None:
    # E13: a cap, not a demand; more than the context holds is no error.
    create: Any = server.client.chat.completions.create
    answer = create(model=MODEL, messages=[USER], **{field: 2})
    assert answer.choices[0].message.content == "the quick"
    assert answer.choices[0].finish_reason == "length"
    assert create(model=MODEL, messages=[USER], **{field: 10**9}).choices[0].message.content


def test_without_a_cap_the_context_is_the_cap(server: Server) -> None:
    server.engine.endless = True
    answer = server.client.chat.completions.create(model=MODEL, messages=[USER])
    assert answer.usage is not None
    assert answer.usage.total_tokens == server.engine.max_model_len


@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("max_tokens", "reasoning", "content", "finish"),
    [(64, "the quick", " brown fox", "stop"), (2, "the quick", "", "length")],
)
def test_reasoning(
    server: Server,
    stream: bool,
    tokens_per_step: int,
    max_tokens: int,
    reasoning: str,
    content: str,
    finish: str,
) -> None:
    server.engine.answer = "the quick</think> brown fox"
    server.engine.tokens_per_step = tokens_per_step
    options: Any = {"messages": [USER], "max_tokens": max_tokens}
    options["chat_template_kwargs"] = {"thinking": True}
    got = {"reasoning_content": "", "content": ""}
    if stream:
        *chunks, _ = events(server, CHAT, **options)
        for chunk in chunks:
            for name, text in chunk["choices"][0]["delta"].items():
                if name != "role":
                    got[name] += text
        assert chunks[-1]["choices"][0]["finish_reason"] == finish
    else:
        extra = {"chat_template_kwargs": options.pop("chat_template_kwargs")}
        answer = server.client.chat.completions.create(model=MODEL, extra_body=extra, **options)
        message: Any = answer.choices[0].message
        got = {"reasoning_content": message.reasoning_content, "content": message.content}
        assert answer.choices[0].finish_reason == finish
    assert got == {"reasoning_content": reasoning, "content": content}


def test_a_tokenizer_without_chat_tokens_says_so(
    start_server: StartServer, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Tokenizer.token_id

    def token_id(self: Tokenizer, token: str) -> int | None:
        return None if token == "<think>" else real(self, token)

    monkeypatch.setattr(Tokenizer, "token_id", token_id)
    server = start_server(engine)
    with pytest.raises(Exception, match="lacks the chat tokens <think>"):
        server.client.chat.completions.create(model=MODEL, messages=[USER])
