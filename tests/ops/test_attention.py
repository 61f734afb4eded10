"""Paged attention against a dense float64 softmax with a sink; what is not listed never counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from v4graph.ops.attention import gather_rows, paged_attention

HEADS, DIM, ROWS = 4, 16, 40
SCALE = DIM**-0.5


def pool(fill: float = float("nan")) -> Tensor:
    """Rows of a pool whose null row holds `fill`."""
    rows = torch.randn(ROWS, DIM)
    rows[0] = fill
    return rows


def lists(tokens: int, width: int, counts: list[int]) -> Tensor:
    """Slot lists with `counts` random rows each, -1 scattered between them."""
    out = torch.full((tokens, width), -1)
    for t, n in enumerate(counts):
        places = torch.randperm(width)[:n]
        out[t, places] = 1 + torch.randperm(ROWS - 1)[:n]
    return out


def dense(q: Tensor, sources: list[tuple[Tensor, Tensor]], sink: Tensor) -> Tensor:
    """One softmax a token and head, in float64; the sink has no value."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        keys = torch.cat([rows[slots[t][slots[t] >= 0]] for rows, slots in sources]).double()
        for h in range(q.shape[1]):
            scores = torch.cat((keys @ q[t, h].double() * SCALE, sink[h].double()[None]))
            out[t, h] = scores.softmax(0)[:-1] @ keys
    return out


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_equals_the_dense_softmax(compressed: bool, size: float) -> None:
    q, sink = torch.randn(6, HEADS, DIM) * size, torch.randn(HEADS) * 3
    window, rows = pool(), pool()
    slots = lists(6, 12, [0, 1, 12, 5, 0, 3])
    listed = lists(6, 9, [0, 0, 9, 1, 4, 2]) if compressed else None
    ours = paged_attention(q, window, slots, rows if compressed else None, listed, sink, SCALE)
    sources = [(window, slots)] + ([(rows, listed)] if listed is not None else [])
    torch.testing.assert_close(ours.double(), dense(q, sources, sink), rtol=1e-4, atol=1e-5)


def test_a_token_without_rows_gets_zero() -> None:
    """D6: a padded row must not divide by zero."""
    q, none = torch.randn(3, HEADS, DIM), torch.full((3, 5), -1)
    out = paged_attention(q, pool(), none, pool(), none, torch.randn(HEADS), SCALE)
    assert torch.equal(out, torch.zeros_like(q))
    minus = torch.full((HEADS,), float("-inf"))
    alone = paged_attention(q, pool(), none + 2, None, None, minus, SCALE)
    assert alone.isfinite().all()  # no sink at all: an ordinary softmax


def test_unlisted_rows_and_the_null_row_never_leak() -> None:
    q, sink = torch.randn(2, HEADS, DIM), torch.zeros(HEADS)
    slots = torch.tensor([[3, -1, 7], [-1, -1, 9]])
    clean, dirty = pool(0.0), pool()
    dirty[1:] = float("nan")
    for row in (3, 7, 9):
        dirty[row] = clean[row]
    for listed in (None, slots):
        rows = None if listed is None else clean
        expected = paged_attention(q, clean, slots, rows, listed, sink, SCALE)
        rows = None if listed is None else dirty
        got = paged_attention(q, dirty, slots, rows, listed, sink, SCALE)
        assert torch.equal(got, expected)


def test_a_listed_row_of_nan_does_show() -> None:
    """The counterpart: poisoning would be useless if a read of it went unnoticed."""
    rows = pool()
    rows[5] = float("nan")
    out = paged_attention(
        torch.randn(1, HEADS, DIM), rows, torch.tensor([[4, 5]]), None, None, torch.zeros(4), SCALE
    )
    assert out.isnan().all()


def test_order_of_the_list_does_not_matter() -> None:
    q, rows, sink = torch.randn(1, HEADS, DIM), pool(), torch.randn(HEADS)
    slots = torch.tensor([[4, -1, 11, 30, 2]])
    expected = paged_attention(q, rows, slots, None, None, sink, SCALE)
    for _ in range(5):
        shuffled = slots[:, torch.randperm(5)]
        got = paged_attention(q, rows, shuffled, None, None, sink, SCALE)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_a_large_sink_drains_everything() -> None:
    q, rows = torch.randn(1, HEADS, DIM), pool()
    sink = torch.tensor([1e4, -1e4, 0.0, 0.0])
    out = paged_attention(q, rows, torch.tensor([[3, 4]]), None, None, sink, SCALE)
    assert not out[0, 0].any()
    weights = (rows[[3, 4]] @ q[0, 1] * SCALE).softmax(0)
    torch.testing.assert_close(out[0, 1], weights @ rows[[3, 4]], rtol=1e-5, atol=1e-6)


def test_bfloat16() -> None:
    q, window, sink = torch.randn(5, HEADS, DIM), pool(0.0), torch.randn(HEADS)
    slots = lists(5, 8, [1, 2, 8, 4, 0])
    out = paged_attention(q.bfloat16(), window.bfloat16(), slots, None, None, sink, SCALE)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(
        out.double(), dense(q, [(window, slots)], sink), rtol=5e-2, atol=3e-2
    )


@pytest.mark.parametrize("shape", [(3,), (2, 5), (2, 0)])
def test_gathered_rows(shape: tuple[int, ...]) -> None:
    rows = pool()
    slots = torch.randint(-1, ROWS, shape)
    slots[slots == 0] = -1
    got = gather_rows(rows, slots)
    assert got.shape == (*shape, DIM)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in shape)).reshape(-1, len(shape)):
        slot = int(slots[tuple(place)])
        expected = rows[slot] if slot >= 0 else torch.zeros(DIM)
        assert torch.equal(got[tuple(place)], expected)
