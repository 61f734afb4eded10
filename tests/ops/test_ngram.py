"""Prompt lookup against a search in plain Python."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from v4graph.ops.ngram import lookup


def search(ids: list[int], k: int, least: int, most: int) -> list[int]:
    """The continuation of the most recent occurrence of the longest suffix n-gram."""
    for n in range(min(most, len(ids) - 1), least - 1, -1):
        for end in range(len(ids) - 2, n - 2, -1):
            if ids[end - n + 1 : end + 1] == ids[len(ids) - n :]:
                return ids[end + 1 : end + 1 + k]
    return []


rows = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(rows, st.integers(1, 5), st.integers(1, 3), st.integers(0, 2))
def test_lookup(ids: list[list[int]], k: int, least: int, more: int) -> None:
    """Whatever lies behind the known tokens is not looked at."""
    table = torch.full((len(ids), 30), 1)
    for row, own in zip(table, ids, strict=True):
        row[: len(own)] = torch.tensor(own)
    counts = torch.tensor([len(own) for own in ids])
    drafts, found = lookup(table, counts, k, least, least + more)
    assert drafts.shape == (len(ids), k)
    for row, count, own in zip(drafts.tolist(), found.tolist(), ids, strict=True):
        assert row[:count] == search(own, k, least, least + more)


def test_an_empty_row_drafts_nothing() -> None:
    _, found = lookup(torch.zeros(2, 8, dtype=torch.int64), torch.tensor([0, 1]), 3, 1, 3)
    assert found.tolist() == [0, 0]
