"""Counts in messages."""

from __future__ import annotations

import pytest

from v4graph.words import counted


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 tensors"), (1, "1 tensor"), (2, "2 tensors"), (1000, "1000 tensors")]
)
def test_the_noun_goes_with_the_count(count: int, text: str) -> None:
    assert counted(count, "tensor") == text


def test_an_irregular_plural_and_a_format() -> None:
    assert counted(1, "entry is", "entries are") == "1 entry is"
    assert counted(4096, "entry is", "entries are", form=",") == "4,096 entries are"
