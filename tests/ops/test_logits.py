"""The rules over logits against plain Python over explicit prefixes, row by row."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from v4graph.ops.logits import Prefix, Rules, logprobs, process_logits

V, L = 11, 12
NEUTRAL = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}


def rules(
    num_prompt: list[int],
    *,
    min_tokens: int = 0,
    end_ids: tuple[int, ...] = (),
    bias: dict[int, float] | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    **numbers: float,
) -> Rules:
    """The same rules for every request."""
    R, bias = len(num_prompt), bias or {}
    words = torch.full((R, 4, 3), -1)
    for i, word in enumerate(bad_words):
        words[:, i, 3 - len(word) :] = torch.tensor(word)
    ends, ids, values = torch.full((R, 3), -1), torch.full((R, 5), -1), torch.zeros(R, 5)
    ends[:, : len(end_ids)] = torch.tensor(end_ids)
    for i, (token, value) in enumerate(bias.items()):
        ids[:, i], values[:, i] = token, value
    full = {name: torch.full((R,), numbers.get(name, v)) for name, v in NEUTRAL.items()}
    lengths, least = torch.tensor(num_prompt), torch.full((R,), min_tokens)
    return Rules(lengths, least, ends, ids, values, words, **full)


def by_hand(row: Tensor, prompt: list[int], out: list[int], r: Rules, i: int) -> list[float]:
    values = row.double().tolist()
    for token, bias in zip(r.bias_ids[i].tolist(), r.biases[i].tolist(), strict=True):
        if token >= 0:
            values[token] += bias
    by = float(r.repetition[i])
    for token in {*prompt, *out}:
        values[token] = values[token] / by if values[token] > 0 else values[token] * by
    for token, count in Counter(out).items():
        values[token] -= count * float(r.frequency[i]) + float(r.presence[i])
    for word in r.bad_words[i].tolist():
        word = [t for t in word if t >= 0]
        if word and (len(word) == 1 or out[1 - len(word) :] == word[:-1]):
            values[word[-1]] = -math.inf
    if len(out) < int(r.min_tokens[i]):
        for token in r.end_ids[i].tolist():
            if token >= 0:
                values[token] = -math.inf
    return values


CASES = [
    {"repetition": 1.7},
    {"repetition": 0.6},
    {"presence": 0.9},
    {"frequency": 0.7},
    {"presence": -1.1, "frequency": -0.4},
    {"bias": {3: 100.0, 0: -100.0, 7: 0.25}},
    {"min_tokens": 4, "end_ids": (2, 10)},
    {"min_tokens": 1, "end_ids": (0,)},
    {"bad_words": ((4,), (1, 2), (5, 1, 0))},
    {"bad_words": ((1, 1, 1), (2, 2))},
    {
        "repetition": 1.2,
        "presence": 0.3,
        "frequency": 0.2,
        "bias": {1: 1.5},
        "min_tokens": 6,
        "end_ids": (9,),
        "bad_words": ((1, 1),),
    },
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("k", [0, 1, 4])
def test_every_row_sees_its_own_prefix(case: dict[str, object], k: int) -> None:
    """Random tables of few tokens, so that repeats and banned heads are common; what lies behind
    the known tokens is an earlier request's."""
    gen = torch.Generator().manual_seed(k)
    R, banned = 40, 0
    ids = torch.randint(0, 3, (R, L), generator=gen)
    known = torch.randint(1, L + 1, (R,), generator=gen)
    prompt = torch.minimum(torch.randint(1, L, (R,), generator=gen), known)
    drafts = torch.randint(0, 3, (R, k), generator=gen)
    behind = torch.arange(k + 1).expand(R, -1)
    logits = 3 * torch.randn(R, k + 1, V, generator=gen)
    r = rules(prompt.tolist(), **case)  # type: ignore[arg-type]
    kept = logits.clone()
    got = process_logits(logits, Prefix(ids, known, drafts, behind), r)
    assert torch.equal(logits, kept)
    for i in range(R):
        whole = ids[i, : known[i]].tolist()
        for row in range(k + 1):
            out = [*whole[prompt[i] :], *drafts[i, :row].tolist()]
            expected = by_hand(logits[i, row], whole[: prompt[i]], out, r, i)
            banned += sum(math.isinf(v) for v in expected)
            assert got[i, row].tolist() == pytest.approx(expected, abs=1e-5)
    assert (banned > 0) == bool({"bad_words", "end_ids"} & case.keys())


