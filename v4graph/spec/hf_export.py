"""From a spec to its checkpoint's `config.json`, in the keys of the published DeepSeek-V4 files.

The inverse of `v4graph.spec.hf_config` as far as that file goes: page sizes, row formats of caches
and how many tokens are drafted have no key there, and are left out. What changes the model's
results and has no key either is told.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from v4graph.spec.hf_fields import FIXED
from v4graph.spec.hf_layers import CSA, HCA
from v4graph.spec.model import (
    Attention,
    CompressedGroup,
    DenseFfn,
    DsparkSpeculation,
    Ffn,
    HashMoe,
    HyperConnections,
    ModelSpec,
    MtpSpeculation,
    Rope,
    SlidingAttention,
    SlidingWindowGroup,
    SparseAttention,
    StoredDrafter,
)

OFFICIAL_CSA_RATIO = 4
"""What `compress_ratios` means by compressed sparse attention; another one needs its own key."""
DSPARK_KEYS = ("block_size", "target_layer_ids", "noise_token_id", "markov_rank")
"""Fields of a `dspark` mode that config.json has too, as `dspark_*`."""
_TORCH_DTYPES = {"bf16": "bfloat16", "f32": "float32"}
_EXPERT_DTYPES = {"fp4": "fp4", "fp8_block": "fp8"}
_SHARED = ("heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank")


@dataclass(frozen=True)
class OfficialConfig:
    """A config.json, or why there is none."""

    values: dict[str, Any]
    missing: tuple[str, ...]
    """What the spec says and the official keys cannot; `values` counts only if this is empty."""


@dataclass
class _Faults:
    found: list[str] = field(default_factory=list)

    def same(self, what: str, values: Iterable[Any]) -> Any:
        """The one value that all layers share; a config.json has one key for it."""
        different: list[Any] = []
        for value in values:
            if value not in different:
                different.append(value)
        if len(different) > 1:
            shown = ", ".join(str(v) for v in different)
            self.found.append(f"{what} differs between layers: {shown}")
        return different[0] if different else None


def official_config(spec: ModelSpec) -> OfficialConfig:
    """The `config.json` of a checkpoint of `spec`, with every reason why it cannot be written."""
    faults = _Faults()
    drafts = [m for m in spec.speculative.values() if isinstance(m, StoredDrafter)][:1]
    kinds = spec.layer_kinds
    used = {a for a, _ in kinds} | {m.attention for m in drafts}
    attention = [spec.attention[name] for name in spec.attention if name in used]
    ffns = [spec.ffn[n] for n in spec.ffn if n in {f for _, f in kinds} | {m.ffn for m in drafts}]
    num_drafts = sum(m.num_layers for m in drafts)
    values: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        **{key: allowed[0] for key, allowed in FIXED.items() if key != "mlp_bias"},
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": len(kinds),
        "num_nextn_predict_layers": _claimed(drafts),
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.norm_eps,
        # Null is written too: absent keys have defaults.
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "initializer_range": 0.02,
        "use_cache": True,
        **_attention(attention, faults),
        **_window(spec, attention, faults),
        **_ratios(spec, num_drafts, faults),
        **_rope(spec, attention, faults),
        **_ffn(spec, ffns, faults),
        **_residual(spec, faults),
        **_weights(spec),
    }
    if any(isinstance(spec.ffn[m.ffn], HashMoe | DenseFfn) for m in drafts):
        faults.found.append("the draft layer's ffn is not of kind moe")
    for mode in drafts:
        if isinstance(mode, DsparkSpeculation):
            values |= {f"dspark_{key}": getattr(mode, key) for key in DSPARK_KEYS}
    if any(isinstance(m, MtpSpeculation) and m.mask_position_zero for m in drafts):
        faults.found.append("mask_position_zero of the draft layer")
    return OfficialConfig(values, tuple(faults.found))


def _claimed(drafts: Iterable[StoredDrafter]) -> int:
    """Published DSpark files say 1, as the files of an MTP layer do."""
    return sum(m.num_layers if isinstance(m, MtpSpeculation) else 1 for m in drafts)


def _attention(entries: list[Attention], faults: _Faults) -> dict[str, Any]:
    shared = {k: faults.same(k, (getattr(a, k) for a in entries)) for k in _SHARED}
    out = {
        "num_attention_heads": shared["heads"],
        "head_dim": shared["head_dim"],
        "q_lora_rank": shared["q_lora_rank"],
        "o_groups": shared["o_groups"],
        "o_lora_rank": shared["o_lora_rank"],
        "attention_dropout": 0.0,
    }
    index = faults.same("indexer", (a.indexer for a in entries if isinstance(a, SparseAttention)))
    if index is not None:
        out |= {
            "index_n_heads": index.heads,
            "index_head_dim": index.dim,
            "index_topk": index.topk,
        }
    return out


def _window(spec: ModelSpec, entries: list[Attention], faults: _Faults) -> dict[str, Any]:
    groups = (spec.cache_groups[a.caches.window] for a in entries)
    windows = (g.window for g in groups if isinstance(g, SlidingWindowGroup))
    return {"sliding_window": faults.same("window", windows)}


def _ratios(spec: ModelSpec, num_drafts: int, faults: _Faults) -> dict[str, Any]:
    """`compress_ratios`: 0 for a window-only layer, draft layers last.

    One ratio for both kinds of compressed layer is told in transformers' keys instead.
    """
    sparse: set[int] = set()
    heavy: set[int] = set()
    ratios = []
    for name, _ in spec.layer_kinds:
        entry = spec.attention[name]
        ratio = 0
        if not isinstance(entry, SlidingAttention):
            group = spec.cache_groups[entry.caches.compressed]
            ratio = group.ratio if isinstance(group, CompressedGroup) else 0
            (sparse if isinstance(entry, SparseAttention) else heavy).add(ratio)
        ratios.append(ratio)
    csa = faults.same("ratio of compressed sparse attention", sorted(sparse)) or OFFICIAL_CSA_RATIO
    hca = faults.same("ratio of heavily compressed attention", sorted(heavy))
    if hca == csa:
        kinds = [spec.attention[name].kind for name, _ in spec.layer_kinds]
        return {"layer_types": kinds, "compress_rates": {CSA: csa, HCA: hca}}
    out: dict[str, Any] = {"compress_ratios": ratios + [0] * num_drafts}
    if csa != OFFICIAL_CSA_RATIO:
        out["compress_rate_csa"] = csa
    return out


def _rope(spec: ModelSpec, entries: list[Attention], faults: _Faults) -> dict[str, Any]:
    def of(sliding: bool) -> Rope | None:
        kind = "window-only" if sliding else "compressed"
        ropes = (spec.rope[a.rope] for a in entries if isinstance(a, SlidingAttention) is sliding)
        return faults.same(f"rope of {kind} layers", ropes)

    main, compress = of(True), of(False)
    if main is not None and main.yarn is not None:
        faults.found.append("YaRN in window-only layers: rope_scaling is that of compressed ones")
    known = [rope for rope in (main, compress) if rope is not None]
    out: dict[str, Any] = {
        "qk_rope_head_dim": faults.same("rope dim", (rope.dim for rope in known)),
        # Of a kind of layer that the model lacks, the published value.
        "rope_theta": main.theta if main else 10000,
        "compress_rope_theta": compress.theta if compress else 160000,
    }
    if compress is not None and compress.yarn is not None:
        out["rope_scaling"] = {
            "type": "yarn",
            "factor": compress.yarn.factor,
            "beta_fast": compress.yarn.beta_fast,
            "beta_slow": compress.yarn.beta_slow,
            "original_max_position_embeddings": compress.yarn.original_max_position,
        }
    return out


def _ffn(spec: ModelSpec, entries: list[Ffn], faults: _Faults) -> dict[str, Any]:
    kinds = [spec.ffn[f].kind for _, f in spec.layer_kinds]
    num_hash = next((i for i, kind in enumerate(kinds) if kind != "hash_moe"), len(kinds))
    leading = "hash_moe" not in kinds[num_hash:]
    if any(isinstance(f, DenseFfn) for f in entries):
        faults.found.append("ffn of kind dense")
    moes = [f for f in entries if not isinstance(f, DenseFfn)]
    names = {
        "n_routed_experts": "experts",
        "num_experts_per_tok": "topk",
        "moe_intermediate_size": "intermediate",
        "n_shared_experts": "shared_experts",
        "scoring_func": "scoring",
        "norm_topk_prob": "norm_topk",
        "routed_scaling_factor": "scale",
        "swiglu_limit": "clamp",
    }
    out = {key: faults.same(f"ffn {n}", (getattr(f, n) for f in moes)) for key, n in names.items()}
    # `num_hash_layers` counts the first layers; another order is told in transformers' key.
    return {**out, **({"num_hash_layers": num_hash} if leading else {"mlp_layer_types": kinds})}


def _residual(spec: ModelSpec, faults: _Faults) -> dict[str, Any]:
    residual = spec.residual
    if not isinstance(residual, HyperConnections):
        faults.found.append(f"residual of kind {residual.kind}; the published models have streams")
        return {}
    return {
        "hc_mult": residual.streams,
        "hc_sinkhorn_iters": residual.sinkhorn_iters,
        "hc_eps": residual.eps,
    }


def _weights(spec: ModelSpec) -> dict[str, Any]:
    """Storage formats. `scale_fmt` is ue8m0 for F32 scales too, as in the published base files."""
    weights = spec.weights
    out: dict[str, Any] = {"torch_dtype": _TORCH_DTYPES[weights.other]}
    if weights.linear == "fp8_block":
        out["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    if weights.experts in _EXPERT_DTYPES:
        out["expert_dtype"] = _EXPERT_DTYPES[weights.experts]
    return out
