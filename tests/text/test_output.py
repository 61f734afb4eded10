from __future__ import annotations

import pytest

from v4graph.text.output import OutputText, TextDelta
from v4graph.text.tokenizer import Tokenizer


def run(output: OutputText, token_ids: list[int], per_step: int) -> tuple[str, str, int]:
    """Text, reasoning and the number of tokens that count."""
    deltas: list[TextDelta] = []
    for at in range(0, len(token_ids), per_step):
        deltas.append(output.push(token_ids[at : at + per_step]))
        if deltas[-1].stopped:
            break
    else:
        deltas.append(output.flush())
    return (
        "".join(d.text for d in deltas),
        "".join(d.reasoning for d in deltas),
        sum(d.num_tokens for d in deltas),
    )


@pytest.mark.parametrize("per_step", [1, 2, 3, 4, 100])
def test_several_tokens_a_step_change_nothing(tokenizer: Tokenizer, per_step: int) -> None:
    token_ids = tokenizer.encode("the fox 😀 jumps STOP over the dog")
    expected = run(OutputText(tokenizer, ["STOP"]), token_ids, 1)
    assert expected[0] == "the fox 😀 jumps "
    assert expected[2] < len(token_ids)
    assert run(OutputText(tokenizer, ["STOP"]), token_ids, per_step) == expected


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_stop_anywhere_in_the_text(tokenizer: Tokenizer, start: int, length: int) -> None:
    text = "fox😀 the dog"
    stop = text[start : start + length]
    got, _, _ = run(OutputText(tokenizer, [stop]), tokenizer.encode(text), 1)
    assert got == text[: text.index(stop)]


@pytest.mark.parametrize("per_step", [1, 3, 100])
def test_reasoning_is_split_off(tokenizer: Tokenizer, per_step: int) -> None:
    token_ids = tokenizer.encode("let me think</think>the answer")
    assert run(OutputText(tokenizer, thinking=True), token_ids, per_step)[:2] == (
        "the answer",
        "let me think",
    )


def test_end_of_thinking_spelt_in_pieces(tokenizer: Tokenizer) -> None:
    token_ids = [i for c in "hm</think>yes" for i in tokenizer.encode(c)]
    assert run(OutputText(tokenizer, thinking=True), token_ids, 1)[:2] == ("yes", "hm")


def test_cut_inside_reasoning(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("let me <")
    assert run(OutputText(tokenizer, thinking=True), token_ids, 1)[:2] == ("", "let me <")


def test_stop_inside_reasoning(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("let me STOP</think>x")
    output = OutputText(tokenizer, ["STOP"], thinking=True)
    assert run(output, token_ids, 4)[:2] == ("", "let me ")


def test_chat_mode_leaves_think_tags_alone(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a</think>b")
    assert run(OutputText(tokenizer), token_ids, 1)[0] == "a</think>b"


@pytest.mark.parametrize("per_step", [1, 2, 3, 100])
@pytest.mark.parametrize("least", range(7))
def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer, per_step: int, least: int) -> None:
    """One that lies across the border ends the text: it completes behind it."""
    token_ids = tokenizer.encode("the fox the fox the fox")
    assert len(token_ids) == 6
    text, _, count = run(OutputText(tokenizer, ["x t"], min_tokens=least), token_ids, per_step)
    expected = {0: 3, 1: 3, 2: 3, 3: 5, 4: 5, 5: 6, 6: 6}[least]
    assert count == expected
    assert text == ["the fo", "the fox the fo", "the fox the fox the fox"][[3, 5, 6].index(count)]
