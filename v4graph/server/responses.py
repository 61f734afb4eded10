"""The OpenAI response bodies.

Bodies are sent with `exclude_unset`: a field that is set to None goes out as null, a field that is
left alone does not go out at all. OpenAI clients tell the two apart.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishName = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    """Which of a request's prompt tokens needed no computing."""

    cached_tokens: int
    """Prompt tokens whose cache rows were kept from earlier requests."""


class Usage(BaseModel):
    """Token counts of a request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    """Generated tokens, an EOS included; tokens after a stop string are not counted."""
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        """The counts with their sum."""
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )


class CompletionLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens, or of a chunk's; one entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    """The likeliest tokens, and the generated one."""
    text_offset: list[int]
    """Characters of the choice's text before each token."""


class CompletionChoice(BaseModel):
    """One prompt's text, whole or (in a stream) its next piece."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName | None


class Completion(BaseModel):
    """Answer of `/v1/completions`, whole or one chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token's text, bytes and natural log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """A generated token with the likeliest ones at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of all generated tokens, reasoning and EOS included."""

    content: list[ChatTokenLogprob]
    refusal: None


class ChatText(BaseModel):
    """A message, or (in a stream) what is added to it."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning_content: str | None = None


class ChatChoice(BaseModel):
    """The answer to a chat."""

    index: int
    message: ChatText
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None


class ChatCompletion(BaseModel):
    """Answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(BaseModel):
    """The next piece of an answer."""

    index: int
    delta: ChatText
    logprobs: ChatLogprobs | None
    finish_reason: FinishName | None


class ChatChunk(BaseModel):
    """One chunk of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Longest prompt and output together, in tokens."""


class ModelList(BaseModel):
    """Answer of `/v1/models`."""

    object: Literal["list"]
    data: list[Model]


def dump(body: BaseModel) -> dict[str, Any]:
    """The JSON form of a body."""
    return body.model_dump(exclude_unset=True)
