"""DSpark on tiny models: each draft, accepted count and token equals an uncached recompute."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_properties import tight
from tests.support.speculation import Session, greedy, run
from tests.support.tiny import SHAPES, Tiny
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import SamplingParams
from v4graph.errors import PlanError
from v4graph.model.params import random_params
from v4graph.model.recompute import RecomputeModel
from v4graph.model.rounds import RoundOracle
from v4graph.ops.norm import rms_norm
from v4graph.spec.model import DsparkSpeculation

TINY = replace(SHAPES["mixed"], dspark=(3, 5), window=16, page_tokens=8, max_len=160)
VARIANTS = {
    "mixed": TINY,
    "one layer": replace(TINY, dspark=(1, 4), kinds=("csa", "hca"), hash_layers=0),
    "plain": replace(TINY, dspark=(2, 8), residual="plain", window=7, page_tokens=12),
}
LENGTHS = (1, 3, 16, 17, 44, 8, 33)
NEW = 24


@cache
def params_of(tiny: Tiny) -> dict[str, Tensor]:
    """Weights whose drafts are accepted often: the main model is close to a bigram model, and the
    Markov head is that bigram model."""
    spec = tiny.spec()
    params = random_params(spec, 3)
    params["embed.weight"] *= 6
    last = f"mtp.{tiny.dspark[0] - 1 if tiny.dspark else 0}.markov_head"
    bigram = rms_norm(params["embed.weight"], params["norm.weight"], spec.norm_eps)
    params[f"{last}.markov_w1.weight"] = bigram
    params[f"{last}.markov_w2.weight"] = 0.7 * params["head.weight"]
    return params


def engine(tiny: Tiny = TINY, k: int | None = None, **more: Any) -> LLMEngine:
    config: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
        "compile": False,
        "checked": True,
        "device": "cpu",
        "greedy_only": True,
        "speculative": "none" if k == 0 else "dspark",
        "num_draft_tokens": k or None,
        **more,
    }
    return LLMEngine.from_params(tiny.spec(), dict(params_of(tiny)), EngineConfig(**config))


def prompts(tiny: Tiny = TINY, lengths: tuple[int, ...] = LENGTHS) -> dict[str, list[int]]:
    gen = torch.Generator().manual_seed(1)
    return {str(n): torch.randint(2, tiny.vocab, (n,), generator=gen).tolist() for n in lengths}


@cache
def plain(tiny: Tiny) -> dict[str, list[int]]:
    """Tokens without speculation."""
    return run(engine(tiny, 0), prompts(tiny), greedy(NEW)).tokens


@cache
def oracle(tiny: Tiny) -> RoundOracle:
    spec = tiny.spec()
    mode = spec.speculative["dspark"]
    assert isinstance(mode, DsparkSpeculation)
    return RoundOracle(RecomputeModel(spec, params_of(tiny)), mode)


def assert_no_gap(session: Session, tiny: Tiny = TINY) -> None:
    assert session.differences(oracle(tiny)) == []
    assert session.num_accepted > 8


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_no_gap_in_batches(name: str, overlap: bool) -> None:
    """More requests than slots; prompts in chunks."""
    tiny = VARIANTS[name]
    session = run(engine(tiny, overlap=overlap), prompts(tiny), greedy(NEW))
    assert session.tokens == plain(tiny)
    assert_no_gap(session, tiny)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_fewer_drafts_than_a_block_holds(k: int) -> None:
    session = run(engine(k=k), prompts(), greedy(NEW))
    assert session.tokens == plain(TINY)
    assert all(len(r.drafts) <= k for own in session.rounds.values() for r in own)
    assert_no_gap(session)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_through_preemptions_joins_and_aborts(prefix_cache: bool) -> None:
    llm = engine(prefix_cache=prefix_cache)
    tight(llm, 1)
    session = run(llm, prompts(), greedy(NEW), join={"44": 2, "17": 5}, abort={"16": 7})
    for name, tokens in session.tokens.items():
        assert tokens == plain(TINY)[name][: len(tokens)]
        assert len(tokens) == NEW or name == "16"
    assert_no_gap(session)
    assert llm.metrics["num_preemptions"] > 0


def test_a_cached_prefix_brings_the_context_rows() -> None:
    """A public engine lost acceptance after a hit because its context rows were not cached."""
    ids = prompts(lengths=(70,))["70"]
    llm = engine(max_num_seqs=1)
    cold = run(llm, {"cold": ids}, greedy(NEW))
    warm = run(llm, {"warm": ids}, greedy(NEW))
    assert llm.metrics["prefix_hit_tokens"] >= 64
    assert warm.tokens["warm"] == cold.tokens["cold"]
    assert [r.drafts for r in warm.rounds["warm"]] == [r.drafts for r in cold.rounds["cold"]]
    assert_no_gap(warm)


def test_at_the_end_of_the_context() -> None:
    """Blocks reach behind the longest sequence; their drafts stop there."""
    longest = 60
    some = prompts(lengths=(41, 44, 47))
    session = run(engine(max_model_len=longest), some, greedy(99))
    expected = run(engine(k=0, max_model_len=longest), some, greedy(99)).tokens
    assert session.tokens == expected
    assert {n: len(t) + int(n) for n, t in expected.items()} == dict.fromkeys(some, longest)
    assert_no_gap(session)


def test_compiled_rounds_equal_eager_ones() -> None:
    """One layer kind and one program a mode: compiling takes its time."""
    tiny = replace(TINY, kinds=("swa",), hash_layers=0, residual="plain", dspark=(2, 3))
    some = prompts(lengths=(3, 33))
    more: dict[str, Any] = {"checked": False, "compile": True, "max_num_seqs": 2}
    llm = engine(tiny, prefill_buckets=((24, 2),), decode_buckets=(2,), **more)
    session = run(llm, some, greedy(NEW))
    assert session.tokens == run(engine(tiny, 0), some, greedy(NEW)).tokens
    assert_no_gap(session, tiny)
    assert llm.metrics["num_recompilations"] == 0


def test_seeds_and_greedy_requests_beside_sampled_ones() -> None:
    """Sampled requests are lossless in distribution only; a seed gives the same tokens alone."""
    some = prompts()
    own = {
        name: SamplingParams(
            max_tokens=NEW, temperature=0.8 * (i % 2), ignore_eos=True, seed=i, top_k=20
        )
        for i, name in enumerate(some)
    }
    together = run(engine(greedy_only=False), some, own).tokens
    for i, name in enumerate(some):
        if i % 2 == 0:
            assert together[name] == plain(TINY)[name]
        alone = run(engine(greedy_only=False, max_num_seqs=1), {name: some[name]}, own[name])
        assert alone.tokens[name] == together[name]


def test_more_drafts_than_a_block_are_refused() -> None:
    with pytest.raises(PlanError, match="num_draft_tokens 6: expected at most 5, the block_size"):
        engine(k=6)
