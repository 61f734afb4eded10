"""Random traffic under random rules: every drafter's greedy output is that of no drafter.

Stop tokens, lengths and the end of the context fall inside rounds, requests join late, pages run
short, prefixes are shared; penalties, biases and `min_tokens` read the draft prefix.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from tests.engine import test_dspark as dspark
from tests.engine.test_properties import tight
from tests.support import chain
from tests.support.speculation import run
from tests.support.tiny import SHAPES
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import SamplingParams
from v4graph.model.params import random_params
from v4graph.spec.model import ModelSpec

DRAFTERS = {"mtp": "mtp", "chain": "mtp", "dspark": "dspark", "ngram": "ngram"}
LENGTHS = (1, 2, 7, 8, 9, 16, 17, 33, 60)


@cache
def model(drafter: str) -> tuple[ModelSpec, dict[str, Tensor]]:
    if drafter == "chain":
        return chain.spec(3), chain.params(3)
    if drafter == "dspark":
        return dspark.TINY.spec(), dspark.params_of(dspark.TINY)
    tiny = replace(SHAPES["mixed"], max_len=160, page_tokens=8)
    data = tiny.data()
    data["speculative"]["ngram"] = {"kind": "ngram", "num_draft_tokens": 4}
    spec = ModelSpec.model_validate(data)
    return spec, random_params(spec, 3)


def engine(drafter: str, k: int, **more: Any) -> LLMEngine:
    spec, params = model(drafter)
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=24,
        max_model_len=90,
        compile=False,
        checked=True,
        device="cpu",
        logits_processing=True,
        max_logprobs=3,
        speculative=DRAFTERS[drafter] if k else "none",
        num_draft_tokens=k or None,
        **more,
    )
    return LLMEngine.from_params(spec, dict(params), config)


def some_params(rng: random.Random, vocab: int) -> SamplingParams:
    """Greedy, with each rule in about a third of the requests."""
    tokens = rng.choice((1, 2, 5, 20, 99))
    chosen: dict[str, Any] = {
        "stop_token_ids": (rng.randrange(2, vocab),),
        "repetition_penalty": rng.choice((1.3, 0.8)),
        "frequency_penalty": rng.choice((0.5, -0.5)),
        "presence_penalty": 0.7,
        "logit_bias": {rng.randrange(2, vocab): rng.choice((3.0, -100.0))},
        "bad_words": ((rng.randrange(2, vocab), rng.randrange(2, vocab)),),
        "min_tokens": min(tokens, 4),
        "logprobs": 2,
    }
    kept = {name: value for name, value in chosen.items() if rng.random() < 0.35}
    ignore_eos = rng.random() < 0.5
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=ignore_eos, **kept)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_output_is_that_of_no_drafter(drafter: str, seed: int) -> None:
    rng = random.Random(f"{drafter} {seed}")
    vocab = model(drafter)[0].vocab_size
    shared = [rng.randrange(2, vocab) for _ in range(max(LENGTHS))]
    prompts, params = {}, {}
    for i in range(6):
        length = rng.choice(LENGTHS)
        own = [rng.randrange(2, vocab) for _ in range(length)]
        prompts[str(i)] = shared[:length] if rng.random() < 0.6 else own
        params[str(i)] = some_params(rng, vocab)
    k = rng.randint(1, 5 if drafter == "dspark" else 8)
    llm = engine(drafter, k, overlap=seed % 2 == 0)
    if seed == 2:
        tight(llm, 1)
    join = {name: rng.randint(1, 6) for name in prompts if rng.random() < 0.4}
    plain = engine(drafter, 0, overlap=False, prefix_cache=False)
    expected = run(plain, prompts, params, record=False)
    session = run(llm, prompts, params, join=join, record=False)
    assert session.tokens == expected.tokens
    assert session.reasons == expected.reasons


def test_one_token_behind_one_token() -> None:
    """A chain's cached units need more tokens behind them than such a request ever has."""
    llm = engine("chain", 4)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    assert len(run(llm, {"a": [3]}, params).tokens["a"]) == 1
