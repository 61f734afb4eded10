"""Render chat messages as a DeepSeek-V4 prompt: system, user and assistant turns, no tools."""

# ruff: noqa: RUF001 -- the V4 tokens are spelt with a fullwidth bar.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
CHAT_TOKENS = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK)

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation."""

    role: Role
    content: str
    reasoning_content: str = ""
    """Of an assistant turn: the text before `</think>`."""


def render_chat(
    messages: Sequence[ChatMessage], thinking: bool = False, drop_thinking: bool = True
) -> str:
    """Render a conversation; one that ends with a user turn ends ready for the answer.

    Args:
        messages: the turns in order; user messages in a row become one turn.
        thinking: open the answer with `<think>` rather than `</think>`.
        drop_thinking: leave out the reasoning of turns before the last user turn.
    """
    turns = _merge_user_turns(messages)
    last_user = max((i for i, m in enumerate(turns) if m.role == "user"), default=-1)

    def thinks(index: int) -> bool:
        return thinking and (not drop_thinking or index >= last_user)

    parts = [BOS]
    for index, message in enumerate(turns):
        if message.role == "system":
            parts.append(message.content)
        elif message.role == "user":
            parts += [USER, message.content]
            following = turns[index + 1].role if index + 1 < len(turns) else "assistant"
            if following == "assistant":
                parts += [ASSISTANT, THINK if thinks(index) else END_THINK]
        else:
            if thinks(index):
                parts += [message.reasoning_content, END_THINK]
            parts += [message.content, EOS]
    return "".join(parts)


def _merge_user_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    turns: list[ChatMessage] = []
    for message in messages:
        if message.role == "user" and turns and turns[-1].role == "user":
            turns[-1] = replace(turns[-1], content=f"{turns[-1].content}\n\n{message.content}")
        else:
            turns.append(message)
    return turns
