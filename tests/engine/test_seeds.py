"""A seed gives the same tokens however a request's work is cut up: chunks, preemptions, company.

With speculation that takes more than random numbers by position: a position that is drafted in one
run must be drafted in the other, from the same distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from tests.arch.project import ROOT
from tests.engine.test_properties import tight
from tests.engine.test_rounds import nano_engine, tiny_engine
from tests.support import nano
from tests.support.speculation import run
from v4graph.engine.engine import LLMEngine
from v4graph.engine.request import SamplingParams

Make = Callable[..., LLMEngine]
MODES: dict[str, Make] = {
    "none": partial(tiny_engine, 0),
    "mtp1": partial(tiny_engine, 1),
    "mtp3": partial(tiny_engine, 3),
    "trained": partial(nano_engine, 3),
    "lookup": partial(nano_engine, 3, speculative="ngram"),
}
ALL = pytest.mark.parametrize("mode", MODES)
RULES: dict[str, Any] = {"frequency_penalty": 0.5, "min_tokens": 3, "logprobs": 1}


def params(seed: int, **more: Any) -> SamplingParams:
    base: dict[str, Any] = {"max_tokens": 10, "temperature": 0.8, "ignore_eos": True, "seed": seed}
    return SamplingParams(**base | more)


def prompts(mode: str) -> dict[str, list[int]]:
    sizes = (5, 33, 18)
    if mode in ("trained", "lookup"):
        return dict(zip("abc", nano.prompts(*sizes), strict=True))
    return {name: [2 + n * i % 61 for i in range(n)] for name, n in zip("abc", sizes, strict=True)}


@cache
def expected(mode: str) -> dict[str, list[int]]:
    """Each request alone."""
    llm = MODES[mode]()
    return {
        name: run(llm, {name: ids}, params(i)).tokens[name]
        for i, (name, ids) in enumerate(prompts(mode).items())
    }


@ALL
@pytest.mark.parametrize("tokens", [17, 32])
def test_in_a_batch_and_in_chunks(mode: str, tokens: int) -> None:
    """33 tokens in chunks of 32, and 18 in chunks of 17, leave one token for the last."""
    llm = MODES[mode](max_num_batched_tokens=tokens)
    ids = prompts(mode)
    wanted = {name: params(i) for i, name in enumerate(ids)}
    assert run(llm, ids, wanted, join={"a": 2}).tokens == expected(mode)
    for i, (name, own) in enumerate(ids.items()):
        assert run(llm, {name: own}, params(i)).tokens[name] == expected(mode)[name]


def test_a_seed_belongs_to_a_speculative_mode() -> None:
    """As docs/serving.md says: between modes only greedy tokens are the same, and distributions
    (`test_lossless.py`)."""
    assert expected("none") != expected("mtp1")
    assert expected("mtp1") != expected("mtp3")
    assert expected("trained") != expected("lookup")
    ids = prompts("none")
    greedy = [
        run(MODES[m](), ids, params(1, temperature=0.0)).tokens for m in ("none", "mtp1", "mtp3")
    ]
    assert greedy[0] == greedy[1] == greedy[2]
    rules = (ROOT / "docs" / "serving.md").read_text()
    bullets = rules.split("\n- ")
    (said,) = (text for text in bullets if text.startswith("**Speculation changes none"))
    assert "seed" not in said
    assert "- **A seed belongs to a speculative mode.**" in rules


@ALL
def test_through_a_preemption_anywhere(mode: str) -> None:
    llm, ids = MODES[mode](overlap=False), prompts(mode)["a"]
    free = run(llm, {"a": ids}, params(0, **RULES)).tokens["a"]
    for when in (1, 2, 3, 6):
        llm.add_request("a", ids, params(0, **RULES))
        out: list[int] = []
        step = 0
        while llm.has_unfinished():
            if step == when and llm.scheduler.running:
                llm.scheduler.preempt(llm.scheduler.running[0])
            for done in llm.step():
                out += done.token_ids
            step += 1
        assert out == free, when
    assert llm.metrics["num_preemptions"] > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_through_preemptions_for_want_of_pages(k: int, overlap: bool) -> None:
    ids = {str(n): [2 + n * i % 61 for i in range(n)] for n in (5, 9, 17, 30)}
    own = {name: params(i, max_tokens=40) for i, name in enumerate(ids)}
    roomy = tiny_engine(k)
    alone = {name: run(roomy, {name: i}, own[name]).tokens[name] for name, i in ids.items()}
    llm = tiny_engine(k, overlap=overlap)
    tight(llm, 0)
    assert run(llm, ids, own).tokens == alone
    assert llm.metrics["num_preemptions"] > 0
