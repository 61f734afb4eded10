"""The OpenAI request and response bodies that the server speaks, strictly checked.

A field that the engine cannot honour is an error unless it has its neutral value: nothing that a
client asks for is dropped in silence.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from v4graph.errors import RequestError
from v4graph.plan.rules import MAX_LOGPROBS, MAX_REPETITION, MAX_SEED, MIN_REPETITION, MIN_SEED
from v4graph.server.bounds import integer, number
from v4graph.text.chat import ChatMessage

MAX_STOP_STRINGS = 16
INT64_MAX = 2**63 - 1

# Neutral values of fields that are part of the OpenAI or vLLM requests but not supported; null is
# always neutral.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}


def _check_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop_type", "must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise PydanticCustomError(
            "too_many_stops",
            "at most {most} stop strings, got {count}",
            {"most": MAX_STOP_STRINGS, "count": len(stops)},
        )
    if not all(stops):
        raise PydanticCustomError("empty_stop", "a stop string must not be empty")
    return stops


def _check_prompt(value: Any) -> Any:
    """One prompt or a list of prompts, all texts or all token ids, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _prompt_fault(
            "",
            "must be a string, a list of token ids, a list of strings or a list of lists of token "
            "ids, with at least one entry",
        )
    first = value[0]
    if isinstance(first, str):
        for i, item in enumerate(value):
            if not isinstance(item, str):
                raise _prompt_fault(f"[{i}]", "must be a string, as the entries before it are")
        return value
    if not isinstance(first, list):
        _check_token_ids(value, "", "a string, a token id or a list of token ids")
        return [value]
    for i, item in enumerate(value):
        if not isinstance(item, list) or not item:
            raise _prompt_fault(f"[{i}]", "must be a list of at least one token id")
        _check_token_ids(item, f"[{i}]", "a token id")
    return value


def _check_token_ids(ids: list[Any], path: str, wanted: str) -> None:
    for i, item in enumerate(ids):
        # Not isinstance: JSON's true is no number.
        if type(item) is not int or item < 0:
            wanted = wanted if i == 0 else "a token id"
            raise _prompt_fault(f"{path}[{i}]", f"must be {wanted}, got {json.dumps(item)}")


