"""Sparse paged attention against a dense float64 softmax with a sink."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.kernel_error import assert_as_exact
from tests.support.pools import FORMATS, Pool, filled_pool, random_slots
from v4graph.ops.custom.attention import sparse_attention
from v4graph_kernels import load

PAGES, PAGE_ROWS = 6, 8
ROWS = PAGES * PAGE_ROWS


def dense(q: Tensor, sources: list[tuple[Pool, Tensor]], sink: Tensor, scale: float) -> Tensor:
    """One softmax a token and head in float64; the sink has no value."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        keys = torch.cat([p.values[slots[t][slots[t] >= 0]] for p, slots in sources])
        for h in range(q.shape[1]):
            scores = torch.cat((keys @ q[t, h].double() * scale, sink[h].double()[None]))
            out[t, h] = scores.softmax(0)[:-1] @ keys
    return out


class Case:
    """Queries, two pools with lists, and the three answers."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        row_format: str = "f32",
        heads: int = 3,
        dim: int = 32,
        counts: tuple[list[int], list[int] | None] = ([0, 1, 12, 5, 0, 3], [0, 0, 9, 1, 4, 2]),
        widths: tuple[int, int] = (12, 9),
        size: float = 1.0,
    ) -> None:
        T, self.rope = len(counts[0]), dim // 4
        # A slice of a wider product, as the projection leaves it.
        self.q = (torch.randn(T, heads, dim + 8) * size).to(dtype)[..., :dim]
        self.sink, self.scale = torch.randn(heads) * 3, dim**-0.5
        self.window = filled_pool(row_format, PAGES, PAGE_ROWS, dim, self.rope)
        self.near = random_slots(T, widths[0], counts[0], PAGE_ROWS, ROWS)
        self.rows, self.far = None, None
        if counts[1] is not None:
            self.rows = filled_pool(row_format, PAGES, PAGE_ROWS, dim, self.rope)
            self.far = random_slots(T, widths[1], counts[1], PAGE_ROWS, ROWS)

    def arguments(self, device: str) -> tuple:
        rows = None if self.rows is None else self.rows.data
        args = (self.q, self.window.data, self.near, rows, self.far, self.sink)
        return (*(a if a is None else a.to(device) for a in args), self.scale)

    def layout(self) -> dict[str, int]:
        return {
            "rope_dim": self.rope,
            "window_page_rows": PAGE_ROWS,
            "compressed_page_rows": PAGE_ROWS,
        }

    def kernel(self, device: str, num_parts: int = 0) -> Tensor:
        launch = load("paged_attention").sparse_attention
        return launch(*self.arguments(device), **self.layout(), num_parts=num_parts).cpu()

    def reference(self) -> Tensor:
        return sparse_attention(*self.arguments("cpu"), **self.layout())

    def exact(self) -> Tensor:
        sources = [(self.window, self.near)]
        if self.rows is not None:
            sources.append((self.rows, self.far))
        return dense(self.q, sources, self.sink, self.scale)

    def check(self, device: str, num_parts: int = 0, factor: float = 2.0) -> None:
        got = self.kernel(device, num_parts)
        assert_as_exact(got, self.reference(), self.exact(), factor)


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_as_exact_as_the_reference(device: str, row_format: str, num_parts: int) -> None:
    Case(row_format=row_format).check(device, num_parts)


@pytest.mark.parametrize("row_format", FORMATS)
def test_half_precision(device: str, row_format: str) -> None:
    # The interpreter multiplies bf16 wrongly, so it gets float16.
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    Case(dtype, row_format).check(device, num_parts=2)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_window_only(device: str, num_parts: int) -> None:
    Case(counts=([0, 1, 12, 5], None)).check(device, num_parts)


@pytest.mark.parametrize("row_format", ["f32", "fp8_ds"])
def test_published_shape(device: str, row_format: str) -> None:
    """head_dim 512 with 64 rotated channels' worth of bf16, more heads than one block."""
    case = Case(row_format=row_format, heads=20, dim=512, counts=([3, 0], [4, 0]))
    case.check(device)


