from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_server import DEFAULT_ANSWER, MODEL, FakeEngine, Server, StartServer

from v4graph.text.tokenizer import Tokenizer


def events(server: Server, path: str = "/v1/completions", **body: Any) -> list[Any]:
    """The data of each event, `[DONE]` included."""
    answer = server.http.post(path, json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\n")
    lines = answer.text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_whole_answer(server: Server) -> None:
    answer = server.client.completions.create(model=MODEL, prompt="the fox")
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.id.startswith("cmpl-")
    assert answer.created > 1_600_000_000
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (DEFAULT_ANSWER, "stop", 0)
    assert choice.logprobs is None
    # BOS and two words in, four words and the EOS out.
    assert answer.usage is not None
    assert answer.usage.to_dict() == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_length_is_the_finish_reason_of_a_cut(server: Server) -> None:
    answer = server.client.completions.create(model=MODEL, prompt="the fox", max_tokens=2)
    assert answer.choices[0].text == "the quick"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_max_tokens_is_a_cap(server: Server) -> None:
    # E13: more than the context holds is not an error.
    server.engine.endless = True
    answer = server.client.completions.create(model=MODEL, prompt="the fox", max_tokens=10**6)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == server.engine.max_model_len


def test_default_max_tokens(server: Server) -> None:
    server.engine.endless = True
    answer = server.client.completions.create(model=MODEL, prompt="the fox")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_parameters_reach_the_engine(server: Server) -> None:
    server.client.completions.create(
        model=MODEL,
        prompt="the fox",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        user="me",
        extra_body={"top_k": -1, "ignore_eos": True, "stop_token_ids": [9]},
    )
    (params,) = server.engine.params
    assert (params.max_tokens, params.temperature, params.top_p) == (7, 0.5, 0.9)
    assert (params.top_k, params.seed, params.ignore_eos) == (0, 3, True)
    assert params.stop_token_ids == (9,)


def test_prompt_forms(server: Server, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    assert tokenizer.bos_token_id is not None
    for prompt, expected in [
        ("the fox", [[tokenizer.bos_token_id, *ids]]),
        (ids, [ids]),
        (["the fox", "the fox"], [[tokenizer.bos_token_id, *ids]] * 2),
        ([ids, [5]], [ids, [5]]),
    ]:
        server.engine.prompts.clear()
        answer = server.client.completions.create(model=MODEL, prompt=prompt)
        assert server.engine.prompts == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, expected))
        assert answer.usage.completion_tokens == 5 * len(expected)


def test_stream_has_exactly_the_openai_shape(server: Server) -> None:
    *chunks, done = events(server, prompt="the fox", max_tokens=3)
    assert done == "[DONE]"
    assert len({(c["id"], c["created"]) for c in chunks}) == 1
    for chunk in chunks:
        assert set(chunk) == {"id", "object", "created", "model", "choices"}
        assert chunk["object"] == "text_completion"
        assert chunk["model"] == MODEL
    assert [c["choices"] for c in chunks] == [
        [{"index": 0, "text": "the", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": " quick", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": " brown", "logprobs": None, "finish_reason": "length"}],
    ]


