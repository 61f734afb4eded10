"""The server on the real engine and the shipped v4-nano checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import MODEL, Server, serve

from v4graph.text.chat import CHAT_TOKENS
from v4graph.text.tokenizer import Tokenizer

WEIGHTS = Path(__file__).parents[2] / "specs" / "v4-nano"
pytestmark = pytest.mark.skipif(
    not list(WEIGHTS.glob("*.safetensors")), reason="the v4-nano weights are not in the tree"
)
PROMPTS = ["Once upon a time", "The", "There was a little"]


@pytest.fixture(scope="module")
def nano() -> Iterator[Server]:
    from v4graph.engine.engine import EngineConfig, LLMEngine
    from v4graph.spec.load import load_spec

    spec = load_spec("v4-nano")
    # Few buckets and short outputs: eager steps are slow. A request alone and one in a batch
    # still run different programs.
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        compile=False,
        checked=True,
        decode_buckets=(1, 4),
        prefill_buckets=((64, 4),),
    )
    engine: Any = LLMEngine.from_spec(spec, WEIGHTS, config)
    servers = serve(Tokenizer.from_directory(WEIGHTS, spec.bos_token_id))
    yield next(servers)(engine)
    next(servers, None)


def complete(nano: Server, prompt: Any, **options: Any) -> Any:
    options = {"max_tokens": 10, "temperature": 0} | options
    return nano.client.completions.create(model=MODEL, prompt=prompt, **options)


def cached(usage: Any) -> int:
    return usage.prompt_tokens_details.cached_tokens


def completion_usage(nano: Server, prompt: Any, stream: bool) -> Any:
    return usage_of(nano.client.completions.create, stream, prompt=prompt)


def chat_usage(nano: Server, messages: Any, stream: bool) -> Any:
    return usage_of(nano.client.chat.completions.create, stream, messages=messages)


def usage_of(create: Any, stream: bool, **body: Any) -> Any:
    body |= {"model": MODEL, "max_tokens": 2, "temperature": 0}
    if not stream:
        return create(**body).usage
    return list(create(**body, stream=True, stream_options={"include_usage": True}))[-1].usage


def test_greedy_text_does_not_depend_on_the_batch(nano: Server) -> None:
    alone = [complete(nano, prompt).choices[0].text for prompt in PROMPTS]
    together = [choice.text for choice in complete(nano, PROMPTS).choices]
    assert together == alone

    async def run() -> list[str]:
        async with nano.async_client() as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(
                        model=MODEL, prompt=prompt, max_tokens=10, temperature=0
                    )
                    for prompt in PROMPTS
                )
            )
        return [answer.choices[0].text for answer in answers]

    assert asyncio.run(run()) == alone


def test_stream_is_the_whole_text(nano: Server) -> None:
    whole = complete(nano, PROMPTS[0])
    stream = list(complete(nano, PROMPTS[0], stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in stream[:-1]) == whole.choices[0].text
    assert stream[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert stream[-1].usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_cached_tokens_of_completions(nano: Server, stream: bool) -> None:
    prompt, other = ([50 + stream + i * (7 + 2 * j) for i in range(100)] for j in range(2))
    assert cached(completion_usage(nano, prompt, False)) == 0
    before = nano.engine.metrics["prefix_hit_tokens"]
    usage = completion_usage(nano, [prompt, other], stream)
    hit = nano.engine.metrics["prefix_hit_tokens"] - before
    assert 50 < cached(usage) == hit < 100
    assert usage.prompt_tokens == 200


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_cached_tokens_of_chats(nano: Server, stream: bool) -> None:
    messages = [{"role": "user", "content": f"{stream}: " + "a dog and a cat " * 14}]
    assert cached(chat_usage(nano, messages, False)) == 0
    before = nano.engine.metrics["prefix_hit_tokens"]
    usage = chat_usage(nano, messages, stream)
    assert 0 < cached(usage) == nano.engine.metrics["prefix_hit_tokens"] - before


def test_seed_gives_equal_text(nano: Server) -> None:
    first, again, other = (
        complete(nano, PROMPTS[0], temperature=1.0, seed=seed, max_tokens=12).choices[0].text
        for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


def test_stop_string_cuts_the_same_text(nano: Server) -> None:
    whole = complete(nano, PROMPTS[0]).choices[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    cut = complete(nano, PROMPTS[0], stop=stop)
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_context_length(nano: Server) -> None:
    answer = complete(nano, [5] * 124, max_tokens=10**6, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 128
    with pytest.raises(Exception, match="no room"):
        complete(nano, [5] * 128)


def test_ids_out_of_range(nano: Server) -> None:
    with pytest.raises(Exception, match="not in 0") as caught:
        complete(nano, [[5], [4096]])
    assert getattr(caught.value, "param", None) == "prompt"


def test_chat_answers_or_says_why_not(nano: Server) -> None:
    tokenizer = Tokenizer.from_directory(WEIGHTS)
    messages: Any = [{"role": "user", "content": "Hi"}]
    create: Any = nano.client.chat.completions.create
    if all(tokenizer.token_id(token) is not None for token in CHAT_TOKENS):
        answer = create(model=MODEL, messages=messages, max_tokens=4, temperature=0)
        assert answer.usage.completion_tokens <= 4
    else:
        with pytest.raises(Exception, match="lacks the chat tokens"):
            create(model=MODEL, messages=messages)


def test_pages_are_free_when_idle(nano: Server) -> None:
    metrics = nano.http.get("/metrics").text
    used = [row for row in metrics.splitlines() if row.startswith("v4graph:engine_pages_used{")]
    assert used
    assert all(row.endswith(" 0.0") for row in used)
    engine: Any = nano.engine
    engine.check_integrity()
    assert not engine.has_unfinished()
