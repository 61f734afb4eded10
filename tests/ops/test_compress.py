"""Compressor pooling, and writing rows into a pool."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from v4graph.model.rope import inverse_frequencies
from v4graph.ops.cache import write_rows
from v4graph.ops.compress import pool_windows, state_rows
from v4graph.ops.rope import cos_sin, rotate
from v4graph.spec.model import Rope

DIM, RATIO, EPS = 8, 4, 1e-6


def exact_pool(rows: Tensor, visible: Tensor, overlap: bool) -> Tensor:
    """The pooled row of one window `[span, 2 * width]`, float64, by the report's formula."""
    width = rows.shape[1] // 2
    kv, score = rows[:, :width].double(), rows[:, width:].double()
    taken_kv, taken_score = [], []
    for i in range(rows.shape[0]):
        if not bool(visible[i]):
            continue
        # The previous window gives its first half (Ca), the closing one its second (Cb).
        half = slice(0, DIM) if i < rows.shape[0] // 2 else slice(DIM, 2 * DIM)
        part = half if overlap else slice(0, DIM)
        taken_kv.append(kv[i, part])
        taken_score.append(score[i, part])
    weights = torch.stack(taken_score).softmax(0)
    return (weights * torch.stack(taken_kv)).sum(0)


def pool(rows: Tensor, visible: Tensor, overlap: bool, start: Tensor, norm: Tensor) -> Tensor:
    cos, sin = cos_sin(start, inverse_frequencies(Rope(theta=160000, dim=4)))
    return pool_windows(
        rows, visible, norm, cos, sin, overlap=overlap, norm_eps=EPS, dtype=torch.float32
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_windows_equal_float64(overlap: bool) -> None:
    halves = 2 if overlap else 1
    span, width = RATIO * halves, DIM * halves
    rows = torch.randn(5, span, 2 * width) * 3
    visible = torch.ones(5, span, dtype=torch.bool)
    start, norm = torch.tensor([0, 4, 8, 1000, 65536]), 1 + 0.1 * torch.randn(DIM)
    if overlap:  # window 0 has no previous one; its rows there are whatever the null row holds
        visible[0, :RATIO] = False
        rows[0, :RATIO] = float("nan")
    ours = pool(rows, visible, overlap, start, norm)
    cos, sin = cos_sin(start, inverse_frequencies(Rope(theta=160000, dim=4)))
    for c in range(5):
        pooled = exact_pool(rows[c], visible[c], overlap)
        pooled = pooled / (pooled.square().mean() + EPS).sqrt() * norm.double()
        expected = rotate(pooled.float(), cos[c], sin[c])
        torch.testing.assert_close(ours[c], expected, rtol=1e-4, atol=1e-5)


def test_the_first_window_differs_from_one_after_zeros() -> None:
    """B8: pooling zero rows as if they were tokens is another model."""
    rows = torch.randn(1, 2 * RATIO, 4 * DIM)
    rows[:, :RATIO] = 0
    start, norm = torch.tensor([0]), torch.ones(DIM)
    seen = torch.ones(1, 2 * RATIO, dtype=torch.bool)
    first = seen.clone()
    first[:, :RATIO] = False
    assert not torch.allclose(
        pool(rows, seen, True, start, norm), pool(rows, first, True, start, norm), atol=1e-3
    )


def test_the_two_halves_are_not_exchanged() -> None:
    rows = torch.randn(1, 2 * RATIO, 4 * DIM)
    swapped = torch.cat((rows[:, RATIO:], rows[:, :RATIO]), dim=1)
    seen, start = torch.ones(1, 2 * RATIO, dtype=torch.bool), torch.tensor([4])
    a, b = (pool(r, seen, True, start, torch.ones(DIM)) for r in (rows, swapped))
    assert not torch.allclose(a, b, atol=1e-2)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_invisible_window_is_finite(overlap: bool) -> None:
    """Padding closes no window, yet its row is computed: it must not become NaN."""
    halves = 2 if overlap else 1
    rows = torch.full((2, RATIO * halves, 2 * DIM * halves), float("nan"))
    visible = torch.zeros(2, RATIO * halves, dtype=torch.bool)
    out = pool(rows, visible, overlap, torch.tensor([0, 0]), torch.ones(DIM))
    assert out.isfinite().all()


def test_very_low_scores_still_pool_the_visible_rows() -> None:
    rows = torch.randn(1, RATIO, 2 * DIM)
    rows[..., DIM:] -= 1e30
    seen = torch.ones(1, RATIO, dtype=torch.bool)
    out = pool(rows, seen, False, torch.tensor([0]), torch.ones(DIM))
    assert out.isfinite().all()
    assert out.abs().max() > 0.1


def test_state_rows_add_the_position_of_the_token_in_its_window() -> None:
    kv, score, ape = torch.randn(6, DIM), torch.randn(6, DIM), torch.randn(RATIO, DIM)
    positions = torch.tensor([0, 3, 4, 7, 1001, 65535])
    rows = state_rows(kv, score, ape, positions)
    for t, place in enumerate((0, 3, 0, 3, 1, 3)):
        assert torch.equal(rows[t], torch.cat((kv[t], score[t] + ape[place])))


def test_padding_and_real_rows_in_one_write() -> None:
    """B1: several padded rows share row 0; nothing else changes."""
    before = torch.randn(10, 3)
    pool_, rows = before.clone(), torch.randn(6, 3)
    write_rows(pool_, torch.tensor([0, 4, 0, 9, 0, 1]), rows)
    for slot, row in ((4, 1), (9, 3), (1, 5)):
        assert torch.equal(pool_[slot], rows[row])
    untouched = [2, 3, 5, 6, 7, 8]
    assert torch.equal(pool_[untouched], before[untouched])


def test_write_casts_to_the_pool_and_changes_it_in_place() -> None:
    pool_ = torch.zeros(4, 2, dtype=torch.bfloat16)
    address = pool_.data_ptr()
    write_rows(pool_, torch.tensor([2]), torch.tensor([[1.00390625, 2.0]]))
    assert pool_.data_ptr() == address
    assert pool_[2].tolist() == [1.0, 2.0]
    write_rows(pool_, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2))
    assert pool_[[0, 1, 3]].abs().sum() == 0


def test_write_to_a_row_outside_the_pool_is_refused() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        write_rows(torch.zeros(4, 2), torch.tensor([4]), torch.zeros(1, 2))
