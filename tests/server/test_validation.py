"""E17: no value out of range and no unsupported wish reaches the engine or is dropped."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from fake_server import MODEL, Server

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_PATH = "/v1/chat/completions"
OVER_LIMIT = "the " * 300
BOTH: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_p", float("nan")),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", 2**70),
    ("seed", 2**70),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("seed", "x"),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", 3),
    ("stop", ["a", 3]),
    ("stop", ["s"] * 17),
    ("stop_token_ids[0]", [-1]),
    ("stop_token_ids", 5),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("ignore_eos", 1),
    ("model", 3),
    ("n", 2),
    ("n", 0),
    ("n", True),
    ("logit_bias", [5]),
    ("logit_bias", {"five": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"5": 1, "05": 2}),
    ("logit_bias", {str(i): 1 for i in range(301)}),
    ("logit_bias[5]", {"5": 100.5}),
    ("logit_bias[5]", {"5": "1"}),
    ("logit_bias[5]", {"5": float("nan")}),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", "x"),
    ("presence_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-46),
    ("repetition_penalty", 1e-7),
    ("temperature", 1e-46),
    ("top_p", 1e-46),
    ("min_p", 1e-40),
    ("presence_penalty", -1e-46),
    ("frequency_penalty", 1e-46),
    ("logit_bias[5]", {"5": 1e-46}),
    ("repetition_penalty", -1),
    ("repetition_penalty", float("inf")),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_tokens", -1),
    ("min_tokens", 1.5),
    ("bad_words", "x"),
    ("bad_words[0]", [""]),
    ("bad_words[0]", [5]),
    ("bad_words[0]", ["\ud83d"]),
    ("bad_words", ["~@#$%^&*~@#$%^&*"]),
    ("bad_words", [f"{i}" for i in range(100, 140)]),
    ("metadata", {"a": "b"}),
    ("store", True),
    ("service_tier", "priority"),
    ("made_up_field", 1),
    ("\\ud83d", 1),
]
COMPLETION: list[tuple[str, Any]] = [
    ("prompt", []),
    ("prompt", 5),
    ("prompt", {}),
    ("prompt[0]", [[]]),
    ("prompt[1]", [1, "a"]),
    ("prompt[1]", [1, [2]]),
    ("prompt[1]", [1, None]),
    ("prompt[1]", [[5], "a"]),
    ("prompt[1]", [[5], 6]),
    ("prompt[1]", [[5], []]),
    ("prompt[1]", ["a", [5]]),
    ("prompt[2]", ["a", "b", 5]),
    ("prompt[1][2]", [[5], [6, 7, "8"]]),
    ("prompt[1][0]", [[5], [True]]),
    ("prompt[0][0]", [[[5]]]),
    ("prompt[0]", [{}]),
    ("prompt[0]", [None]),
    ("prompt[0]", [1.5]),
    ("prompt[0]", [True]),
    ("prompt[0]", [-1]),
    ("prompt", [10**6]),
    ("prompt", [2**70]),
    ("prompt[0][0]", [["a"]]),
    ("prompt", "\ud83d"),
    ("prompt", OVER_LIMIT),
    ("prompt", [5] * 256),
    ("echo", True),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", True),
    ("min_tokens", 17),
    ("best_of", 2),
    ("suffix", "x"),
    ("messages", MESSAGES),
    ("max_completion_tokens", 5),
]
CHAT: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", "hi"),
    ("messages", [*MESSAGES, {"role": "assistant", "content": "x"}]),
    ("messages", [{"role": "system", "content": "x"}]),
    ("messages", [{"role": "user", "content": OVER_LIMIT}]),
    ("messages[0].role", [{"role": "tool", "content": "x"}]),
    ("messages[0].content", [{"role": "user"}]),
    ("messages[0].content", [{"role": "user", "content": 5}]),
    ("messages[0].content", [{"role": "user", "content": [{"type": "image_url"}]}]),
    ("messages", [{"role": "user", "content": "\ud83d"}]),
    ("messages[0].tool_calls", [{"role": "user", "content": "x", "tool_calls": [{}]}]),
    ("max_completion_tokens", 0),
    ("logprobs", 1),
    ("top_logprobs", 2),
    ("top_logprobs", 21),
    ("top_logprobs", -1),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("response_format", {"type": "json_object"}),
    ("modalities", ["text", "audio"]),
    ("reasoning_effort", "high"),
    ("prompt", "x"),
    ("chat_template_kwargs.effort", {"effort": 1}),
    ("chat_template_kwargs.thinking", {"thinking": "yes"}),
]


def key_of(param: str) -> str:
    """The body's own key of a fault's path."""
    return param.split("[")[0].split(".")[0]


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    # httpx refuses NaN and lone surrogates; other clients do not.
    content = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    return server.http.post(path, content=content, headers=headers)


def check(server: Server, path: str, body: dict[str, Any], param: str) -> None:
    for stream in {False, body.get("stream", True) is True and "stream_options" not in body}:
        answer = post(server, path, {"stream": stream, **body})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert key_of(param) in error["message"] or error["param"] in ("prompt", "messages")
    assert server.engine.params == []
    assert server.engine.num_aborts == 0


@pytest.mark.parametrize(("field", "value"), BOTH + COMPLETION, ids=str)
def test_completion_400(server: Server, field: str, value: Any) -> None:
    check(server, "/v1/completions", {"prompt": "hi", key_of(field): value}, field)


@pytest.mark.parametrize(("field", "value"), BOTH + CHAT, ids=str)
def test_chat_400(server: Server, field: str, value: Any) -> None:
    check(server, CHAT_PATH, {"messages": MESSAGES, key_of(field): value}, field)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seed", 2**63, f"seed: must be an integer of {-(2**63)} to {2**63 - 1}, got {2**63}"),
        ("logprobs", 21, "logprobs: must be an integer of 0 to 20, got 21"),
        ("top_k", -2, f"top_k: must be an integer of -1 to {2**63 - 1}, got -2"),
        ("top_p", 0, "top_p: must be a number above 0, at most 1, got 0"),
        ("temperature", 2.5, "temperature: must be a number of 0 to 2, got 2.5"),
        ("repetition_penalty", 0, "repetition_penalty: must be a number of 1e-06 to 100, got 0"),
        ("min_p", 1e-46, "min_p: must be 0 or of a size that float32 holds"),
    ],
)
def test_ranges_are_told_with_both_ends(
    server: Server, field: str, value: Any, message: str
) -> None:
    answer = post(server, "/v1/completions", {"prompt": "hi", field: value})
    assert answer.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1])
def test_the_server_takes_the_engines_seeds(server: Server, seed: int) -> None:
    assert post(server, "/v1/completions", {"prompt": "hi", "seed": seed}).is_success
    assert [p.seed for p in server.engine.params] == [seed]


def test_contradicting_caps(server: Server) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 5}
    field = "max_completion_tokens"
    check(server, CHAT_PATH, {**body, field: 6}, field)
    assert post(server, CHAT_PATH, {**body, field: 5}).is_success


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_neutral_values_are_accepted(server: Server, path: str) -> None:
    body: dict[str, Any] = {
        "n": 1,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
        "logprobs": None,
        "top_p": None,
        "stop": None,
        "stream": None,
        "seed": None,
        "user": "u",
        "temperature": 0,
    }
    if "chat" in path:
        body |= {"messages": MESSAGES, "tools": [], "tool_choice": "auto", "logprobs": False}
        body |= {"response_format": {"type": "text"}, "parallel_tool_calls": True}
    else:
        body |= {"prompt": "hi", "best_of": 1, "echo": False, "suffix": None}
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_missing_prompt(server: Server, path: str) -> None:
    error = post(server, path, {"model": MODEL}).json()["error"]
    assert error["param"] == ("messages" if "chat" in path else "prompt")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 20_000])
def test_bodies_that_are_no_json_object(server: Server, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = server.http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", '{"prompt": "a", "prompt": "b"}', "prompt"),
        ("/v1/completions", '{"prompt": "a", "user": null, "user": null}', "user"),
        ("/v1/completions", '{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}', "logit_bias.5"),
        ("/v1/completions", '{"user": {"a": 1, "a": 2}, "user": "b", "prompt": "c"}', "user"),
        (
            CHAT_PATH,
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a", '
            '"text": "b"}]}]}',
            "messages[0].content[0].text",
        ),
        (
            CHAT_PATH,
            '{"messages": [{"role": "user", "content": "a"}], '
            '"stream": true, "stream_options": {"include_usage": true, "include_usage": false}}',
            "stream_options.include_usage",
        ),
    ],
)
def test_a_key_that_is_there_twice(server: Server, path: str, body: str, param: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = server.http.post(path, content=body, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "duplicate_key")
    assert param in error["message"]
    assert server.engine.params == []


def test_one_refused_prompt_refuses_the_request(server: Server) -> None:
    answer = post(server, "/v1/completions", {"prompt": [[5], [6], [10**6]]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert post(server, "/v1/completions", {"prompt": [[5]]}).is_success
    assert not server.engine.running


def test_wrong_model(server: Server) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.completions.create(model="other", prompt="hi")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("other")


def test_unknown_path_and_method_have_the_same_shape(server: Server) -> None:
    assert server.http.get("/v1/nothing").json()["error"]["message"] == "Not Found"
    assert server.http.get("/v1/completions").status_code == 405
    assert "error" in server.http.get("/v1/completions").json()
