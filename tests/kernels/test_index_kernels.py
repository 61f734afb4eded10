"""Indexer kernels: scores against float64, and the selection at every edge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.test_quantised_kernels import half
from tests.support.kernel_error import assert_as_exact
from tests.support.pools import filled_pool, random_slots
from v4graph.ops.custom.index import paged_index_scores, select_rows
from v4graph_kernels import load

PAGES, PAGE_ROWS = 9, 8
ROWS = PAGES * PAGE_ROWS
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("row_format", ["f32", "bf16", "fp8"])
@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (20, 128)])
def test_scores_are_as_exact_as_the_reference(
    device: str, row_format: str, heads: int, dim: int
) -> None:
    q, weights = torch.randn(4, heads, dim + 8)[..., :dim], torch.randn(4, heads)
    pool = filled_pool(row_format, PAGES, PAGE_ROWS, dim)
    slots = random_slots(4, 70, [0, 1, 60, 33], PAGE_ROWS, ROWS)
    args = (q, pool.data, slots, weights)
    moved = (a.to(device) for a in args)
    got = load("index_scores").index_scores(*moved, page_rows=PAGE_ROWS).cpu()
    expected = paged_index_scores(*args, page_rows=PAGE_ROWS)
    listed = slots >= 0
    assert (got[~listed] == -INF).all()
    assert (expected[~listed] == -INF).all()
    keys = pool.values[slots.clamp_min(PAGE_ROWS)]
    products = torch.einsum("the,tce->thc", q.double(), keys).relu()
    exact = torch.einsum("thc,th->tc", products, weights.double())
    assert_as_exact(got[listed], expected[listed], exact[listed], factor=3.0)


@pytest.mark.parametrize("outside", [ROWS, 2**40, -(2**40)])
def test_ids_outside_the_pool_score_nothing(device: str, outside: int) -> None:
    q, weights, pool = torch.randn(2, 3, 16), torch.rand(2, 3), filled_pool("fp8", 9, 8, 16)
    slots = torch.full((2, 70), outside)
    slots[0, 5] = 12
    args = (a.to(device) for a in (q, pool.data, slots, weights))
    got = load("index_scores").index_scores(*args, page_rows=PAGE_ROWS).cpu()
    assert got[0, 5].isfinite()
    got[0, 5] = -INF
    assert (got == -INF).all()


def test_a_nan_key_shows(device: str) -> None:
    pool = filled_pool("f32", PAGES, PAGE_ROWS, 16)
    pool.data[20] = NAN
    slots = torch.tensor([[19, 20]])
    args = (a.to(device) for a in (torch.randn(1, 3, 16), pool.data, slots, torch.ones(1, 3)))
    got = load("index_scores").index_scores(*args, page_rows=PAGE_ROWS).cpu()
    assert got.isnan().tolist() == [[False, True]]


def request_lists(lengths: list[int], width: int) -> Tensor:
    """Lists of the tokens of several requests, each token seeing one row more than the last."""
    out = []
    for n in lengths:
        own = PAGE_ROWS + torch.randperm(ROWS - PAGE_ROWS)[:width]
        out += [torch.where(torch.arange(width) < i, own, -1) for i in range(n)]
    return torch.stack(out)


@pytest.mark.parametrize("row_format", ["f32", "bf16", "fp8"])
def test_many_tokens_are_scored_as_each_alone(
    device: str, row_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one request, blocks that straddle two, a padded token and a last block cut off."""
    module = load("index_scores")
    q, weights = torch.randn(53, 20, 32).to(half(device)), torch.randn(53, 20)
    pool = filled_pool(row_format, PAGES, PAGE_ROWS, 32)
    slots = request_lists([36, 7, 10], 40)
    slots[9] = -1
    args = (q, pool.data, slots, weights)
    moved = [a.to(device) for a in args]
    alone = module.index_scores(*moved, page_rows=PAGE_ROWS).cpu()
    monkeypatch.setattr(module, "MANY_TOKENS", 1)
    kernel, called = module._many_scores_kernel, []

    class Counted:
        def __getitem__(self, grid: object) -> object:
            called.append(1)
            return kernel[grid]

    monkeypatch.setattr(module, "_many_scores_kernel", Counted())
    got = module.index_scores(*moved, page_rows=PAGE_ROWS).cpu()
    assert called == [1]
    listed = slots >= 0
    assert (got[~listed] == -INF).all()
    keys = pool.values[slots.clamp_min(PAGE_ROWS)]
    products = torch.einsum("the,tce->thc", q.double(), keys).relu()
    exact = torch.einsum("thc,th->tc", products, weights.double())
    assert_as_exact(got[listed], alone[listed], exact[listed])


