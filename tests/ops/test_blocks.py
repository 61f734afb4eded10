"""Blocks of neighbouring tokens against the same tokens one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from v4graph.ops.attention import gather_rows, paged_attention
from v4graph.ops.blocks import BLOCK_TOKENS, block_attention, block_index_scores, token_blocks
from v4graph.ops.indexer import index_scores

HEADS, DIM, WINDOW, RATIO, ENTRIES = 4, 16, 8, 4, 40
SCALE = DIM**-0.5


class Step:
    """Requests as (first position, tokens; padding behind them); rows never listed hold NaN."""

    def __init__(self, requests: list[tuple[int, int, int]]) -> None:
        self.num_requests = len(requests)
        near, far = [], []
        base = 1
        for first, count, padding in requests:
            for p in range(first, first + count):
                near.append([base + i if i >= 0 else -1 for i in range(p - WINDOW + 1, p + 1)])
                far.append([base + i if i < (p + 1) // RATIO else -1 for i in range(ENTRIES)])
            near += [[-1] * WINDOW] * padding
            far += [[-1] * ENTRIES] * padding
            base += first + count  # so that neighbouring requests have neighbouring rows
        self.near, self.far = torch.tensor(near), torch.tensor(far)
        self.window, self.rows = self._pool(self.near, base), self._pool(self.far, base)
        self.q = torch.randn(len(near), HEADS, DIM)
        self.sink = torch.randn(HEADS)
        self.blocks = token_blocks(self.near, self.num_requests)

    def _pool(self, listed: Tensor, size: int) -> Tensor:
        rows = torch.full((size, DIM), float("nan"))
        used = listed[listed >= 0].unique()
        rows[used] = torch.randn(len(used), DIM)
        return rows


STEPS = [
    [(0, 1, 0)],
    [(0, BLOCK_TOKENS - 1, 1)],
    [(5, BLOCK_TOKENS, 0)],
    [(0, BLOCK_TOKENS + 1, 3)],
    [(0, 100, 0), (3, 1, 0), (0, 31, 0), (40, 70, 0)],
    [(9, 4, 28), (0, 2, 30), (0, 0, 32), (100, 32, 0)],
    [(0, 0, 40), (17, 5, 0)],
]


@pytest.mark.parametrize("requests", STEPS)
def test_every_token_has_a_place_of_its_own(requests: list[tuple[int, int, int]]) -> None:
    step = Step(requests)
    token, is_used, place = step.blocks
    valid = step.near[:, -1] >= 0
    assert int(is_used.sum()) == int(valid.sum())
    assert torch.equal(token.flatten()[place[valid]], valid.nonzero()[:, 0])


@pytest.mark.parametrize("requests", STEPS)
@pytest.mark.parametrize("kind", ["window", "all", "chosen"])
def test_blocks_equal_single_tokens(requests: list[tuple[int, int, int]], kind: str) -> None:
    step = Step(requests)
    rows, far = (None, None) if kind == "window" else (step.rows, step.far)
    chosen = torch.rand(step.far.shape) < 0.5 if kind == "chosen" else None
    listed = far if far is None or chosen is None else torch.where(chosen, far, -1)
    expected = paged_attention(step.q, step.window, step.near, rows, listed, step.sink, SCALE)
    got = block_attention(
        step.q, step.window, step.near, rows, far, chosen, step.sink, SCALE, step.blocks
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("requests", STEPS)
def test_index_scores_of_visible_rows(requests: list[tuple[int, int, int]]) -> None:
    step = Step(requests)
    weights = torch.randn(len(step.q), HEADS)
    expected = index_scores(step.q, gather_rows(step.rows, step.far), weights)
    got = block_index_scores(step.q, step.rows, step.far, weights, step.blocks)
    visible = step.far >= 0
    torch.testing.assert_close(got[visible], expected[visible], rtol=1e-4, atol=1e-5)


def test_bfloat16_stays_close() -> None:
    step = Step(STEPS[4])
    args = (step.near, step.rows.bfloat16(), step.far)
    window, sink = step.window.bfloat16(), step.sink
    got = block_attention(step.q.bfloat16(), window, *args, None, sink, SCALE, step.blocks)
    expected = paged_attention(step.q.bfloat16(), window, *args, sink, SCALE)
    torch.testing.assert_close(got, expected, rtol=3e-2, atol=3e-2)
