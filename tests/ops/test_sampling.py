"""Sampling against direct probabilities: 20,000 draws a setting, and every edge."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from v4graph.ops.sampling import ACCEPT, DRAFT, FINAL, draw, probabilities, uniform

VOCAB, DRAWS = 12, 20_000
LOGITS = torch.tensor([2.0, -1.0, 0.5, 2.0, 1.2, -3.0, 0.0, 0.9, -0.2, 1.9, -8.0, 0.4])


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    number: Tensor,
    min_p: Tensor | None = None,
) -> Tensor:
    """One token of every row."""
    least = torch.zeros_like(top_p) if min_p is None else min_p
    return draw(probabilities(logits, temperature, top_k, top_p, least), number)


def direct(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> list[float]:
    """The distribution that the parameters describe, float64."""
    probs = (logits.double() / temperature).softmax(0).tolist()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    order = [i for i in order if probs[i] >= min_p * max(probs)]
    if top_k:
        order = order[:top_k]
    mass, kept = sum(probs[i] for i in order), []
    for i in order:
        # The shortest prefix with at least top_p of what top-k left.
        if kept and sum(probs[j] for j in kept) / mass >= top_p:
            break
        kept.append(i)
    total = sum(probs[i] for i in kept)
    return [probs[i] / total if i in kept else 0.0 for i in range(len(probs))]


def draws(
    n: int,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 3,
) -> list[int]:
    number = uniform(torch.full((n,), seed), torch.arange(n))
    return sample(
        LOGITS.expand(n, -1),
        torch.full((n,), temperature),
        torch.full((n,), top_k),
        torch.full((n,), top_p),
        number,
        torch.full((n,), min_p),
    ).tolist()


def one(temperature: float, top_k: int = 0, top_p: float = 1.0, number: float = 0.5) -> int:
    rows = (torch.tensor([v]) for v in (temperature, top_k, top_p, number))
    return int(sample(LOGITS[None], *rows))


def chi_square(seen: list[int], expected: list[float]) -> tuple[float, float]:
    """The statistic of the draws, and what 9,999 of 10,000 fair samples stay below."""
    counts = [seen.count(i) for i in range(VOCAB)]
    assert all(n == 0 for n, p in zip(counts, expected, strict=True) if p == 0)
    cells = [(n, p * len(seen)) for n, p in zip(counts, expected, strict=True) if p > 0]
    common = [(n, e) for n, e in cells if e >= 5]
    rare = [(n, e) for n, e in cells if e < 5]
    if sum(e for _, e in rare) >= 5:
        common.append((sum(n for n, _ in rare), sum(e for _, e in rare)))
    k = max(len(common) - 1, 1)
    limit = k * (1 - 2 / (9 * k) + 3.72 * math.sqrt(2 / (9 * k))) ** 3  # Wilson and Hilferty
    return sum((n - e) ** 2 / e for n, e in common), limit


SETTINGS = [
    (0, 1.0, 0.0),
    (4, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 1.0, 0.2),
    (5, 0.8, 0.05),
    (1, 1.0, 0.0),
]
"""(top_k, top_p, min_p)"""


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), SETTINGS)
def test_frequencies(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    seen = draws(DRAWS, temperature, top_k, top_p, min_p)
    chi, limit = chi_square(seen, direct(LOGITS, temperature, top_k, top_p, min_p))
    assert chi <= limit


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (0.25, 3), (0.5, 2), (1.0, 1)])
def test_min_p_keeps_its_edge(min_p: float, kept: int) -> None:
    """Probabilities 8 : 4 : 2 : 1 are exact."""
    logits = torch.tensor([[8.0, 4.0, 2.0, 1.0]]).log()
    ones = torch.ones(1)
    none = torch.zeros(1, dtype=torch.int64)
    probs = probabilities(logits, ones, none, ones, torch.tensor([min_p - 1e-4 * (min_p > 0)]))
    assert int((probs > 0).sum()) == kept


def test_another_distribution_fails_the_same_test() -> None:
    """A temperature off by a tenth shows; so does one token too many."""
    chi, limit = chi_square(draws(DRAWS, 0.9), direct(LOGITS, 1.0, 0, 1.0))
    assert chi > limit
    with pytest.raises(AssertionError):
        chi_square(draws(DRAWS, 1.0, top_k=5), direct(LOGITS, 1.0, 4, 1.0))


def test_temperature_zero_is_greedy_with_the_lowest_id_among_equals() -> None:
    assert set(draws(100, 0.0)) == {0}
    zero, none = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    tied = torch.tensor([[1.0, 3.0, 3.0]])
    assert sample(tied, zero, none, torch.ones(1), torch.tensor([0.9])).tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-8, 1e-6, 1e-5, 1e-3])
def test_tiny_temperatures_are_finite_and_pick_the_top(temperature: float) -> None:
    assert set(draws(200, temperature)) <= {0, 3}  # the two equal best
    assert one(temperature, number=0.0) == 0


def test_huge_temperature_is_nearly_uniform() -> None:
    seen = draws(DRAWS, 2.0**31)
    assert all(abs(seen.count(i) - DRAWS / VOCAB) < 250 for i in range(VOCAB))


@pytest.mark.parametrize("top_p", [1e-60, 1e-30, 1e-6, 0.05])
def test_tiny_top_p_keeps_one(top_p: float) -> None:
    """1e-60 is a legal value that is 0 in float32."""
    assert set(draws(300, 1.0, top_p=top_p)) == {0}


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)])
def test_top_p_stops_at_exactly_its_mass(top_p: float, kept: int) -> None:
    """Four equal tokens weigh 1/4 each, exactly; one more than needed is one too many."""
    n = 400
    number = uniform(torch.full((n,), 5), torch.arange(n))
    none = torch.zeros(n, dtype=torch.int64)
    seen = sample(torch.zeros(n, 4), torch.ones(n), none, torch.full((n,), top_p), number)
    assert set(seen.tolist()) == set(range(kept))


def test_top_k_counts_tied_tokens_by_id() -> None:
    assert set(draws(300, 1.0, top_k=1)) == {0}
    assert set(draws(300, 1.0, top_k=2)) == {0, 3}
    assert set(draws(2000, 1.0, top_k=10**6)) >= set(range(10)) - {5, 1}


@pytest.mark.parametrize("number", [0.0, 2.0**-24, 0.5, 1 - 2.0**-24])
def test_extreme_draws_stay_inside_what_is_kept(number: float) -> None:
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.5), (2, 0.3)):
        expected = direct(LOGITS, 1.0, top_k, top_p)
        assert expected[one(1.0, top_k, top_p, number)] > 0


def test_rows_do_not_influence_each_other() -> None:
    n = 64
    logits = torch.randn(n, 50) * 3
    temperature, top_k = torch.rand(n) * 2, torch.randint(0, 9, (n,))
    top_p, number = torch.rand(n).clamp_min(0.05), torch.rand(n)
    together = sample(logits, temperature, top_k, top_p, number)
    for r in range(n):
        row = slice(r, r + 1)
        alone = sample(logits[row], temperature[row], top_k[row], top_p[row], number[row])
        assert int(alone) == int(together[r])


def test_one_seed_draws_the_same_tokens_alone_and_in_a_batch() -> None:
    """From the seed to the token: neither the row, nor its neighbours, nor the batch size count."""
    positions = torch.arange(300)

    def tokens(seeds: Tensor, at: Tensor) -> Tensor:
        n = len(seeds)
        temperature, top_p = torch.full((n,), 0.8), torch.full((n,), 0.95)
        top_k = torch.full((n,), 9)
        return sample(LOGITS.expand(n, -1), temperature, top_k, top_p, uniform(seeds, at))

    mine = torch.full((300,), 2**40 + 7)
    alone = torch.cat([tokens(mine[i : i + 1], positions[i : i + 1]) for i in range(300)])
    order = torch.randperm(600)
    seeds = torch.cat((mine, torch.randint(-(2**62), 2**62, (300,))))[order]
    crowd = tokens(seeds, torch.cat((positions, positions))[order])
    together = torch.empty_like(crowd).scatter(0, order, crowd)[:300]
    assert torch.equal(together, alone)
    assert len(set(alone.tolist())) > 3  # not one constant token
    assert not torch.equal(tokens(mine + 1, positions), alone)
    assert not torch.equal(tokens(mine - 2**40, positions), alone)  # the high bits count


def test_masked_logits_are_never_drawn() -> None:
    logits = LOGITS.clone()
    logits[[0, 3, 9]] = float("-inf")
    number = uniform(torch.full((4000,), 1), torch.arange(4000))
    ones = torch.ones(4000)
    seen = sample(logits.expand(4000, -1), ones, torch.zeros(4000, dtype=torch.int64), ones, number)
    assert not {0, 3, 9} & set(seen.tolist())


def test_uniform_is_uniform_and_below_one() -> None:
    x = uniform(torch.full((200_000,), 12345), torch.arange(200_000)).double()
    assert x.min() >= 0
    assert x.max() < 1
    assert abs(float(x.mean()) - 0.5) < 0.003
    assert abs(float(x.var()) - 1 / 12) < 0.002
    cells = torch.histc(x, 50, 0, 1)
    assert float(((cells - 4000) ** 2 / 4000).sum()) < 110  # 49 degrees of freedom, p = 1e-6
    assert abs(float(torch.corrcoef(torch.stack((x[:-1], x[1:])))[0, 1])) < 0.01


def test_uniform_differs_over_seeds_and_positions() -> None:
    seeds = torch.tensor([0, 1, 2, -1, 2**32, 2**62, -(2**63), 2**63 - 1])
    at_zero = uniform(seeds, torch.zeros(8, dtype=torch.int64))
    assert len(set(at_zero.tolist())) == 8
    assert ((at_zero >= 0) & (at_zero < 1)).all()
    neighbours = torch.stack([uniform(torch.full((5000,), s), torch.arange(5000)) for s in (7, 8)])
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 0.05
    by_seed = uniform(torch.arange(20_000), torch.full((20_000,), 17)).double()
    assert abs(float(by_seed.mean()) - 0.5) < 0.01
    again = uniform(torch.full((5000,), 7), torch.arange(5000))
    assert torch.equal(again, neighbours[0])


def test_a_row_of_nan_harms_no_other_row() -> None:
    """One request's overflow must not end the step of all: any token, but a token."""
    logits = torch.stack((LOGITS, torch.full((VOCAB,), float("nan")), LOGITS))
    ones = torch.ones(3)
    got = sample(logits, ones, torch.zeros(3, dtype=torch.int64), ones, ones * 0.5)
    assert got[0] == got[2] == one(1.0)
    assert 0 <= int(got[1]) < VOCAB


