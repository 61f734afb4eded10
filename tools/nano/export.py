"""Write a model folder: safetensors shards, their index, and config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from v4graph.model.params import unstack_experts
from v4graph.plan.weights import inventory
from v4graph.spec.model import HeavyAttention, ModelSpec, SparseAttention

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


def save_weights(spec: ModelSpec, params: Mapping[str, Tensor], folder: Path, shards: int) -> int:
    """Write `shards` files of about equal size; returns the bytes of all tensors."""
    tensors = dict(unstack_experts(params))
    entries = inventory(spec)
    total = sum(e.num_bytes for e in entries)
    parts: list[dict[str, Tensor]] = [{}]
    filled = 0
    for e in entries:
        if filled >= total * len(parts) / shards:
            parts.append({})
        parts[-1][e.name] = tensors[e.name].detach().to("cpu", _DTYPES[e.dtype]).contiguous()
        filled += e.num_bytes
    folder.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    for i, part in enumerate(parts, 1):
        name = f"model-{i:05d}-of-{len(parts):05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(hf_config(spec), indent=2) + "\n")
    return total


def hf_config(spec: ModelSpec) -> dict[str, object]:
    """The `config.json` with which transformers loads the main model (it ignores `mtp.*`)."""
    attention = [spec.attention[a] for a, _ in spec.layer_kinds]
    a = attention[0]
    sparse = next(x for x in attention if isinstance(x, SparseAttention))
    heavy = next(x for x in attention if isinstance(x, HeavyAttention))
    f = spec.ffn[spec.layer_kinds[-1][1]]
    r, groups, main = spec.residual, spec.cache_groups, spec.rope[a.rope]
    compress = spec.rope[sparse.rope]
    yarn = compress.yarn
    share = main.dim / a.head_dim
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": len(attention),
        "layer_types": [x.kind for x in attention],
        "mlp_layer_types": [spec.ffn[x].kind for _, x in spec.layer_kinds],
        "compress_rates": {
            sparse.kind: groups[sparse.caches.compressed].ratio,
            heavy.kind: groups[heavy.caches.compressed].ratio,
        },
        "num_nextn_predict_layers": 1,
        "num_attention_heads": a.heads,
        "num_key_value_heads": 1,
        "head_dim": a.head_dim,
        "qk_rope_head_dim": main.dim,
        "partial_rotary_factor": share,
        "q_lora_rank": a.q_lora_rank,
        "o_groups": a.o_groups,
        "o_lora_rank": a.o_lora_rank,
        "sliding_window": groups[a.caches.window].window,
        "index_n_heads": sparse.indexer.heads,
        "index_head_dim": sparse.indexer.dim,
        "index_topk": sparse.indexer.topk,
        "n_routed_experts": f.experts,
        "n_shared_experts": f.shared_experts,
        "num_experts_per_tok": f.topk,
        "moe_intermediate_size": f.intermediate,
        "scoring_func": f.scoring,
        "norm_topk_prob": f.norm_topk,
        "routed_scaling_factor": f.scale,
        "swiglu_limit": f.clamp,
        "hidden_act": "silu",
        "hc_mult": r.streams,
        "hc_sinkhorn_iters": r.sinkhorn_iters,
        "hc_eps": r.eps,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": main.theta,
        "compress_rope_theta": compress.theta,
        "rope_parameters": {
            "main": {
                "rope_type": "default",
                "rope_theta": main.theta,
                "partial_rotary_factor": share,
            },
            "compress": {
                "rope_type": "yarn",
                "rope_theta": compress.theta,
                "partial_rotary_factor": share,
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original_max_position,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                # V4 scales no amplitude; transformers would derive one from the factor.
                "attention_factor": 1.0,
            },
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "pad_token_id": 2,
        "use_cache": True,
    }
