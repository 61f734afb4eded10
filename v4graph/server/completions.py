"""`POST /v1/completions`: text or token ids in, text out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response

from v4graph.server.common import (
    answer_stream,
    answer_whole,
    check_model,
    check_room,
    collect,
    encode,
    wants_usage_chunk,
)
from v4graph.server.generation import ChoiceDelta, Generation, Serving
from v4graph.server.logprobs import CompletionTeller
from v4graph.server.protocol import CompletionRequest
from v4graph.server.responses import Completion, CompletionChoice, dump
from v4graph.server.stream import event


def add_completions(app: FastAPI, serving: Serving) -> None:
    """Add the endpoint to the application."""

    @app.post("/v1/completions", response_model=Completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue each prompt; one choice a prompt."""
        check_model(serving, body.model)
        generation = Generation(serving, body, "cmpl")
        prompts = [await _prompt_ids(serving, prompt) for prompt in body.prompt]
        tellers = None
        if body.logprobs is not None:
            tellers = [CompletionTeller(serving.tokenizer) for _ in prompts]

        def chunk(deltas: Sequence[ChoiceDelta]) -> Completion:
            return Completion(
                id=generation.id,
                object="text_completion",
                created=generation.created,
                model=serving.model_name,
                choices=[_choice(delta, tellers) for delta in deltas],
            )

        async def whole() -> dict[str, Any]:
            await generation.submit(prompts)
            answer = chunk(await collect(generation, len(prompts)))
            answer.usage = generation.usage
            return dump(answer)

        if not body.stream:
            return await answer_whole(request, generation, whole(), "prompt")
        events = _events(generation, chunk, wants_usage_chunk(body))
        return await answer_stream(generation, prompts, events, "prompt")


async def _prompt_ids(serving: Serving, prompt: str | list[int]) -> list[int]:
    # Token ids are taken as they are; a text is a document, which begins with BOS.
    ids = await encode(serving, prompt, add_bos=True) if isinstance(prompt, str) else prompt
    return check_room(serving, ids, "prompt")


async def _events(
    generation: Generation,
    chunk: Callable[[Sequence[ChoiceDelta]], Completion],
    with_usage: bool,
) -> AsyncIterator[bytes]:
    async for delta in generation.deltas():
        body = chunk([delta])
        if with_usage:
            body.usage = None  # null in every chunk but the last
        yield event(body)
    if with_usage:
        body = chunk([])
        body.usage = generation.usage
        yield event(body)


def _choice(delta: ChoiceDelta, tellers: Sequence[CompletionTeller] | None) -> CompletionChoice:
    return CompletionChoice(
        index=delta.index,
        text=delta.text,
        logprobs=None if tellers is None else tellers[delta.index].tell(delta.logprobs),
        finish_reason=delta.finish_reason,
    )