def test_scores_that_would_overflow(device: str) -> None:
    Case(size=60.0).check(device, num_parts=2, factor=3.0)


@pytest.mark.parametrize("num_parts", [1, 4])
def test_a_token_without_rows_gets_zero(device: str, num_parts: int) -> None:
    case = Case(counts=([0, 2, 0], [0, 3, 0]))
    case.sink[0] = float("-inf")
    got = case.kernel(device, num_parts)
    assert not got[0].any()
    assert not got[2].any()
    assert got.isfinite().all()


@pytest.mark.parametrize("row_format", FORMATS)
def test_unlisted_rows_are_never_read(device: str, row_format: str) -> None:
    case = Case(row_format=row_format)
    clean = case.kernel(device, 2)
    listed = set(case.near[case.near >= 0].tolist())
    for row in set(range(ROWS)) - listed:
        if row_format == "fp8_ds":
            # bf16 NaN in the rotated channels; the interpreter reads no NaN out of e4m3.
            nope = case.q.shape[2] - case.rope
            page, at = divmod(row, PAGE_ROWS)
            data = nope + 2 * case.rope
            case.window.data[page, at * data + nope : (at + 1) * data] = 0xFF
        else:
            case.window.data[row] = float("nan")
    assert torch.equal(case.kernel(device, 2), clean)
    # The counterpart: a listed row of NaN shows.
    if row_format != "fp8_ds":
        case.window.data[int(case.near[1].max())] = float("nan")
        assert case.kernel(device, 2)[1].isnan().all()


@pytest.mark.parametrize("outside", [ROWS, 2**40, -(2**40)])
def test_ids_outside_the_pool_list_nothing(device: str, outside: int) -> None:
    case = Case(counts=([3, 5], [2, 0]))
    clean = case.kernel(device, 2)
    for slots in (case.near, case.far):
        slots[slots < 0] = outside
    assert torch.equal(case.kernel(device, 2), clean)


def test_parts_beyond_the_lists_are_harmless(device: str) -> None:
    """A static program's lists are as wide as the longest context; most parts are then empty."""
    case = Case(counts=([2, 0], [1, 0]), widths=(12, 700))
    got = case.kernel(device, 40)
    assert_as_exact(got, case.reference(), case.exact())


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_query_tokens_of_one_request_see_what_is_causal(device: str, tokens: int) -> None:
    """Token i sees one row more than token i - 1: the same as each alone."""
    case = Case(counts=([1] * tokens, None))
    case.near = torch.full((tokens, 12), -1)
    for i in range(tokens):
        case.near[i, 12 - 4 - i :] = PAGE_ROWS + torch.arange(4 + i)
    together = case.kernel(device, 2)
    assert_as_exact(together, case.reference(), case.exact())
    for i in range(tokens):
        alone = Case(counts=([1], None))
        alone.q, alone.near = case.q[i : i + 1], case.near[i : i + 1]
        alone.window, alone.sink = case.window, case.sink
        assert torch.equal(alone.kernel(device, 2)[0], together[i])


def test_head_dim_that_is_no_power_of_two_is_refused(device: str) -> None:
    case = Case(dim=48)
    with pytest.raises(ValueError, match="head_dim 48: expected a power of two"):
        case.kernel(device)


def test_pools_of_other_rows_are_refused(device: str) -> None:
    case = Case()
    case.window.data = case.window.data[:, :16]
    with pytest.raises(ValueError, match="window_pool: rows of 16 channels, expected 32"):
        case.kernel(device)


@pytest.mark.parametrize("row_format", ["f32", "fp8_ds"])
def test_operator_is_registered_soundly(row_format: str) -> None:
    case = Case(row_format=row_format)
    torch.library.opcheck(sparse_attention, case.arguments("cpu"), case.layout())
