"""`POST /v1/chat/completions`: messages in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response

from v4graph.engine.request import TokenLogprobs
from v4graph.errors import RequestError
from v4graph.server.common import (
    answer_stream,
    answer_whole,
    check_model,
    check_room,
    collect,
    encode,
    wants_usage_chunk,
)
from v4graph.server.errors import ApiError
from v4graph.server.generation import Generation, Serving
from v4graph.server.logprobs import chat_logprobs
from v4graph.server.protocol import ChatRequest
from v4graph.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatText,
    dump,
)
from v4graph.server.stream import event
from v4graph.text.chat import CHAT_TOKENS, render_chat


def add_chat(app: FastAPI, serving: Serving) -> None:
    """Add the endpoint to the application."""
    missing = [token for token in CHAT_TOKENS if serving.tokenizer.token_id(token) is None]

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer the last user message."""
        check_model(serving, body.model)
        if missing:
            raise ApiError(
                400,
                f"the tokenizer of {serving.model_name!r} lacks the chat tokens "
                f"{', '.join(missing)}; use /v1/completions",
                "messages",
            )
        thinking = body.chat_template_kwargs.thinking
        prompts = [await _prompt_ids(serving, body)]
        generation = Generation(serving, body, "chatcmpl", thinking)

        def told(entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
            return chat_logprobs(serving.tokenizer, entries) if body.logprobs else None

        async def whole() -> dict[str, Any]:
            await generation.submit(prompts)
            (choice,) = await collect(generation, 1)
            message = ChatText(role="assistant", content=choice.text)
            if thinking:
                message.reasoning_content = choice.reasoning
            answer = ChatCompletion(
                id=generation.id,
                object="chat.completion",
                created=generation.created,
                model=serving.model_name,
                choices=[
                    ChatChoice(
                        index=0,
                        message=message,
                        logprobs=told(choice.logprobs),
                        finish_reason=choice.finish_reason,
                    )
                ],
                usage=generation.usage,
            )
            return dump(answer)

        if not body.stream:
            return await answer_whole(request, generation, whole(), "messages")
        events = _events(serving, generation, wants_usage_chunk(body), told)
        return await answer_stream(generation, prompts, events, "messages")


async def _prompt_ids(serving: Serving, body: ChatRequest) -> list[int]:
    options = body.chat_template_kwargs
    messages = [message.as_chat_message() for message in body.messages]
    text = render_chat(messages, options.thinking, options.drop_thinking)
    try:
        ids = await encode(serving, text, add_bos=False)
    except RequestError as error:
        raise ApiError(400, str(error), "messages") from error
    return check_room(serving, ids, "messages")


async def _events(
    serving: Serving,
    generation: Generation,
    with_usage: bool,
    told: Callable[[Sequence[TokenLogprobs]], ChatLogprobs | None],
) -> AsyncIterator[bytes]:
    def chunk(choices: list[ChatChunkChoice]) -> ChatChunk:
        body = ChatChunk(
            id=generation.id,
            object="chat.completion.chunk",
            created=generation.created,
            model=serving.model_name,
            choices=choices,
        )
        if with_usage:
            body.usage = None  # null in every chunk but the last
        return body

    def piece(text: ChatText, logprobs: ChatLogprobs | None = None) -> ChatChunk:
        return chunk([ChatChunkChoice(index=0, delta=text, logprobs=logprobs, finish_reason=None)])

    is_first = True
    async for delta in generation.deltas():
        if is_first:
            # Not before the first token: clients time it by their first chunk.
            yield event(piece(ChatText(role="assistant", content="")))
            is_first = False
        logprobs = told(delta.logprobs) if delta.logprobs else None
        if delta.reasoning:
            yield event(piece(ChatText(reasoning_content=delta.reasoning), logprobs))
            logprobs = None
        if delta.text:
            yield event(piece(ChatText(content=delta.text), logprobs))
            logprobs = None
        if delta.finish_reason is not None:
            last = piece(ChatText(), logprobs)
            last.choices[0].finish_reason = delta.finish_reason
            yield event(last)
    if with_usage:
        end = chunk([])
        end.usage = generation.usage
        yield event(end)
