"""Verification of drafts: the tokens follow the target's law, whatever proposed the drafts."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.ops.test_sampling import SETTINGS
from v4graph.ops.sampling import DRAFT, certain, draw, probabilities, uniform, verify, verify_greedy

V, N = 4, 20_000


def conditionals(seed: int, temperature: float, setting: tuple[int, float, float]) -> list[Tensor]:
    """A model over four tokens: distributions `[V^i, V]` of token i given those before it."""
    gen = torch.Generator().manual_seed(seed)
    top_k, top_p, min_p = setting
    out = []
    for i in range(5):
        logits = 1.5 * torch.randn(V**i, V, generator=gen)
        full = (torch.full((V**i,), x) for x in (temperature, top_k, top_p, min_p))
        out.append(probabilities(logits, *full))
    return out


def prefix_number(tokens: Tensor) -> Tensor:
    """`[N, i]` tokens as a row of `conditionals`."""
    number = torch.zeros(len(tokens), dtype=torch.int64)
    for column in tokens.unbind(1):
        number = number * V + column
    return number


def drafted(model: list[Tensor], k: int, seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts `[N, k]` drawn from a model, and their distributions `[N, k, V]`."""
    tokens, probs = torch.zeros(len(seeds), 0, dtype=torch.int64), []
    for i in range(k):
        q = model[i][prefix_number(tokens)]
        probs.append(q)
        number = uniform(seeds, torch.full_like(seeds, 10 + i), DRAFT)
        tokens = torch.cat((tokens, draw(q, number)[:, None]), dim=1)
    return tokens, torch.stack(probs, dim=1)


def first_two(target: list[Tensor], proposal: list[Tensor], k: int) -> Tensor:
    """The first two tokens `[N, 2]` of rounds of speculation: a second round where one is not
    enough."""
    seeds = torch.arange(N)
    drafts, q = drafted(proposal, k, seeds)
    p = torch.stack([target[i][prefix_number(drafts[:, :i])] for i in range(k + 1)], dim=1)
    accepted, behind = verify(p, q, drafts, torch.full((N,), k), seeds, torch.full((N,), 10))
    at = torch.arange(k + 1)
    padded = torch.cat((drafts, drafts[:, :1]), dim=1)
    tokens = torch.where(at == accepted[:, None], behind[:, None], padded)
    # The next round's token, by plain sampling, for those that got one only.
    more = draw(target[1][tokens[:, 0]], uniform(seeds, torch.full((N,), 11)))
    second = torch.where(accepted == 0, more, tokens[:, 1])
    return torch.stack((tokens[:, 0], second), dim=1)


def chi_square(tokens: Tensor, target: list[Tensor]) -> tuple[float, int]:
    """The statistic of the pair's joint law, and its degrees of freedom."""
    counts = torch.bincount(prefix_number(tokens), minlength=V * V).double()
    law = (target[0][0][:, None] * target[1]).flatten().double() * N
    assert bool((counts[law == 0] == 0).all())
    counts, law = counts[law > 0], law[law > 0]
    rare = law < 5
    if bool(rare.any()):
        counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
        law = torch.cat((law[~rare], law[rare].sum()[None]))
    return float(((counts - law) ** 2 / law).sum()), len(law) - 1


def limit(freedom: int) -> float:
    """What 9,999 of 10,000 fair samples stay below (Wilson and Hilferty)."""
    if freedom == 0:
        return 1e-6
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_tokens_follow_the_target(
    temperature: float, setting: tuple[int, float, float], k: int
) -> None:
    target = conditionals(1, temperature, setting)
    for proposal in (conditionals(2, temperature, setting), conditionals(3, 1.0, SETTINGS[0])):
        chi, freedom = chi_square(first_two(target, proposal, k), target)
        assert chi <= limit(freedom)


def test_drafts_that_are_certain() -> None:
    """Prompt lookup and forced drafts: everything on one token, right or impossible."""
    target = conditionals(1, 1.0, SETTINGS[0])
    for first, second in product(range(V), range(V)):
        one = [certain(torch.full((V**i,), t), target[i]) for i, t in enumerate((first, second))]
        chi, freedom = chi_square(first_two(target, one, 2), target)
        assert chi <= limit(freedom)


