"""The likeliest token: ties, signs, NaN and rows that no block divides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from v4graph.ops.custom.sampling import greedy_tokens
from v4graph_kernels import load

VOCABULARY = 129_280
NAN, INF = float("nan"), float("inf")
PARTS = [0, 1, 3]


def run(device: str, logits: Tensor, parts: int = 0) -> list[int]:
    got = load("greedy").greedy_tokens(logits.to(device), num_parts=parts)
    assert got.dtype is torch.int64
    return got.tolist()


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("rows", [1, 3])
def test_v4_vocabulary(device: str, rows: int, parts: int) -> None:
    logits = torch.randn(rows, VOCABULARY + 8)[:, :VOCABULARY]
    expected = [max(range(VOCABULARY), key=row.__getitem__) for row in logits.tolist()]
    assert run(device, logits, parts) == expected
    assert greedy_tokens(logits).tolist() == expected


@pytest.mark.parametrize("parts", PARTS)
def test_the_lowest_id_among_equals(device: str, parts: int) -> None:
    """In one lane of a block, in several, in several parts, and everywhere."""
    logits = torch.randn(5, 20_000).clamp_max(1.0)
    for row, ids in enumerate([(100, 4196), (7000, 9, 8), (19_999, 15_000), (0, 19_999)]):
        logits[row, list(ids)] = 2.0
    logits[4] = -3.0
    assert run(device, logits, parts) == [100, 8, 15_000, 0, 0]
    assert greedy_tokens(logits).tolist() == [100, 8, 15_000, 0, 0]


@pytest.mark.parametrize("parts", PARTS)
def test_extreme_values(device: str, parts: int) -> None:
    """Zeros of both signs are equal; infinities and subnormals order; NaN is above all."""
    rows = torch.full((7, 9000), -INF)
    rows[1, 8999] = -3e38
    rows[2, 5:8] = torch.tensor([-0.0, 0.0, -1e-45])
    rows[3, 5:8] = torch.tensor([-1.0, 1e-45, 0.0])
    rows[4, [6, 8000]] = INF
    rows[5] = 1.0
    rows[5, 4] = INF
    rows[5, [8500, 8600]] = NAN
    rows[6, 3] = -NAN
    expected = [0, 8999, 5, 6, 6, 8500, 3]
    assert run(device, rows, parts) == expected
    assert greedy_tokens(rows).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 5, 4097])
def test_short_rows_and_other_dtypes(device: str, dtype: torch.dtype, width: int) -> None:
    logits = torch.randn(6, width).to(dtype)
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert run(device, logits) == expected


def test_no_rows_and_no_logits(device: str) -> None:
    assert run(device, torch.randn(0, 5)) == []
    with pytest.raises(ValueError, match="logits: 0 in a row, expected at least one"):
        run(device, torch.randn(2, 0))


def test_operator_is_registered_soundly() -> None:
    torch.library.opcheck(greedy_tokens, (torch.randn(3, 50),))
