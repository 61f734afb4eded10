"""Random traffic against a one-request-at-a-time oracle: same tokens, no page lost or shared."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.tiny import Tiny
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import FinishReason, SamplingParams
from v4graph.model.params import random_params
from v4graph.plan.types import GroupPlan, Plan

TINY = Tiny(kinds=("csa", "hca"), hidden=32, hash_layers=1, topk=4, window=12, page_tokens=8)
SPEC = TINY.spec()
PARAMS = random_params(SPEC, seed=5)
MAX_LEN = 96
TOTAL = {"steps": 0, "preemptions": 0, "requests": 0}


def engine(seqs: int, tokens: int, checked: bool = False, **limits: int) -> LLMEngine:
    config = EngineConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=MAX_LEN,
        compile=False,
        checked=checked,
        device="cpu",
        **limits,
    )
    return LLMEngine.from_params(SPEC, PARAMS, config)


@pytest.fixture(scope="module")
def oracle() -> LLMEngine:
    """Runs one request at a time, with room for everything."""
    return engine(1, MAX_LEN)


def generate(llm: LLMEngine, prompt: list[int], params: SamplingParams) -> list[int]:
    llm.add_request("one", prompt, params)
    out: list[int] = []
    while llm.has_unfinished():
        for step in llm.step():
            out += step.token_ids
    return out


def tight(llm: LLMEngine, spare: int) -> None:
    """Hide pages until one full-length sequence and `spare` pages a group are left."""
    for pool in llm.pages.pools.values():
        g: GroupPlan = pool.group
        keep = min(g.pages_per_seq + spare, g.num_pages - 1)
        del pool._free[: len(pool._free) - keep]
        pool.group = replace(g, num_pages=keep + 1)


@dataclass
class Sent:
    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    ended: FinishReason | None = None


@settings(
    max_examples=14,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32 - 1), seqs=st.integers(2, 5), spare=st.integers(0, 12))
def test_random_traffic(oracle: LLMEngine, seed: int, seqs: int, spare: int) -> None:
    rng = random.Random(seed)
    llm = engine(seqs, rng.choice((5, 16, 40)), checked=seed % 3 == 0)
    tight(llm, spare)
    sent: dict[str, Sent] = {}
    arrivals, steps = 22, 0
    while arrivals or llm.has_unfinished():
        if arrivals and rng.random() < 0.3:
            arrivals -= 1
            name = f"r{arrivals}"
            prompt = [
                rng.randrange(2, SPEC.vocab_size) for _ in range(rng.choice((1, 4, 9, 30, 70)))
            ]
            params = SamplingParams(
                max_tokens=rng.choice((1, 3, 12, 40)),
                temperature=rng.choice((0.0, 0.0, 0.8)),
                top_k=rng.choice((0, 20)),
                seed=rng.randrange(2**40),
                ignore_eos=rng.random() < 0.5,
            )
            sent[name] = Sent(prompt, params, [])
            llm.add_request(name, prompt, params)
        if sent and rng.random() < 0.02:
            name = rng.choice(list(sent))
            llm.abort(name)
            sent[name].ended = sent[name].ended or FinishReason.ABORT
        for out in llm.step():
            request = sent[out.request_id]
            assert request.ended is None
            request.tokens += out.token_ids
            request.ended = out.finish_reason
        steps += 1
        if steps % 5 == 0:
            llm.check_integrity()
        assert steps < 5000, "no progress"
    llm.check_integrity()
    assert all(pool.num_used == 0 for pool in llm.pages.pools.values())
    assert all((table == 0).all() for table in llm.pages.table.block_tables.values())
    for name, request in sent.items():
        expected = generate(oracle, request.prompt, request.params)
        if request.ended is FinishReason.ABORT:
            expected = expected[: len(request.tokens)]
        assert request.tokens == expected, name
    TOTAL["steps"] += steps
    TOTAL["preemptions"] += int(llm.metrics["num_preemptions"])
    TOTAL["requests"] += len(sent)


def test_the_traffic_was_heavy() -> None:
    """The runs above took 2,000 steps and preempted; otherwise they show little."""
    assert TOTAL["steps"] >= 2000
    assert TOTAL["preemptions"] >= 20


@pytest.mark.parametrize("group", [g for g in SPEC.cache_groups])
def test_admission_counts_every_group(group: str, oracle: LLMEngine) -> None:
    """With any one group at its minimum, requests wait or are preempted; none fails."""
    llm = engine(4, 32, checked=True)
    pool = llm.pages.pools[group]
    keep = pool.group.pages_per_seq
    del pool._free[: len(pool._free) - keep]
    pool.group = replace(pool.group, num_pages=keep + 1)
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    prompts = {f"p{i}": [2 + (i * 7 + j) % 90 for j in range(40 + i)] for i in range(4)}
    out: dict[str, list[int]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        llm.add_request(name, prompt, params)
    while llm.has_unfinished():
        for step in llm.step():
            out[step.request_id] += step.token_ids
        llm.check_integrity()
    for name, prompt in prompts.items():
        assert out[name] == generate(oracle, prompt, params)


def test_seeds_reproduce_alone_and_in_a_batch(oracle: LLMEngine) -> None:
    params = SamplingParams(max_tokens=25, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True)
    prompt = list(range(2, 30))
    alone = generate(oracle, prompt, params)
    llm = engine(4, 64)
    for i in range(3):
        other = SamplingParams(max_tokens=40, temperature=1.3, seed=i)
        llm.add_request(f"other{i}", [5 + i] * (3 + i), other)
    llm.add_request("mine", prompt, params)
    out: list[int] = []
    while llm.has_unfinished():
        for step in llm.step():
            out += step.token_ids if step.request_id == "mine" else []
    assert out == alone
    different = replace(params, seed=12)
    assert generate(oracle, prompt, different) != alone


def test_a_long_prompt_does_not_starve_decoding() -> None:
    llm = engine(2, 8)
    greedy = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    llm.add_request("short", [3, 4], greedy)
    llm.step()
    llm.add_request("long", list(range(2, 82)), greedy)
    tokens = sum(len(out.token_ids) for _ in range(20) for out in llm.step())
    assert tokens >= 9, "decode and prefill steps should alternate"


def test_pools_hold_the_plan(oracle: LLMEngine) -> None:
    """The pools on the device are as large as the plan says."""
    plan: Plan = oracle.plan
    for layer, pools in zip(plan.layers, oracle.programs.state.pools, strict=True):
        caches = dict(SPEC.attention[layer.attention].caches)
        for role, pool in pools.items():
            g = plan.group(caches[role])
            assert pool.shape == (g.num_pages * g.page_rows, g.row_dim)
            assert pool.dtype is getattr(torch, g.row_dtype)
