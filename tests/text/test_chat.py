# ruff: noqa: RUF001 -- the V4 tokens are spelt with a fullwidth bar.

from __future__ import annotations

from v4graph.text.chat import ChatMessage, render_chat

SYSTEM = ChatMessage("system", "Be brief.")
HI = ChatMessage("user", "Hi")
HELLO = ChatMessage("assistant", "Hello", "They greet me.")
MORE = ChatMessage("user", "More")

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def test_chat_mode() -> None:
    assert render_chat([HI]) == f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"


def test_thinking_mode() -> None:
    assert render_chat([HI], thinking=True) == f"{BOS}<｜User｜>Hi<｜Assistant｜><think>"


def test_conversation_without_thinking() -> None:
    assert render_chat([SYSTEM, HI, HELLO, MORE]) == (
        f"{BOS}Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello{EOS}"
        "<｜User｜>More<｜Assistant｜></think>"
    )


def test_past_reasoning_is_dropped() -> None:
    assert render_chat([SYSTEM, HI, HELLO, MORE], thinking=True) == (
        f"{BOS}Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello{EOS}"
        "<｜User｜>More<｜Assistant｜><think>"
    )


def test_past_reasoning_is_kept_on_demand() -> None:
    assert render_chat([HI, HELLO, MORE], thinking=True, drop_thinking=False) == (
        f"{BOS}<｜User｜>Hi<｜Assistant｜><think>They greet me.</think>Hello{EOS}"
        "<｜User｜>More<｜Assistant｜><think>"
    )


def test_reasoning_after_the_last_user_turn_is_kept() -> None:
    assert render_chat([HI, HELLO], thinking=True) == (
        f"{BOS}<｜User｜>Hi<｜Assistant｜><think>They greet me.</think>Hello{EOS}"
    )


def test_user_messages_in_a_row_are_one_turn() -> None:
    assert render_chat([HI, MORE, HELLO, MORE, HI]) == (
        f"{BOS}<｜User｜>Hi\n\nMore<｜Assistant｜></think>Hello{EOS}"
        "<｜User｜>More\n\nHi<｜Assistant｜></think>"
    )
