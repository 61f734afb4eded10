"""Penalties, biases, bans, min_tokens and logprobs: the same with and without speculation."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

from tests.engine.test_rounds import nano_engine
from tests.support import nano
from tests.support.speculation import run
from v4graph.engine.engine import LLMEngine
from v4graph.engine.request import SamplingParams, TokenLogprobs
from v4graph.errors import RequestError

NEW = 14
RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "negative": {"frequency_penalty": -1.5, "presence_penalty": -2.0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "bias": {"logit_bias": {263: -100.0, 268: -6.0, 70: -100.0, 50: 2.0}},
    "all": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {12: 2.0, 263: -3.0},
    },
}


@cache
def engine(k: int) -> LLMEngine:
    return nano_engine(k)


def prompts() -> dict[str, list[int]]:
    return dict(zip("abc", nano.prompts(5, 33, 18), strict=True))


def params(**more: Any) -> SamplingParams:
    base: dict[str, Any] = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
    return SamplingParams(**base | more)


def ruled(
    logits: torch.Tensor, prompt: list[int], out: list[int], p: SamplingParams
) -> list[float]:
    """The rules in plain Python over one row of logits."""
    values = logits.double().tolist()
    for token, bias in p.logit_bias.items():
        values[token] += bias
    for token in {*prompt, *out}:
        r = p.repetition_penalty
        values[token] = values[token] / r if values[token] > 0 else values[token] * r
    for token, count in Counter(out).items():
        values[token] -= count * p.frequency_penalty + p.presence_penalty
    for word in p.bad_words:
        head = list(word[:-1])
        if not head or out[-len(head) :] == head:
            values[word[-1]] = -math.inf
    if len(out) < p.min_tokens:
        for token in p.stop_token_ids:
            values[token] = -math.inf
    return values


def check(prompt: list[int], out: list[int], p: SamplingParams) -> None:
    """Every token of a greedy output is the best one under the rules, by a full recompute."""
    with torch.no_grad():
        logits = nano.oracle().forward(torch.tensor([[*prompt, *out]])).logits[0]
    for i, token in enumerate(out):
        values = ruled(logits[len(prompt) + i - 1], prompt, out[:i], p)
        assert max(values) - values[token] < 1e-4, (i, token)


@cache
def plain() -> dict[str, list[int]]:
    return run(engine(0), prompts(), params()).tokens


@pytest.mark.parametrize("name", RULES)
def test_greedy_output_under_rules(name: str) -> None:
    """k = 0, 1, 3, 5 agree, follow the definitions and differ from plain output."""
    p = params(**RULES[name])
    expected = run(engine(0), prompts(), p).tokens
    assert expected != plain()
    for key, prompt in prompts().items():
        check(prompt, expected[key], p)
    for k in (1, 3, 5):
        session = run(engine(k), prompts(), p)
        assert session.tokens == expected
        # Drafts are made under the same rules, so some are right.
        assert session.num_accepted > 0


@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_bad_words_never_appear(k: int) -> None:
    free = plain()["a"]
    words = ((free[3],), tuple(free[5:7]), tuple(free[9:12]), tuple(free[12:14]))
    p = params(bad_words=words)
    for key, out in run(engine(k), prompts(), p).tokens.items():
        check(prompts()[key], out, p)
        text = " ".join(map(str, ["", *out, ""]))
        assert not any(" ".join(map(str, ["", *word, ""])) in text for word in words)
    alone = params(bad_words=(words[1],))
    out = run(engine(k), prompts(), alone).tokens["a"]
    assert out[:6] == free[:6]
    assert out[6] != free[6]


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.parametrize("least", [5, NEW])
def test_min_tokens_keeps_ends_away(k: int, least: int) -> None:
    """The first token of the output would end it, were it allowed to."""
    free = plain()["b"]
    p = params(stop_token_ids=(free[0], free[2]), min_tokens=least)
    session = run(engine(k), prompts(), p)
    out = session.tokens["b"]
    assert len(out) > least or len(out) == NEW
    assert not {free[0], free[2]} & set(out[:least])
    assert session.tokens == run(engine(0), prompts(), p).tokens
    check(prompts()["b"], out, p)
    assert run(engine(k), prompts(), params(stop_token_ids=(free[0],))).tokens["b"] == free[:1]


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rules_of_one_request_leave_the_others_alone(k: int, temperature: float) -> None:
    """And a slot that held rules is as new for the next request; seeds count alone or together."""
    mixed = {
        "a": params(temperature=temperature, seed=1, **RULES["all"]),
        "b": params(temperature=temperature, seed=2),
        "c": params(temperature=0.0, seed=3, logprobs=2),
    }
    together = run(engine(k), prompts(), mixed, join={"c": 2}).tokens
    alone = {
        name: run(engine(k), {name: ids}, mixed[name]).tokens[name]
        for name, ids in prompts().items()
    }
    assert together == alone
    assert together["c"] == plain()["c"]
    again = run(engine(k), prompts(), {**mixed, "a": params()}).tokens
    assert again["a"] == plain()["a"]


def told(k: int, wanted: dict[str, SamplingParams], **more: Any) -> dict[str, list[TokenLogprobs]]:
    """Log-probabilities by request, beside the tokens that they belong to."""
    llm, out = engine(k), {name: [] for name in wanted}
    for name, p in wanted.items():
        llm.add_request(name, prompts()[name], p)
    while llm.has_unfinished():
        for step in llm.step():
            assert (step.logprobs is None) == (wanted[step.request_id].logprobs is None)
            if step.logprobs is not None:
                assert [t.token_id for t in step.logprobs] == step.token_ids
                out[step.request_id] += step.logprobs
    return out


def test_logprobs_are_the_models_own() -> None:
    """Raw log-softmax against a full recompute, whatever the rules and with or without drafts."""
    wanted = {
        "a": params(logprobs=5, **RULES["all"]),
        "b": params(logprobs=20),
        "c": params(logprobs=0),
    }
    first = told(0, wanted)
    worst = 0.0
    for name, entries in first.items():
        full = [*prompts()[name], *(t.token_id for t in entries)]
        with torch.no_grad():
            rows = nano.oracle().forward(torch.tensor([full])).logits[0].log_softmax(-1)
        for i, entry in enumerate(entries):
            row = rows[len(prompts()[name]) - 1 + i]
            assert abs(entry.logprob - float(row[entry.token_id])) < 1e-4
            assert len(entry.top) == wanted[name].logprobs
            best = row.topk(20).values.tolist()
            for (token, value), expected in zip(entry.top, best, strict=False):
                assert abs(value - expected) < 1e-4
                assert abs(value - float(row[token])) < 1e-4
    for k in (1, 3, 5):
        for name, entries in told(k, wanted).items():
            assert [t.token_id for t in entries] == [t.token_id for t in first[name]]
            for one, other in zip(entries, first[name], strict=True):
                assert [i for i, _ in one.top] == [i for i, _ in other.top]
                values = zip(one.top, other.top, strict=True)
                gaps = [abs(x - y) for (_, x), (_, y) in values]
                worst = max(worst, abs(one.logprob - other.logprob), *gaps, 0.0)
    # Rows of other shapes round differently: 1.6e-5 was seen, at logits of about 20.
    assert worst <= 5e-5


@pytest.mark.parametrize("k", [0, 3])
def test_logprobs_end_with_the_tokens(k: int) -> None:
    free = plain()["b"]
    stop = params(logprobs=1, stop_token_ids=(free[5],))
    entries = told(k, {"b": stop})["b"]
    assert [t.token_id for t in entries] == free[: free.index(free[5]) + 1]


def test_what_the_engine_was_built_without() -> None:
    llm = nano_engine(0, greedy_only=True)
    for field, p in (
        ("temperature", params(temperature=1.0)),
        ("min_tokens", params(min_tokens=1)),
        ("logprobs", params(logprobs=0)),
    ):
        with pytest.raises(RequestError, match=field) as caught:
            llm.add_request("a", [3], p)
        assert caught.value.field == field
    lean = nano_engine(0, greedy_only=True, logits_processing=True, max_logprobs=2)
    out = run(lean, prompts(), params(logprobs=2, **RULES["all"])).tokens
    assert out == run(engine(0), prompts(), params(**RULES["all"])).tokens
    with pytest.raises(RequestError, match="max_logprobs 2"):
        lean.add_request("a", [3], params(logprobs=3))


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("logit_bias", {"logit_bias": {10**6: 1.0}}),
        ("bad_words", {"bad_words": ((3, 10**6),)}),
        ("stop_token_ids", {"stop_token_ids": (10**6,)}),
        ("stop_token_ids", {"stop_token_ids": tuple(range(33)), "min_tokens": 1}),
    ],
)
def test_ids_and_capacities(field: str, more: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        engine(0).add_request("a", [3], params(**more))
    assert caught.value.field == field
    assert not engine(0).has_unfinished()