def test_taking_every_draft_fails_the_same_test() -> None:
    """And so does drawing what follows a rejection from the target itself."""
    target, proposal = conditionals(1, 1.0, SETTINGS[0]), conditionals(2, 1.0, SETTINGS[0])
    seeds = torch.arange(N)
    drafts, q = drafted(proposal, 2, seeds)
    chi, freedom = chi_square(drafts, target)
    assert chi > limit(freedom)
    p = target[0].expand(N, -1)
    number = uniform(seeds, torch.full((N,), 10), 2)
    good = number * q[:, 0].gather(1, drafts[:, :1])[:, 0] < p.gather(1, drafts[:, :1])[:, 0]
    wrong = torch.where(good, drafts[:, 0], draw(p, uniform(seeds, torch.full((N,), 10))))
    second = draw(target[1][wrong], uniform(seeds, torch.full((N,), 11)))
    chi, freedom = chi_square(torch.stack((wrong, second), 1), target)
    assert chi > limit(freedom)


def test_equal_distributions_accept_everything() -> None:
    model = conditionals(1, 1.0, SETTINGS[0])
    seeds = torch.arange(2000)
    drafts, q = drafted(model, 3, seeds)
    p = torch.cat((q, model[3][prefix_number(drafts)][:, None]), dim=1)
    accepted, _ = verify(p, q, drafts, torch.full((2000,), 3), seeds, torch.full((2000,), 10))
    assert bool((accepted == 3).all())


def test_only_the_drafts_that_count() -> None:
    """Behind `num_drafts` nothing is accepted, and what follows is drawn from the target."""
    model = conditionals(1, 1.0, SETTINGS[0])
    seeds = torch.arange(N)
    drafts, q = drafted(model, 2, seeds)
    p = torch.cat((q, model[2][prefix_number(drafts)][:, None]), dim=1)
    for count in (0, 1):
        accepted, behind = verify(
            p, q, drafts, torch.full((N,), count), seeds, torch.full((N,), 10)
        )
        assert bool((accepted == count).all())
        pair = (behind, draw(model[1][behind], uniform(seeds, torch.full((N,), 11))))
        if count:
            pair = (drafts[:, 0], behind)
        chi, freedom = chi_square(torch.stack(pair, 1), model)
        assert chi <= limit(freedom)


def test_greedy_accepts_the_leading_right_drafts() -> None:
    logits = torch.full((3, 4, V), -1.0)
    for row, best in enumerate(((1, 2, 3, 0), (1, 2, 3, 0), (1, 2, 3, 0))):
        for i, token in enumerate(best):
            logits[row, i, token] = 2.0
    drafts = torch.tensor([[1, 2, 3], [1, 0, 3], [1, 2, 3]])
    accepted, token = verify_greedy(logits, drafts, torch.tensor([3, 3, 1]))
    assert accepted.tolist() == [3, 1, 1]
    assert token.tolist() == [0, 2, 2]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(1, 2, V)
    assert verify_greedy(logits, torch.tensor([[1]]), torch.tensor([1]))[0].tolist() == [0]
    accepted, token = verify_greedy(logits, torch.tensor([[0]]), torch.tensor([1]))
    assert (accepted.tolist(), token.tolist()) == ([1], [0])


def test_a_row_of_nan_harms_no_other_row() -> None:
    model = conditionals(1, 1.0, SETTINGS[0])
    seeds = torch.arange(3)
    drafts, q = drafted(model, 1, seeds)
    p = torch.stack([model[0].expand(3, -1), model[1][drafts[:, 0]]], dim=1).clone()
    position, counts = torch.full((3,), 10), torch.ones(3, dtype=torch.int64)
    expected = verify(p, q, drafts, counts, seeds, position)
    p[1] = float("nan")
    accepted, token = verify(p, q, drafts, counts, seeds, position)
    for row in (0, 2):
        assert (accepted[row], token[row]) == (expected[0][row], expected[1][row])
    assert 0 <= int(token[1]) < V
