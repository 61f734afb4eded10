"""What the completion and the chat endpoint share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from v4graph.engine.async_engine import EngineDeadError
from v4graph.errors import NonFiniteLogitsError, RequestError
from v4graph.server.errors import ApiError, as_api_error
from v4graph.server.generation import ChoiceDelta, Generation, Serving
from v4graph.server.protocol import GenerationRequest
from v4graph.server.stream import (
    DONE,
    ClientDisconnectedError,
    EventStream,
    event,
    until_disconnect,
)
from v4graph.words import counted

# Longer texts are encoded in a worker thread, so that other streams go on meanwhile.
LONG_TEXT_CHARS = 20_000
CLIENT_CLOSED_REQUEST = 499


def check_model(serving: Serving, name: str | None) -> None:
    """Refuse a request for another model than the served one."""
    if name is not None and name != serving.model_name:
        raise ApiError(
            404,
            f"the model {name!r} does not exist; this server has {serving.model_name!r}",
            "model",
            "model_not_found",
        )


def check_room(serving: Serving, prompt_ids: list[int], param: str) -> list[int]:
    """Refuse a prompt that leaves no room for one generated token."""
    limit = serving.engine.max_model_len
    if len(prompt_ids) >= limit:
        raise ApiError(
            400,
            f"{param}: {counted(len(prompt_ids), 'token leaves', 'tokens leave')} no room for an "
            f"answer; the context has {counted(limit, 'token')}, prompt and answer together",
            param,
            "context_length_exceeded",
        )
    return prompt_ids


async def encode(serving: Serving, text: str, add_bos: bool) -> list[int]:
    """Encode a prompt without holding up the event loop."""
    if len(text) < LONG_TEXT_CHARS:
        return serving.tokenizer.encode(text, add_bos)
    return await asyncio.to_thread(serving.tokenizer.encode, text, add_bos)


def wants_usage_chunk(body: GenerationRequest) -> bool:
    """Whether a streamed answer ends with the token counts."""
    return body.stream_options is not None and body.stream_options.include_usage


async def collect(generation: Generation, num_choices: int) -> list[ChoiceDelta]:
    """Run to the end; one delta a choice with all of its text."""
    parts: list[list[ChoiceDelta]] = [[] for _ in range(num_choices)]
    async for delta in generation.deltas():
        parts[delta.index].append(delta)
    return [
        ChoiceDelta(
            index=index,
            text="".join(d.text for d in deltas),
            reasoning="".join(d.reasoning for d in deltas),
            finish_reason=deltas[-1].finish_reason,
            logprobs=tuple(entry for d in deltas for entry in d.logprobs),
        )
        for index, deltas in enumerate(parts)
    ]


async def answer_whole(
    request: Request,
    generation: Generation,
    work: Coroutine[Any, Any, dict[str, Any]],
    prompt_param: str,
) -> Response:
    """Send one body; a client that leaves first has its request aborted."""
    try:
        return JSONResponse(await until_disconnect(request, work))
    except ClientDisconnectedError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except (RequestError, EngineDeadError, NonFiniteLogitsError) as error:
        raise as_api_error(error, prompt_param) from error
    finally:
        generation.close()


async def answer_stream(
    generation: Generation,
    prompts: Sequence[list[int]],
    events: AsyncIterator[bytes],
    prompt_param: str,
) -> Response:
    """Send events; a fault before the first one is still an ordinary HTTP error."""
    try:
        await generation.submit(prompts)
    except (RequestError, EngineDeadError) as error:
        raise as_api_error(error, prompt_param) from error
    return EventStream(_guarded(events), on_close=generation.close)


async def _guarded(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        async for item in events:
            yield item
    except Exception as error:
        # The status line is gone; an error event without [DONE] marks the text as unfinished.
        yield event(as_api_error(error).body)
    else:
        yield DONE
