"""Products of many tokens with stored weights: tiles, sorted pairs, and both paths alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.test_quantised_kernels import (
    exact_experts,
    experts,
    fp8_weight,
    half,
    linear,
    run_experts,
)
from tests.support.kernel_error import assert_as_exact, relative_error
from v4graph.ops.custom import quantised as ops
from v4graph.ops.quantised import fp8_values
from v4graph_kernels import load

SCALES = ["e8m0", "f32"]


@pytest.mark.parametrize("scale_format", SCALES)
def test_fp8_linear_of_many_tokens(device: str, scale_format: str) -> None:
    """Sides that no tile divides."""
    x = torch.randn(277, 308).to(half(device))[:, :300]
    weight, scale = fp8_weight(200, 300, scale_format)
    exact = x.double() @ fp8_values(weight, scale).double().T
    got = linear(device, x, weight, scale)
    assert_as_exact(got, ops.fp8_linear(x, weight, scale), exact)


@pytest.mark.parametrize("scale_format", SCALES)
@pytest.mark.parametrize("tokens", [1, 130])
def test_scales_in_the_weight_and_in_the_sum(device: str, scale_format: str, tokens: int) -> None:
    """e8m0 scales multiply the decoded weight, float32 ones the sum: neither rounds a scale."""
    # The interpreter multiplies bf16 wrongly, and float16 weights take no scale.
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(tokens, 2, 260).to(dtype)
    weight, scale = fp8_weight(256, 260, scale_format)
    values = fp8_values(weight, scale).double().unflatten(0, (2, 128))
    exact = torch.einsum("mgi,goi->mgo", x.double(), values)
    out = torch.full((tokens, 2, 128), float("nan"), dtype=dtype, device=device)
    stored = scale.view(torch.uint8) if scale_format == "e8m0" else scale
    tensors = (t.to(device) for t in (x, weight, stored))
    load("fp8_gemm").fp8_gemm(*tensors, scale_format == "e8m0", out)
    assert_as_exact(out.cpu(), ops.grouped_fp8_linear(x, weight, scale), exact)


def test_grouped_fp8_linear_of_many_tokens(device: str) -> None:
    x = torch.randn(260, 2, 200).to(half(device))
    weight, scale = fp8_weight(512, 200, "e8m0")
    values = fp8_values(weight, scale).double().unflatten(0, (2, 256))
    exact = torch.einsum("mgi,goi->mgo", x.double(), values)
    got = linear(device, x, weight, scale, name="grouped_fp8_linear")
    assert_as_exact(got, ops.grouped_fp8_linear(x, weight, scale), exact)


def test_a_token_does_not_depend_on_its_neighbours(device: str) -> None:
    x = torch.randn(300, 256).to(half(device))
    weight, scale = fp8_weight(128, 256, "e8m0")
    clean = linear(device, x, weight, scale)
    x[1:] = float("nan")
    got = linear(device, x, weight, scale)
    assert torch.equal(got[0], clean[0])
    assert got[1:].isnan().all()


def expected_tiles(chosen: list[int], num_experts: int, places: int) -> list[tuple[int, list[int]]]:
    """(expert, pairs) of every tile that holds some."""
    out = []
    for e in range(num_experts):
        own = [p for p, c in enumerate(chosen) if c == e]
        out += [(e, own[i : i + places]) for i in range(0, len(own), places)]
    return out


@pytest.mark.parametrize(
    "chosen",
    [
        [3, 0, -1, 3, 3, 9, 0, 3, 3, 2**40, 5],
        [6] * 9,
        [-1] * 5,
        [0, 1, 2, 3, 4, 5, 6],
        [4],
        list(range(7)) * 700,
    ],
    ids=["mixed", "one expert", "padding", "each once", "one pair", "several scans"],
)
def test_pairs_are_sorted_into_tiles(device: str, chosen: list[int]) -> None:
    pair, expert = load("expert_tiles").expert_tiles(torch.tensor(chosen, device=device), 7, 4)
    tiles = expected_tiles(chosen, 7, 4)
    used = len(tiles)
    assert expert.tolist() == [e for e, _ in tiles] + [-1] * (len(expert) - used)
    assert pair[:used].tolist() == [own + [-1] * (4 - len(own)) for _, own in tiles]
    assert (pair[used:] == -1).all()


def test_the_worst_routing_fills_every_tile(device: str) -> None:
    """As many tiles as the shapes allow for, and no more."""
    chosen = [0] * 13 + [1, 2, 3, 4, 5, 6]
    _, expert = load("expert_tiles").expert_tiles(torch.tensor(chosen, device=device), 7, 4)
    assert (expert >= 0).all()


def sorted_experts(
    device: str, args: list[Tensor], clamp: float | None, monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """`fp4_experts` by the kernels of many pairs, whatever their number."""
    monkeypatch.setattr(load("expert_tiles"), "FEW_PAIRS", 0)
    monkeypatch.setattr(load("fp4_grouped"), "places_for", lambda pairs, experts: 32)
    return run_experts(device, args, clamp)


@pytest.mark.parametrize("scale_format", ["e8m0", "u8", "f32"])
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_sorted_fp4_experts(
    device: str, scale_format: str, clamp: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding and choices that do not exist, experts of more and of fewer pairs than a tile."""
    args = experts(40, 2, 96, 160, scale_format)
    args[2][3, 1] = -1
    args[2][5] = -1
    args[2][10:34, 0], args[2][10:34, 1] = 1, 4
    got = sorted_experts(device, args, clamp, monkeypatch)
    assert_as_exact(got, ops.fp4_experts(*args, clamp), exact_experts(args, clamp), factor=3.0)
    assert not got[5].any()


