"""Routing and experts against a loop over tokens in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from v4graph.ops.moe import moe_experts, route

HIDDEN, INTER = 12, 10
OPTIONS = {"scoring": "sqrtsoftplus", "norm_topk": True, "scale": 1.5}


def scores_of(logits: Tensor, scoring: str) -> Tensor:
    x = logits.double()
    if scoring == "softmax":
        return x.exp() / x.exp().sum(-1, keepdim=True)
    if scoring == "sigmoid":
        return 1 / (1 + (-x).exp())
    return (1 + x.exp()).log().sqrt()


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_scored_routing(scoring: str, norm_topk: bool, biased: bool) -> None:
    logits = torch.randn(40, 8)
    bias = torch.randn(8) if biased else None
    weights, experts = route(
        logits, bias, None, topk=3, scoring=scoring, norm_topk=norm_topk, scale=2.5
    )
    scores = scores_of(logits, scoring)
    ranked = scores if bias is None else scores + bias.double()
    for t in range(40):
        best = sorted(range(8), key=lambda e: (-ranked[t, e].item(), e))[:3]
        assert experts[t].tolist() == best
        chosen = scores[t, best]  # the bias selects and never weighs
        chosen = chosen / chosen.sum() if norm_topk else chosen
        torch.testing.assert_close(weights[t].double(), 2.5 * chosen, rtol=1e-5, atol=1e-7)


def test_equal_scores_select_the_lowest_ids() -> None:
    weights, experts = route(torch.zeros(2, 6), None, None, topk=4, **OPTIONS)
    assert experts.tolist() == [[0, 1, 2, 3]] * 2
    torch.testing.assert_close(weights, torch.full((2, 4), 1.5 / 4))
    tied = torch.tensor([[1.0, 5.0, 1.0, 5.0, 1.0]])
    assert route(tied, None, None, topk=3, **OPTIONS)[1].tolist() == [[1, 3, 0]]


def test_hash_routing_takes_the_table_and_weighs_by_score() -> None:
    """A12: hash layers renormalise the scores; they do not weigh every expert 1/k."""
    logits = torch.randn(3, 6)
    table = torch.tensor([[5, 0], [2, 3], [1, 4]])
    weights, experts = route(logits, None, table, topk=2, **OPTIONS)
    assert torch.equal(experts, table)
    chosen = scores_of(logits, "sqrtsoftplus").gather(1, table)
    expected = 1.5 * chosen / chosen.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
    assert (weights - 0.75).abs().max() > 1e-2


def test_scores_that_underflow_stay_finite() -> None:
    weights, _ = route(torch.full((1, 4), -1e4), None, None, topk=2, **OPTIONS)
    assert weights.isfinite().all()


def loop(
    x: Tensor, weights: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, clamp: float | None
) -> Tensor:
    """Each token through each of its experts, float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for weight, e in zip(weights[t].tolist(), experts[t].tolist(), strict=True):
            gate, up = (w13[e].double() @ x[t].double()).chunk(2)
            if clamp is not None:
                gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
            out[t] += w2[e].double() @ (gate * torch.sigmoid(gate) * up * weight)
    return out


def case(tokens: int, experts: int, topk: int, size: float = 1.0) -> tuple[Tensor, ...]:
    x = torch.randn(tokens, HIDDEN)
    chosen = torch.rand(tokens, experts).argsort(-1)[:, :topk]
    weights = torch.rand(tokens, topk)
    w13 = torch.randn(experts, 2 * INTER, HIDDEN) * HIDDEN**-0.5 * size
    return x, weights, chosen, w13, torch.randn(experts, HIDDEN, INTER) * INTER**-0.5


# Few tokens read their experts one by one, many are sorted into blocks: both sides of that choice,
# and blocks of 16, 32 and 64 places.
@pytest.mark.parametrize(
    ("tokens", "experts", "topk"),
    [
        (1, 8, 2),
        (8, 8, 2),
        (9, 8, 2),
        (64, 8, 2),
        (128, 4, 1),
        (300, 4, 2),
        (5, 16, 6),
        (6, 16, 6),
        (3, 2, 2),
        (1, 1, 1),
    ],
)
@pytest.mark.parametrize("clamp", [None, 10.0])
def test_experts_equal_the_loop(tokens: int, experts: int, topk: int, clamp: float | None) -> None:
    args = case(tokens, experts, topk)
    ours = moe_experts(*args, clamp)
    torch.testing.assert_close(ours.double(), loop(*args, clamp), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [4, 40])
def test_clamp_at_twenty(tokens: int) -> None:
    """A12: activations of +-20 and beyond are limited to 10 before the product."""
    args = case(tokens, 8, 2, size=20.0)
    limited = moe_experts(*args, 10.0)
    exact = loop(*args, 10.0)
    torch.testing.assert_close(limited.double(), exact, rtol=1e-4, atol=1e-3)
    assert (exact - loop(*args, None)).abs().max() > 50


def test_a_token_alone_equals_itself_in_a_crowd() -> None:
    """The two paths agree: a decode step and a prefill step see one model."""
    x, weights, experts, w13, w2 = case(48, 8, 2)
    crowd = moe_experts(x, weights, experts, w13, w2, 10.0)
    for t in range(0, 48, 7):
        alone = moe_experts(x[t : t + 1], weights[t : t + 1], experts[t : t + 1], w13, w2, 10.0)
        torch.testing.assert_close(alone[0], crowd[t], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("expert", [0, 7])
def test_one_expert_may_take_every_token(expert: int) -> None:
    """The fullest an expert, and the most padded the blocks, can be."""
    x, weights, experts, w13, w2 = case(65, 8, 1)
    args = (x, weights, torch.full_like(experts, expert), w13, w2)
    expected = loop(*args, 10.0)
    torch.testing.assert_close(moe_experts(*args, 10.0).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_token_of_nan_stays_alone() -> None:
    x, weights, experts, w13, w2 = case(64, 8, 2)
    x[-1] = float("nan")
    out = moe_experts(x, weights, experts, w13, w2, 10.0)
    assert out[-1].isnan().all()
    assert out[:-1].isfinite().all()


def test_an_expert_chosen_twice_counts_twice() -> None:
    x, _, _, w13, w2 = case(3, 4, 2)
    twice = torch.full((3, 2), 1)
    half = moe_experts(x, torch.full((3, 2), 0.5), twice, w13, w2, None)
    once = moe_experts(x, torch.ones(3, 1), twice[:, :1], w13, w2, None)
    torch.testing.assert_close(half, once, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [2, 64])
def test_zero_weights_give_zero(tokens: int) -> None:
    x, weights, experts, w13, w2 = case(tokens, 8, 2)
    assert not moe_experts(x, weights * 0, experts, w13, w2, 10.0).any()


@pytest.mark.parametrize("tokens", [2, 64])
def test_bfloat16_stays_close(tokens: int) -> None:
    x, weights, experts, w13, w2 = case(tokens, 8, 2)
    half = moe_experts(x.bfloat16(), weights, experts, w13.bfloat16(), w2.bfloat16(), 10.0)
    assert half.dtype is torch.bfloat16
    exact = loop(x, weights, experts, w13, w2, 10.0)
    assert (half.double() - exact).abs().max() < 0.05 * exact.abs().max()
