"""A V4 variant that nobody wrote code for: YAML text in, the uncached oracle's tokens out."""

from __future__ import annotations

import pytest
import torch

from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import SamplingParams
from v4graph.model.params import random_params
from v4graph.model.recompute import RecomputeModel
from v4graph.spec.load import load_spec_text
from v4graph.spec.model import ModelSpec

TEXT = """
name: variant
vocab_size: 80
hidden_size: 40
max_position_embeddings: 512
eos_token_id: 1
residual: RESIDUAL
rope:
  near: {theta: 5000, dim: 12}
  far: {theta: 80000, dim: 12, yarn: {factor: 8, original_max_position: 64}}
cache_groups:
  recent: {kind: sliding_window, window: 10, row: {dim: 24}, page_tokens: 6}
  fine: {kind: compressed, ratio: 8, overlap: true, row: {dim: 24}, page_tokens: 16}
  fine_keys: {kind: compressed, ratio: 8, overlap: true, row: {dim: 16}, page_tokens: 24}
  fine_open: {kind: compressor_state, of: fine, page_tokens: 5}
  keys_open: {kind: compressor_state, of: fine_keys, page_tokens: 8}
  coarse: {kind: compressed, ratio: 16, row: {dim: 24}, page_tokens: 32}
  coarse_open: {kind: compressor_state, of: coarse, page_tokens: 7}
attention:
  heavy:
    kind: heavily_compressed_attention
    heads: 6
    head_dim: 24
    q_lora_rank: 20
    o_groups: 3
    o_lora_rank: 10
    rope: far
    caches: {window: recent, compressed: coarse, state: coarse_open}
  sparse:
    like: heavy
    kind: compressed_sparse_attention
    indexer: {heads: 12, dim: 16, topk: 3}
    caches:
      {window: recent, compressed: fine, state: fine_open, index: fine_keys,
       index_state: keys_open}
  local:
    like: heavy
    kind: sliding_attention
    rope: near
    caches: {window: recent}
ffn:
  dense: {kind: dense, intermediate: 56, clamp: 7.0}
  gated: {kind: moe, experts: 10, topk: 3, intermediate: 24, scoring: sigmoid, scale: 2.0}
  soft:
    {kind: moe, experts: 5, topk: 2, intermediate: 28, scoring: softmax, norm_topk: false,
     shared_experts: 0}
layers:
  - {attention: heavy, ffn: dense}
  - {attention: [sparse, local], ffn: [gated, soft]}
  - {attention: sparse, ffn: soft}
weights: {linear: f32, experts: f32, other: f32}
"""
RESIDUALS = ["{kind: plain}", "{kind: hyper_connections, streams: 3, sinkhorn_iters: 8}"]
LENGTHS = (1, 7, 16, 45, 70)
NEW_TOKENS = 40


@pytest.fixture(scope="module", params=RESIDUALS, ids=["plain", "hyper_connections"])
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return load_spec_text(TEXT.replace("RESIDUAL", request.param))


def test_the_text_means_what_it_says(spec: ModelSpec) -> None:
    assert spec.layer_kinds == [
        ("heavy", "dense"),
        ("sparse", "gated"),
        ("local", "soft"),
        ("sparse", "soft"),
    ]


def test_concurrent_greedy_tokens_are_the_oracles(spec: ModelSpec) -> None:
    """Each token is the uncached model's argmax over everything before it.

    One oracle forward over the finished text is that chain: a position sees no later token.
    """
    params = random_params(spec, seed=11)
    config = EngineConfig(
        max_num_seqs=3,
        max_num_batched_tokens=24,
        max_model_len=128,
        compile=False,
        checked=True,
        device="cpu",
    )
    llm = LLMEngine.from_params(spec, params, config)
    gen = torch.Generator().manual_seed(4)
    texts = {
        f"r{n}": torch.randint(2, spec.vocab_size, (n,), generator=gen).tolist() for n in LENGTHS
    }
    prompts = {name: len(ids) for name, ids in texts.items()}
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for name, ids in texts.items():
        llm.add_request(name, list(ids), greedy)
    most_running = 0
    while llm.has_unfinished():
        for out in llm.step():
            texts[out.request_id] += out.token_ids
        most_running = max(most_running, int(llm.metrics["num_running"]))
        llm.check_integrity()
    assert most_running == config.max_num_seqs

    model = RecomputeModel(spec, params)
    for name, ids in texts.items():
        assert len(ids) == prompts[name] + NEW_TOKENS
        with torch.no_grad():
            logits = model.forward(torch.tensor([ids[:-1]])).logits[0]
        best = logits.topk(2).values
        # Where two logits are as good as equal the last bits would decide.
        assert float((best[:, 0] - best[:, 1])[prompts[name] - 1 :].min()) > 1e-4, name
        assert ids[prompts[name] :] == logits.argmax(-1)[prompts[name] - 1 :].tolist(), name
