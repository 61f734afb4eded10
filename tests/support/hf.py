"""transformers' DeepSeek-V4 built from a spec: the independent oracle of the main model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from v4graph.model.params import unstack_experts
from v4graph.spec.model import (
    CompressedGroup,
    HyperConnections,
    ModelSpec,
    ScoredMoe,
    SlidingWindowGroup,
    SparseAttention,
)


def config_of(spec: ModelSpec) -> DeepseekV4Config:
    """The transformers configuration of a V4 spec."""
    first = spec.attention[spec.layer_kinds[0][0]]
    moe = next(f for f in spec.ffn.values() if isinstance(f, ScoredMoe))
    assert isinstance(spec.residual, HyperConnections)
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    index: dict[str, int] = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 4}
    for a in spec.attention.values():
        if a.kind != "sliding_attention":
            group = spec.cache_groups[a.caches.compressed]
            assert isinstance(group, CompressedGroup)
            rates[a.kind] = group.ratio
        if isinstance(a, SparseAttention):
            i = a.indexer
            index = {"index_n_heads": i.heads, "index_head_dim": i.dim, "index_topk": i.topk}
    window = spec.cache_groups[first.caches.window]
    assert isinstance(window, SlidingWindowGroup)
    dim = next(iter(spec.rope.values())).dim
    partial = dim / first.head_dim
    compress: dict[str, Any] = {"rope_type": "default", "partial_rotary_factor": partial}
    compress_rope = spec.rope["compress" if "compress" in spec.rope else "main"]
    compress["rope_theta"] = compress_rope.theta
    if compress_rope.yarn is not None:
        y = compress_rope.yarn
        compress |= {
            "rope_type": "yarn",
            "factor": y.factor,
            "original_max_position_embeddings": y.original_max_position,
            "beta_fast": y.beta_fast,
            "beta_slow": y.beta_slow,
            "attention_factor": 1.0,
        }
    main = {"rope_type": "default", "partial_rotary_factor": partial}
    main["rope_theta"] = spec.rope["main"].theta if "main" in spec.rope else 10000.0
    return DeepseekV4Config(
        architectures=["DeepseekV4ForCausalLM"],
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        moe_intermediate_size=moe.intermediate,
        num_hidden_layers=len(spec.layer_kinds),
        num_attention_heads=first.heads,
        head_dim=first.head_dim,
        q_lora_rank=first.q_lora_rank,
        num_experts_per_tok=moe.topk,
        n_routed_experts=moe.experts,
        routed_scaling_factor=moe.scale,
        max_position_embeddings=spec.max_position_embeddings,
        layer_types=[spec.attention[a].kind for a, _ in spec.layer_kinds],
        mlp_layer_types=[spec.ffn[f].kind for _, f in spec.layer_kinds],
        compress_rates=rates,
        hc_mult=spec.residual.streams,
        hc_sinkhorn_iters=spec.residual.sinkhorn_iters,
        sliding_window=window.window,
        o_groups=first.o_groups,
        o_lora_rank=first.o_lora_rank,
        partial_rotary_factor=partial,
        rope_parameters={"main": main, "compress": compress},
        swiglu_limit=moe.clamp,
        bos_token_id=spec.bos_token_id,
        eos_token_id=spec.eos_token_id,
        num_nextn_predict_layers=0,
        **index,
    )


def write_checkpoint(spec: ModelSpec, params: Mapping[str, Tensor], directory: Path) -> None:
    """A checkpoint directory that both transformers and v4graph read."""
    config_of(spec).save_pretrained(directory)
    tensors = {k: v.contiguous() for k, v in unstack_experts(params)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load(directory: Path) -> DeepseekV4ForCausalLM:
    """The checkpoint in transformers, float32, eager attention."""
    model = DeepseekV4ForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()