def test_streams_are_independent() -> None:
    """The draft of a position, its acceptance and its own token share no random numbers."""
    seeds, positions = torch.full((20_000,), 9), torch.arange(20_000)
    streams = torch.stack([uniform(seeds, positions, s) for s in (FINAL, DRAFT, ACCEPT)])
    correlation = torch.corrcoef(streams.double()) - torch.eye(3)
    assert float(correlation.abs().max()) < 0.03
    for shift in range(-40, 41):  # neither does another seed, nearby or not
        other = uniform(seeds + shift * 77777, positions, FINAL)
        assert not torch.equal(other, streams[DRAFT])
        assert not torch.equal(other, streams[ACCEPT])


def test_a_draw_never_takes_what_has_no_probability() -> None:
    """Also where the sum is rounded: the last positive token is the limit."""
    probs = torch.tensor([[0.0, 0.1, 0.0, 0.2, 0.0], [0.0, 0.0, 0.0, 0.0, 5.0]])
    for number in (0.0, 0.3, 0.34, 0.999, 1 - 2.0**-24, 1.0):
        got = draw(probs, torch.tensor([number, number])).tolist()
        assert got[0] in (1, 3)
        assert got[1] == 4
    many = torch.rand(50, 100_000).softmax(-1)
    many[:, 70_000:] = 0.0
    assert bool((draw(many, torch.full((50,), 1 - 2.0**-24)) < 70_000).all())