@pytest.mark.parametrize("max_tokens", [1, 3, 16])
def test_usage_chunk_precedes_done(server: Server, max_tokens: int) -> None:
    # E2: no usage chunk at all.
    *chunks, usage, done = events(
        server,
        prompt="the fox",
        max_tokens=max_tokens,
        stream_options={"include_usage": True},
    )
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    output = min(max_tokens, 5)
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": output,
        "total_tokens": 3 + output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_stream_of_several_prompts(server: Server) -> None:
    texts = ["", "", ""]
    finish: dict[int, str] = {}
    for chunk in server.client.completions.create(model=MODEL, prompt=["a", "b", "c"], stream=True):
        (choice,) = chunk.choices
        assert choice.index not in finish
        texts[choice.index] += choice.text
        if choice.finish_reason:
            finish[choice.index] = choice.finish_reason
    assert texts == [DEFAULT_ANSWER] * 3
    assert finish == {0: "stop", 1: "stop", 2: "stop"}


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 7])
@pytest.mark.parametrize("stop", ["brown", "k b", " fox", "the", "x", ["zebra", "quick "]])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(
    server: Server, tokens_per_step: int, stop: str | list[str], stream: bool
) -> None:
    server.engine.tokens_per_step = tokens_per_step
    (cut,) = [s for s in ([stop] if isinstance(stop, str) else stop) if s in DEFAULT_ANSWER]
    expected = DEFAULT_ANSWER[: DEFAULT_ANSWER.index(cut)]
    num_tokens = 1 + DEFAULT_ANSWER[: DEFAULT_ANSWER.index(cut) + len(cut)].rstrip().count(" ")
    num_tokens += cut.endswith(" ")
    if stream:
        *chunks, usage, _ = events(
            server, prompt="a", stop=stop, stream_options={"include_usage": True}
        )
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        finish = chunks[-1]["choices"][0]["finish_reason"]
        completion_tokens = usage["usage"]["completion_tokens"]
    else:
        answer = server.client.completions.create(model=MODEL, prompt="a", stop=stop)
        text, finish = answer.choices[0].text, answer.choices[0].finish_reason
        assert answer.usage is not None
        completion_tokens = answer.usage.completion_tokens
    assert (text, finish) == (expected, "stop")
    # Steps of several tokens do not count the tokens after the stop string.
    assert completion_tokens == num_tokens


def test_text_that_only_began_a_stop_string_is_sent(server: Server) -> None:
    # E5: the held-back tail.
    answer = server.client.completions.create(model=MODEL, prompt="a", stop="fox jumps")
    assert answer.choices[0].text == DEFAULT_ANSWER


@pytest.mark.parametrize("max_tokens", range(1, 12))
@pytest.mark.parametrize("stream", [False, True])
def test_cut_inside_an_emoji(server: Server, max_tokens: int, stream: bool) -> None:
    # E7: strict decoding at the end of a cut character.
    server.engine.answer = "😀é👩‍👧"
    if stream:
        *chunks, done = events(server, prompt="a", max_tokens=max_tokens)
        assert done == "[DONE]"
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    else:
        answer = server.client.completions.create(model=MODEL, prompt="a", max_tokens=max_tokens)
        text = answer.choices[0].text
    assert server.engine.answer.startswith(text)
    assert "\ufffd" not in text


def test_concurrent_requests_are_one_batch(server: Server) -> None:
    server.engine.endless = True
    server.engine.step_seconds = 0.001

    async def run() -> list[str]:
        async with server.async_client() as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(model=MODEL, prompt="the", max_tokens=20 + i)
                    for i in range(8)
                )
            )
        return [answer.choices[0].text for answer in answers]

    texts = asyncio.run(run())
    assert len(set(texts)) == 8
    assert server.engine.max_batch > 1


def test_engine_fault_ends_a_stream_with_an_error_event(
    start_server: StartServer, engine: FakeEngine
) -> None:
    engine.fail_after_steps = 2
    server = start_server(engine)
    *chunks, last = events(server, prompt="the fox")
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["the", " quick"]
    assert last["error"]["type"] == "server_error"
    assert "planted fault" in last["error"]["message"]


def test_logits_that_are_not_finite_are_an_error_of_their_request(server: Server) -> None:
    server.engine.faulty_prompt = [5, 6]
    answer = server.http.post("/v1/completions", json={"prompt": [5, 6]})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "nonfinite_logits"
    assert "after 2 generated" in answer.json()["error"]["message"]
    assert server.http.post("/v1/completions", json={"prompt": [5]}).is_success


def test_in_a_stream_they_are_an_error_event(server: Server) -> None:
    server.engine.faulty_prompt = [5, 6]
    *chunks, last = events(server, prompt=[5, 6])
    assert "".join(c["choices"][0]["text"] for c in chunks) == "the quick"
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert last["error"]["code"] == "nonfinite_logits"