def test_a_draft_that_does_not_count_is_not_seen() -> None:
    """One row behind n drafts is row n of a verification: what the draft layer sees."""
    r = rules([1], frequency=0.5, presence=0.25, repetition=1.3, bad_words=((2, 3), (1,)))
    ids, drafts = torch.tensor([[4, 5, 0, 0]]), torch.tensor([[2, 3, 2]])
    logits = torch.randn(1, 4, V, generator=torch.Generator().manual_seed(1))
    rows = torch.arange(4)[None]
    together = process_logits(logits, Prefix(ids, torch.tensor([2]), drafts, rows), r)
    for n in range(4):
        prefix = Prefix(ids, torch.tensor([2]), drafts, torch.tensor([[n]]))
        assert torch.equal(process_logits(logits[:, n : n + 1], prefix, r)[:, 0], together[:, n])


def test_neutral_rules_change_no_bit() -> None:
    logits = torch.randn(3, 2, V) * 10
    logits[0, 0, 3] = 0.0
    prefix = Prefix(
        torch.randint(0, V, (3, L)),
        torch.tensor([5, 1, L]),
        torch.randint(0, V, (3, 1)),
        torch.arange(2).expand(3, -1),
    )
    assert torch.equal(process_logits(logits, prefix, rules([3, 1, 2])), logits)


def test_a_vocabulary_of_one_and_a_row_of_nan() -> None:
    prefix = Prefix(
        torch.zeros(2, 3, dtype=torch.int64),
        torch.tensor([1, 2]),
        torch.zeros(2, 0, dtype=torch.int64),
        torch.zeros(2, 1, dtype=torch.int64),
    )
    r = rules([1, 1], frequency=0.5, presence=0.25)
    got = process_logits(torch.tensor([[[float("nan")]], [[2.0]]]), prefix, r)
    assert bool(got[0].isnan())
    assert got[1].tolist() == [[1.25]]


def test_logprobs() -> None:
    logits = torch.randn(3, 4, 50) * 5
    tokens = torch.randint(0, 50, (3, 4))
    tokens[0, 2:] = -1
    own, ids, values = logprobs(logits, tokens, 20)
    expected = logits.double().log_softmax(-1)
    for r in range(3):
        for w in range(4):
            if tokens[r, w] >= 0:
                assert abs(float(own[r, w]) - float(expected[r, w, tokens[r, w]])) < 5e-6
            order = expected[r, w].sort(descending=True)
            assert ids[r, w].tolist() == order.indices[:20].tolist()
            assert torch.allclose(values[r, w].double(), order.values[:20], atol=5e-6)
    assert logprobs(logits, tokens, 99)[1].shape == (3, 4, 50)
    assert logprobs(logits[..., :1], tokens.clamp_max(0), 5)[0].tolist() == [[0.0] * 4] * 3


def test_logprobs_of_a_row_do_not_depend_on_its_company() -> None:
    logits, tokens = torch.randn(4, 6, 300) * 8, torch.randint(0, 300, (4, 6))
    own, _, values = logprobs(logits, tokens, 5)
    for r in range(4):
        for w in range(6):
            here = logits[r : r + 1, w : w + 1], tokens[r : r + 1, w : w + 1]
            alone, _, best = logprobs(*here, 5)
            assert torch.allclose(alone[0, 0], own[r, w], atol=1e-6, rtol=0)
            assert torch.allclose(best[0, 0], values[r, w], atol=1e-6, rtol=0)
