"""Index scores, and the selection of the best entries at every edge."""

from __future__ import annotations

import math

import pytest
import torch

from v4graph.ops.indexer import index_scores, select_topk

INF, NAN = float("inf"), float("nan")


def select(scores: list[float], entries: int, topk: int) -> list[int]:
    return select_topk(torch.tensor([scores]), torch.tensor([entries]), topk)[0].tolist()


def test_scores_equal_a_loop_and_keep_the_relu_of_every_head() -> None:
    """A9: one port dropped the ReLU of each head."""
    q, keys, weights = torch.randn(4, 3, 8), torch.randn(4, 9, 8), torch.randn(4, 3)
    ours = index_scores(q, keys, weights)
    for t in range(4):
        for j in range(9):
            dots = [float(q[t, h].double() @ keys[t, j].double()) for h in range(3)]
            exact = sum(float(w) * max(d, 0) for w, d in zip(weights[t], dots, strict=True))
            assert float(ours[t, j]) == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 31, 32, 33, 64])
def test_selection_equals_a_sort(length: int) -> None:
    """A10, A21: k = 8 at sequences below, at and above k; what lies beyond is invisible."""
    scores = torch.randn(20, 64)
    scores[:, length:] = 1e9
    chosen = select_topk(scores, torch.full((20,), length), 8)
    assert chosen.dtype is torch.int64
    assert chosen.shape == (20, 8)
    for row, picks in zip(scores.tolist(), chosen.tolist(), strict=True):
        best = sorted(range(length), key=lambda j: (-row[j], j))[:8]
        assert picks == best + [-1] * (8 - len(best))


def test_every_row_has_its_own_length() -> None:
    lengths = torch.arange(12)
    chosen = select_topk(torch.randn(12, 10).clamp(-3, 3), lengths.clamp_max(10), 4)
    for length, picks in zip(lengths.tolist(), chosen.tolist(), strict=True):
        kept = [p for p in picks if p >= 0]
        assert len(kept) == len(set(kept)) == min(length, 4)
        assert all(p < length for p in kept)


def test_ties_go_to_the_lowest_position() -> None:
    assert select([2.0] * 6, 6, 3) == [0, 1, 2]
    assert select([1.0, 3.0, 1.0, 3.0, 1.0], 5, 4) == [1, 3, 0, 2]
    assert select([0.0] * 6, 2, 3) == [0, 1, -1]


def test_minus_zero_equals_zero() -> None:
    assert select([-0.0, 0.0, -0.0, 0.0], 4, 3) == [0, 1, 2]
    assert select([-1.0, -0.0, 0.0, 1e-45], 4, 4) == [3, 1, 2, 0]


def test_minus_infinity_is_a_score_like_any_other() -> None:
    """A21: padding must not beat a real entry, however low."""
    assert select([-INF] * 5, 5, 3) == [0, 1, 2]
    assert select([-INF, -INF, 1.0], 2, 3) == [0, 1, -1]
    assert select([-INF, -3e38, INF, 3e38], 4, 4) == [2, 3, 1, 0]


def test_nan_selects_visible_entries_only() -> None:
    assert select([NAN] * 4, 2, 3) == [0, 1, -1]
    picks = select([1.0, NAN, 2.0, 0.5], 3, 3)
    assert sorted(picks) == [0, 1, 2]
    negative = math.copysign(NAN, -1.0)
    assert sorted(select([1.0, negative, 2.0], 3, 3)) == [0, 1, 2]


def test_more_places_than_entries_exist() -> None:
    assert select([1.0, 2.0], 2, 5) == [1, 0]
    assert select_topk(torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64), 4).shape == (3, 0)


def test_neighbouring_floats_keep_their_order() -> None:
    """No precision is lost where score and position share an integer."""
    values = torch.tensor([1.0]).repeat(64)
    for i in range(1, 64):
        values[i] = torch.nextafter(values[i - 1], torch.tensor(2.0))
    order = torch.randperm(64)
    chosen = select_topk(values[order][None], torch.tensor([64]), 64)[0]
    assert order[chosen].tolist() == list(range(63, -1, -1))
    below = -values
    chosen = select_topk(below[order][None], torch.tensor([64]), 64)[0]
    assert order[chosen].tolist() == list(range(64))