def test_sorted_experts_in_half_precision(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = experts(20, 2, 64, 64, "e8m0")
    args[0] = (args[0] / 8).to(half(device))
    got = sorted_experts(device, args, 10.0, monkeypatch)
    assert_as_exact(got, ops.fp4_experts(*args, 10.0), exact_experts(args, 10.0))


def test_sorted_experts_read_touched_ones_only(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of NaN in all others, weights of NaN at choices that do not exist."""
    args = experts(20, 2, 64, 32, "u8")
    args[2][7, 1], args[2][9, 0], args[2][11] = -1, 2**40, -1
    args[1][7, 1] = args[1][9, 0] = float("nan")
    args[0][11] = float("nan")
    for e in set(range(7)) - set(args[2].flatten().tolist()):
        args[4][e], args[6][e] = 255, 255
    got = sorted_experts(device, args, 10.0, monkeypatch)
    assert got.isfinite().all()
    assert not got[11].any()
    clean = [a.clone() for a in args]
    clean[0][11], clean[2][9, 0] = 0.0, -1
    clean[1][7, 1] = clean[1][9, 0] = 0.0
    assert relative_error(got, exact_experts(clean, 10.0)) < 1e-5


def test_a_nan_weight_shows_in_its_expert(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = experts(20, 1, 64, 32, "u8")
    args[4][2, 5] = 255
    got = sorted_experts(device, args, 10.0, monkeypatch)
    touched = args[2][:, 0] == 2
    assert touched.any()
    assert got[touched].isnan().all()
    assert got[~touched].isfinite().all()


@pytest.mark.parametrize("byte", [155, 254, 255])
def test_scales_that_cannot_be_told_show(device: str, byte: int) -> None:
    """In bf16 a GPU decodes two weights at once: NaN and scales beyond its range are NaN, which
    no clamp hides. Elsewhere large scales are exact."""
    if device == "cpu":
        pytest.skip("the interpreter multiplies bf16 wrongly")
    args = experts(20, 1, 64, 32, "u8")
    args[0] = args[0].bfloat16()
    args[4][2, 5] = byte
    got = run_experts(device, args, 10.0)
    touched = args[2][:, 0] == 2
    assert touched.any()
    assert got[touched].isnan().all()
    assert got[~touched].isfinite().all()


@pytest.mark.parametrize(("tokens", "places"), [(1, 16), (128, 16), (1024, 32), (8192, 128)])
def test_tiles_suit_the_pairs_of_an_expert(tokens: int, places: int) -> None:
    assert load("fp4_grouped").places_for(6 * tokens, 256) == places
