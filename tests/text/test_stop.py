from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v4graph.text.stop import StopMatcher


def run(stops: list[str], chunks: list[str]) -> tuple[str, str | None, str]:
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(chunk) for chunk in chunks) + matcher.flush()
    return out, matcher.matched, matcher.remainder


@pytest.mark.parametrize("first", range(12))
@pytest.mark.parametrize("second", range(12))
def test_stop_split_at_every_position(first: int, second: int) -> None:
    text = "abc<STOP>xyz"
    first, second = sorted((first, second))
    chunks = [text[:first], text[first:second], text[second:]]
    assert run(["<STOP>"], chunks) == ("abc", "<STOP>", "xyz")


def test_holds_back_only_a_proper_prefix_of_a_stop() -> None:
    # E5: not N characters regardless of what they are.
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("hello") == "hello"
    assert matcher.push(" a\n") == " a"
    assert matcher.push("b") == "\nb"
    assert matcher.push("\n\n\n") == "\n"
    assert matcher.push("Use") == ""
    assert matcher.flush() == "\n\nUse"
    assert matcher.matched is None


def test_self_overlapping_stop() -> None:
    assert run(["aab"], ["a", "a", "a", "b", "c"]) == ("a", "aab", "c")


def test_first_to_complete_wins_and_the_longest_of_those() -> None:
    assert run(["abcd", "bc"], ["xabcd"])[:2] == ("xa", "bc")
    assert run(["c", "abc"], ["xabcd"])[:2] == ("x", "abc")


def test_without_stops_everything_passes() -> None:
    assert run([], ["a", "b"]) == ("ab", None, "")


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=20),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_chunking_does_not_matter(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), len(text)]
    chunks = [text[a:b] for a, b in pairwise(borders)]
    chunks[-1] += text[len("".join(chunks)) :]
    expected = text
    for end in range(len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            expected = text[:end].removesuffix(max(hits, key=len))
            break
    assert run(stops, chunks)[0] == expected


@pytest.mark.parametrize("chunks", [["x", "ab", "y"], ["xa", "b", "y"], ["x", "a", "b", "y"]])
def test_what_completes_too_early_is_text(chunks: list[str]) -> None:
    """And a beginning from then may be completed later."""
    matcher = StopMatcher(["ab", "by"])
    out = [matcher.push(text, may_end=i == len(chunks) - 1) for i, text in enumerate(chunks)]
    assert "".join(out) == "xa"
    assert matcher.matched == "by"


def test_a_short_stop_inside_a_held_one_is_no_match_later() -> None:
    matcher = StopMatcher(["ab", "xabz"])
    assert matcher.push("xab", may_end=False) == ""
    assert matcher.push("!") == "xab!"
    assert matcher.push("ab") == ""
    assert matcher.matched == "ab"