def _prompt_fault(path: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("prompt_type", "{text}", {"text": message, "path": path})


def _check_content(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("content_type", "must be a string or a list of text parts")
    if isinstance(value, list):
        for part in value:
            if isinstance(part, dict) and part.get("type") not in ("text", None):
                raise PydanticCustomError(
                    "content_part",
                    "only text parts are supported, got {type}",
                    {"type": str(part["type"])},
                )
    return value


def _check_bias(value: Any) -> Any:
    """Token ids, strings in JSON, as numbers."""
    if not isinstance(value, dict):
        raise PydanticCustomError("bias_type", "must be an object: token ids and their biases")
    for key in value:
        if not re.fullmatch("[0-9]{1,18}", str(key)):
            raise PydanticCustomError("bias_id", "{key} is no token id", {"key": repr(key)})
    if len({int(key) for key in value}) < len(value):
        raise PydanticCustomError("bias_id", "a token id is there twice")
    return {int(key): bias for key, bias in value.items()}


Stops = Annotated[list[str], BeforeValidator(_check_stop)]
Bias = Annotated[float, *number(-100, 100)]
Penalty = Annotated[float, *number(-2, 2)]
Alternatives = Annotated[int, *integer(0, MAX_LOGPROBS)]
Natural = Annotated[int, *integer(0, INT64_MAX)]
Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]


class UnsupportedFieldError(RequestError):
    """A field of the API that only its neutral value may have.

    Like every `RequestError` raised in a validator it is no ValueError, so pydantic lets it pass
    and the field's name survives.
    """

    def __init__(self, name: str, neutral: tuple[Any, ...]) -> None:
        allowed = " or ".join([*(json.dumps(value) for value in neutral), "null"])
        super().__init__(f"{name}: not supported; leave it out or set it to {allowed}", name)


def _same(value: Any, other: Any) -> bool:
    # True == 1 in Python, but not in JSON.
    return value == other and isinstance(value, bool) == isinstance(other, bool)


class Body(BaseModel):
    """Closed and without coercion; a null field counts as absent, as OpenAI clients expect."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    """Send the token counts in a chunk of their own before `[DONE]`."""
    include_obfuscation: Literal[False] = False


class GenerationRequest(Body):
    """What completions and chat completions have in common."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED

    model: str | None = None
    """The served model's name; may be left out."""
    temperature: Annotated[float, *number(0, 2)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, *number(0, 1, above=True)] = 1.0
    top_k: Annotated[int, *integer(-1, INT64_MAX)] = 0
    """0 or -1: off."""
    min_p: Annotated[float, *number(0, 1)] = 0.0
    """Sample from tokens of at least this share of the largest probability; 0: off."""
    repetition_penalty: Annotated[float, *number(MIN_REPETITION, MAX_REPETITION)] = 1.0
    """Over prompt and output; 1: off."""
    presence_penalty: Penalty = 0.0
    """Over the output; 0: off."""
    frequency_penalty: Penalty = 0.0
    """Over the output; 0: off."""
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_check_bias)] = {}
    """Added to the logits of token ids, each in -100..100."""
    bad_words: list[Annotated[str, Field(min_length=1)]] = []
    """Words that the text never contains, spelled so."""
    min_tokens: Natural = 0
    """Within so many tokens no EOS, stop token or stop string ends the text."""
    seed: Annotated[int, *integer(MIN_SEED, MAX_SEED)] | None = None
    stop: Stops = []
    """Strings that end the text and are not part of it; at most 16."""
    stop_token_ids: list[Natural] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Accepted and unused."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, neutral in cls.unsupported.items():
            value = data.get(name)
            if value is not None and not any(_same(value, other) for other in neutral):
                raise UnsupportedFieldError(name, neutral)
        return {key: value for key, value in data.items() if key not in cls.unsupported}

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: allowed only with stream true", "stream_options")
        return self

    @property
    def cap(self) -> int | None:
        """Most generated tokens that the body allows; None is as many as the context holds."""
        raise NotImplementedError

    @property
    def num_alternatives(self) -> int | None:
        """Likeliest tokens to tell beside each generated one; None tells no log-probabilities."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _check_least(self) -> GenerationRequest:
        if self.cap is not None and self.min_tokens > self.cap:
            raise RequestError(
                f"min_tokens: {self.min_tokens} is more than max_tokens {self.cap}", "min_tokens"
            )
        return self


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED | UNSUPPORTED_COMPLETION

    prompt: Prompts
    """A text, a list of token ids, or a list of those: one choice for each."""
    max_tokens: Annotated[int, Field(ge=1)] = 16
    """Cap on generated tokens; the context length caps it too."""
    logprobs: Alternatives | None = None
    """Tell every token's log-probability and those of so many likeliest ones."""

    @property
    def cap(self) -> int | None:
        return self.max_tokens

    @property
    def num_alternatives(self) -> int | None:
        return self.logprobs


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[str | list[TextPart], BeforeValidator(_check_content)]
    reasoning_content: str = ""
    """Of an assistant message: the reasoning that came with it."""
    name: str | None = None
    """Accepted and unused: the V4 format has no place for it."""
    refusal: Literal[""] = ""

    def as_chat_message(self) -> ChatMessage:
        """The message as the chat renderer takes it."""
        if isinstance(self.content, str):
            content = self.content
        else:
            content = "\n\n".join(part.text for part in self.content)
        return ChatMessage(self.role, content, self.reasoning_content)


class ChatTemplateKwargs(Body):
    """Options of the chat format."""

    thinking: bool = False
    """Let the model reason before it answers; the reasoning comes as `reasoning_content`."""
    drop_thinking: bool = True
    """Leave out the reasoning of turns before the last user message."""


class ChatRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED | UNSUPPORTED_CHAT

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Cap on generated tokens, reasoning included; without it the context length is the cap."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool = False
    """Tell every token's log-probability."""
    top_logprobs: Alternatives = 0
    """And those of so many likeliest ones; only with `logprobs`."""
    chat_template_kwargs: ChatTemplateKwargs = ChatTemplateKwargs()

    @property
    def cap(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.messages[-1].role != "user":
            raise RequestError("messages: the last message must have the role user", "messages")
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError(
                f"max_completion_tokens: {new} contradicts max_tokens {old}; give one of them",
                "max_completion_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs: allowed only with logprobs true", "top_logprobs")
        return self