@pytest.mark.parametrize("outside", [ROWS, 2**40, -(2**40)])
def test_many_tokens_follow_no_id_outside_the_pool(
    device: str, outside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such an id is no row of the block either: the other tokens' keys count."""
    monkeypatch.setattr(load("index_scores"), "MANY_TOKENS", 1)
    q, weights = torch.randn(20, 3, 16).to(half(device)), torch.rand(20, 3)
    pool = filled_pool("fp8", PAGES, PAGE_ROWS, 16)
    slots = request_lists([20], 30)
    marked = torch.where(slots < 0, outside, slots)
    got, expected = (
        load("index_scores")
        .index_scores(*(a.to(device) for a in (q, pool.data, s, weights)), page_rows=PAGE_ROWS)
        .cpu()
        for s in (marked, slots)
    )
    assert torch.equal(got, expected)
    assert (got[slots >= 0] > -INF).all()


def test_a_nan_key_shows_in_the_tokens_that_list_it(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("index_scores"), "MANY_TOKENS", 1)
    pool = filled_pool("f32", PAGES, PAGE_ROWS, 16)
    pool.data[20] = NAN
    slots = torch.tensor([[19, -1]] * 5 + [[19, 20]] * 12)
    q = torch.randn(17, 3, 16).to(half(device))
    args = (a.to(device) for a in (q, pool.data, slots, torch.ones(17, 3)))
    got = load("index_scores").index_scores(*args, page_rows=PAGE_ROWS).cpu()
    assert torch.equal(got.isnan(), slots == 20)


def select(device: str, scores: Tensor, entries: Tensor, topk: int, slots: Tensor | None) -> Tensor:
    args = (a if a is None else a.to(device) for a in (scores, entries, slots))
    return load("topk").select_rows(*args, topk=topk).cpu()


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a thousand entries are cut into parts."""
    module = load("topk")
    monkeypatch.setattr(module, "BLOCK", 256)
    monkeypatch.setattr(module, "PART_ENTRIES", 256)


@pytest.mark.parametrize("width", [1, 7, 8, 9, 130])
@pytest.mark.parametrize("ties", [False, True])
def test_selection_equals_the_reference(device: str, width: int, ties: bool) -> None:
    scores = torch.randn(6, width)
    if ties:
        scores = scores.round()
    entries = torch.tensor([0, 1, width // 2, width - 1, width, width])
    for t, n in enumerate(entries):
        scores[t, n:] = 1e9  # invisible
    for slots in (None, torch.randint(1, 2**40, (6, width))):
        expected = select_rows(scores, entries, slots, topk=8)
        assert torch.equal(select(device, scores, entries, 8, slots), expected)


@pytest.mark.parametrize("entries", [0, 5, 512, 1200])
def test_long_rows_are_cut_and_joined(device: str, short_parts: None, entries: int) -> None:
    scores = (torch.randn(3, 1200) * 2).round()
    count = torch.tensor([entries, 1200, entries // 2])
    slots = torch.randint(1, 2**40, (3, 1200))
    expected = select_rows(scores, count, slots, topk=7)
    assert torch.equal(select(device, scores, count, 7, slots), expected)


def test_ties_go_to_the_lowest_position(device: str, short_parts: None) -> None:
    scores = torch.zeros(1, 1200)
    scores[0, 1150] = 1.0
    assert select(device, scores, torch.tensor([1200]), 4, None).tolist() == [[0, 1, 2, 1150]]


def test_special_values_order_as_numbers(device: str) -> None:
    scores = torch.tensor([[-INF, -1.0, -0.0, 0.0, 1e-45, -1e-45, INF, 3e38]])
    for k in range(1, 9):
        expected = select_rows(scores, torch.tensor([8]), None, topk=k)
        assert torch.equal(select(device, scores, torch.tensor([8]), k, None), expected)


def test_more_entries_than_the_row_holds_are_ignored(device: str) -> None:
    scores = torch.randn(2, 10)
    got = select(device, scores, torch.tensor([2**40, 10]), 10, None)
    assert got.tolist() == [list(range(10))] * 2


def test_other_score_dtypes_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"scores: torch.float64, expected float32"):
        select(device, torch.randn(2, 10).double(), torch.tensor([1, 1]), 2, None)


@pytest.mark.parametrize("row_format", ["bf16", "fp8"])
def test_operators_are_registered_soundly(row_format: str) -> None:
    pool = filled_pool(row_format, PAGES, PAGE_ROWS, 16)
    slots = random_slots(3, 20, [0, 4, 20], PAGE_ROWS, ROWS)
    args = (torch.randn(3, 2, 16), pool.data, slots, torch.randn(3, 2))
    torch.library.opcheck(paged_index_scores, args, {"page_rows": PAGE_ROWS})
    counts = torch.tensor([0, 4, 20])
    for listed in (None, slots):
        torch.library.opcheck(select_rows, (torch.randn(3, 20), counts, listed), {"topk": 6})
