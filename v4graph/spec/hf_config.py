"""From the `config.json` of a DeepSeek-V4 checkpoint to a spec.

Two forms are read. The official one lists `compress_ratios` (0 and 1: window only; the entries past
`num_hidden_layers` belong to draft layers), `num_hash_layers` and `rope_scaling`. The one that
transformers 5.24 writes has `layer_types`, `compress_rates`, `mlp_layer_types` and
`rope_parameters`. Absent keys have the values that transformers fills in.

Where a file and the config differ on a dtype, the file is right: the published base checkpoints say
`scale_fmt: ue8m0` and store F32 scales.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from v4graph.spec.check_shapes import FP8_DS_GROUP
from v4graph.spec.hf_drafts import drafter
from v4graph.spec.hf_fields import DEFAULTS, FIXED, IRRELEVANT, Fields, raise_errors
from v4graph.spec.hf_layers import layer_patterns, layer_plan
from v4graph.spec.hf_weights import weight_formats
from v4graph.spec.safetensors_header import StoredCheckpoint

WINDOW_PAGE_TOKENS = 64
PAGE_TOKENS = 256
STATE_PAGE_TOKENS = 8
ROTARY_FACTOR = 0.125
"""What transformers takes for an absent `partial_rotary_factor`."""
NO_FILES = StoredCheckpoint({}, ())


@dataclass(frozen=True)
class ImportedSpec:
    """A spec as plain values, with what a reader should know about it."""

    data: dict[str, Any]
    """The YAML document; `like` is used where the shipped specs use it."""
    sources: Mapping[str, str]
    """Dotted path in `data` -> where its values came from."""
    notes: tuple[str, ...]
    """What was decided or left out, for the user to see."""


def import_config(
    config: Mapping[str, Any],
    name: str,
    stored: StoredCheckpoint = NO_FILES,
    ignored: Iterable[str] = (),
) -> ImportedSpec:
    """Read a config, with the headers of the checkpoint's files where there are any.

    Args:
        config: the parsed config.json.
        name: name of the spec; turned into lower case, foreign characters into `-`.
        ignored: config keys that the user vouches for.

    Raises:
        SpecError: every key that is unknown or has an unsupported value, at once.
    """
    errors: list[str] = []
    fields = Fields(config, "config.json", errors, DEFAULTS)
    fields.choice("model_type", FIXED["model_type"])
    raise_errors(errors)  # the keys of another architecture would only bring noise
    for key, allowed in FIXED.items():
        fields.choice(key, allowed, default=allowed[0])
    notes: list[str] = []
    head_dim = fields.integer("head_dim")
    rope_dim = _rope_dim(fields, head_dim, notes)
    rope = _rope(fields, rope_dim, notes)
    plan = layer_plan(fields, notes)
    formats, format_source = weight_formats(fields, stored, notes)
    drafts = drafter(fields, stored, plan, notes)
    unrotated = head_dim - rope_dim
    fp8_rows = formats["linear"] == "fp8_block" and unrotated > 0 and unrotated % FP8_DS_GROUP == 0
    used = set(plan.attention) | ({drafts["attention"]} if drafts else set())
    attention = _attention(fields, head_dim, used)
    ropes = {entry["rope"] for entry in attention.values() if "rope" in entry}
    data = {
        "name": re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "imported",
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps"),
        **_tied(fields, stored, notes),
        **_token_ids(fields),
        "residual": {
            "kind": "hyper_connections",
            "streams": fields.integer("hc_mult"),
            "sinkhorn_iters": fields.integer("hc_sinkhorn_iters"),
            "eps": fields.number("hc_eps"),
        },
        "rope": {key: value for key, value in rope.items() if key in ropes},
        "cache_groups": _cache_groups(fields, plan.csa_ratio, plan.hca_ratio, used, fp8_rows),
        "attention": attention,
        "ffn": _ffn(fields, set(plan.ffn) | ({"routed"} if drafts else set())),
        "layers": layer_patterns(plan),
        "speculative": {"none": {"kind": "none"}},
        "weights": {"names": "deepseek_v4", **formats},
    }
    if drafts:
        data["speculative"][drafts["kind"]] = drafts
    fields.finish({*IRRELEVANT, *ignored})
    raise_errors(errors)
    if fields.filled:
        filled = ", ".join(f"{key} {value}" for key, value in fields.filled.items())
        notes.append(f"config.json lacks keys, which have transformers' defaults: {filled}")
    return ImportedSpec(data, _sources(plan.source, format_source, stored, fp8_rows), tuple(notes))


def _tied(fields: Fields, stored: StoredCheckpoint, notes: list[str]) -> dict[str, bool]:
    """`tie_word_embeddings`, unless the files hold a head of its own: that is then the head, as in
    transformers."""
    if not fields.choice("tie_word_embeddings", (False, True), default=False):
        return {}
    if "head.weight" in stored.tensors:
        notes.append("tie_word_embeddings is true, but the files hold head.weight, which is used")
        return {}
    return {"tie_word_embeddings": True}


def _token_ids(fields: Fields) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key in ("bos_token_id", "eos_token_id"):
        value = fields.any(key)
        if value is None:
            continue
        ids = value if isinstance(value, list) and key == "eos_token_id" else [value]
        if not ids or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            fields.fail(key, "a token id")
        out[key] = value
    return out


def _rope_dim(fields: Fields, head_dim: int, notes: list[str]) -> int:
    """`qk_rope_head_dim`, or transformers' `partial_rotary_factor` of the head."""
    factor = fields.number("partial_rotary_factor", default=0)
    if not factor and not fields.has("qk_rope_head_dim"):
        factor = ROTARY_FACTOR
        notes.append(
            "config.json has no qk_rope_head_dim and no partial_rotary_factor: transformers' "
            f"default, {factor} of head_dim"
        )
    if fields.has("qk_rope_head_dim"):
        dim = fields.integer("qk_rope_head_dim", least=2)
        if factor and int(head_dim * factor) != dim:
            fields.fail("partial_rotary_factor", f"qk_rope_head_dim / head_dim = {dim}/{head_dim}")
    else:
        dim = int(head_dim * factor)
    if dim % 2 or not 0 < dim <= head_dim:
        fields.fail("qk_rope_head_dim", f"an even number of at most head_dim {head_dim}")
    return dim


def _rope(fields: Fields, dim: int, notes: list[str]) -> dict[str, Any]:
    parameters = fields.block("rope_parameters")
    nested = parameters is not None and parameters.has("main") and parameters.has("compress")
    context = fields.integer("max_position_embeddings")
    if parameters is not None and nested:
        blocks = {key: parameters.block(key) for key in ("main", "compress")}
        for key in parameters.values:
            parameters.any(key)  # transformers drops what stands beside the two blocks
        fields.any("rope_scaling")
        top = {"main": "rope_theta", "compress": "compress_rope_theta"}
        out: dict[str, Any] = {}
        for key, block in blocks.items():
            if block is None:
                continue
            # transformers fills both from `rope_theta`, not from `compress_rope_theta`.
            source = block if block.has("rope_theta") else fields
            theta = source.number("rope_theta")
            if fields.any(top[key], theta) != theta:
                notes.append(f"{top[key]} is overruled by rope_parameters.{key}.rope_theta {theta}")
            # Without a factor anywhere transformers rotates the whole head, whatever
            # `qk_rope_head_dim` says.
            factor = block.number(
                "partial_rotary_factor", fields.number("partial_rotary_factor", default=1)
            )
            head_dim = fields.integer("head_dim")
            if int(head_dim * factor) != dim:
                block.fail("partial_rotary_factor", f"{dim} rotated channels of {head_dim}")
            out[key] = {"theta": _whole(theta), "dim": dim, **_yarn(block, context, nested=True)}
            block.finish()
        return out
    scaling = parameters if parameters is not None else fields.block("rope_scaling")
    out = {
        "main": {"theta": _whole(fields.number("rope_theta")), "dim": dim},
        "compress": {"theta": _whole(fields.number("compress_rope_theta")), "dim": dim},
    }
    if scaling is not None:
        for key in ("rope_theta", "partial_rotary_factor"):
            scaling.any(key)
        out["compress"].update(_yarn(scaling, context))
        scaling.finish()
    return out


def _yarn(block: Fields, context: int, nested: bool = False) -> dict[str, Any]:
    """YaRN's keys; `context` is what `original_max_position_embeddings` defaults to."""
    key = "rope_type" if block.has("rope_type") else "type"
    kind = block.choice(key, ("default", "yarn"), default="default")
    block.any("type")
    if kind != "yarn":
        return {}
    if nested and not block.has("attention_factor"):
        # transformers takes another factor than 1 here, and in the flat form none.
        block.fail("attention_factor", "1.0")
    block.choice("attention_factor", (1.0, 1), default=1.0)
    block.choice("truncate", (True,), default=True)
    return {
        "yarn": {
            "factor": _whole(block.number("factor")),
            "original_max_position": block.integer(
                "original_max_position_embeddings", default=context
            ),
            "beta_fast": _whole(block.number("beta_fast", default=32)),
            "beta_slow": _whole(block.number("beta_slow", default=1)),
        }
    }


def _cache_groups(
    fields: Fields, csa_ratio: int, hca_ratio: int, used: set[str], fp8_rows: bool
) -> dict[str, Any]:
    kv: dict[str, Any] = {"dim": fields.integer("head_dim")}
    index: dict[str, Any] = {"dim": fields.integer("index_head_dim")} if "csa" in used else {}
    if fp8_rows:
        kv["format"], index["format"] = "fp8_ds", "fp8"
    window = fields.integer("sliding_window")
    groups: dict[str, Any] = {
        "window": {
            "kind": "sliding_window",
            "window": window,
            "row": dict(kv),
            "page_tokens": WINDOW_PAGE_TOKENS,
        }
    }

    def compressed(ratio: int, overlap: bool, row: dict[str, Any]) -> dict[str, Any]:
        # Whole rows a page: the multiple of the ratio that covers the usual 256 tokens.
        tokens = -(-PAGE_TOKENS // ratio) * ratio
        extra = {"overlap": True} if overlap else {}
        return {
            "kind": "compressed",
            "ratio": ratio,
            **extra,
            "row": dict(row),
            "page_tokens": tokens,
        }

    def state(of: str, ratio: int) -> dict[str, Any]:
        tokens = min(ratio, STATE_PAGE_TOKENS)
        return {"kind": "compressor_state", "of": of, "page_tokens": tokens}

    if "csa" in used:
        groups["csa_kv"] = compressed(csa_ratio, True, kv)
        groups["csa_index"] = compressed(csa_ratio, True, index)
        groups["csa_state"] = state("csa_kv", csa_ratio)
        groups["csa_index_state"] = state("csa_index", csa_ratio)
    if "hca" in used:
        groups["hca_kv"] = compressed(hca_ratio, False, kv)
        groups["hca_state"] = state("hca_kv", hca_ratio)
    return groups


def _attention(fields: Fields, head_dim: int, used: set[str]) -> dict[str, Any]:
    base = {
        "heads": fields.integer("num_attention_heads"),
        "head_dim": head_dim,
        "q_lora_rank": fields.integer("q_lora_rank"),
        "o_groups": fields.integer("o_groups"),
        "o_lora_rank": fields.integer("o_lora_rank"),
    }
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "swa": ("sliding_attention", {"rope": "main", "caches": {"window": "window"}}),
        "csa": (
            "compressed_sparse_attention",
            {
                "rope": "compress",
                "indexer": _indexer(fields, "csa" in used),
                "caches": {
                    "window": "window",
                    "compressed": "csa_kv",
                    "state": "csa_state",
                    "index": "csa_index",
                    "index_state": "csa_index_state",
                },
            },
        ),
        "hca": (
            "heavily_compressed_attention",
            {
                "rope": "compress",
                "caches": {"window": "window", "compressed": "hca_kv", "state": "hca_state"},
            },
        ),
    }
    # The first entry lends its keys to the others, so `csa` comes first only if it is alone: its
    # `indexer` is unknown to the other kinds.
    order = ("swa", "csa", "hca") if "swa" in used else ("hca", "csa")
    out: dict[str, Any] = {}
    for name in order:
        if name not in used:
            continue
        kind, own = kinds[name]
        first = next(iter(out), None)
        start = {"kind": kind, **base} if first is None else {"like": first, "kind": kind}
        out[name] = {**start, **own}
    return out


def _indexer(fields: Fields, needed: bool) -> dict[str, Any]:
    keys = {"heads": "index_n_heads", "dim": "index_head_dim", "topk": "index_topk"}
    if needed:
        return {name: fields.integer(key) for name, key in keys.items()}
    return {name: fields.any(key, 0) for name, key in keys.items()}


def _ffn(fields: Fields, used: set[str]) -> dict[str, Any]:
    clamp = fields.any("swiglu_limit")
    base: dict[str, Any] = {
        "experts": fields.integer("n_routed_experts"),
        "topk": fields.integer("num_experts_per_tok"),
        "intermediate": fields.integer("moe_intermediate_size"),
        "shared_experts": fields.choice("n_shared_experts", (0, 1)),
        "scoring": fields.choice("scoring_func", ("sqrtsoftplus", "sigmoid", "softmax")),
        "norm_topk": fields.choice("norm_topk_prob", (True, False), default=True),
        "scale": fields.number("routed_scaling_factor"),
    }
    if clamp:  # 0 and null mean no limit
        base["clamp"] = fields.number("swiglu_limit")
    if used == {"hash", "routed"}:
        return {"hash": {"kind": "hash_moe", **base}, "routed": {"like": "hash", "kind": "moe"}}
    kinds = {"hash": "hash_moe", "routed": "moe"}
    return {name: {"kind": kinds[name], **base} for name in kinds if name in used}


def _whole(value: float) -> float:
    """10000.0 as 10000, for a reader."""
    return int(value) if value == int(value) else value


def _sources(layers: str, formats: str, stored: StoredCheckpoint, fp8_rows: bool) -> dict[str, str]:
    rows = "those of public engines for FP8 weights" if fp8_rows else "the compute dtype"
    return {
        "norm_eps": "rms_norm_eps",
        "residual": "hc_mult, hc_sinkhorn_iters, hc_eps",
        "rope": "rope fields and qk_rope_head_dim; V4 has no YaRN attention factor",
        "cache_groups": (
            f"head_dim, index_head_dim, sliding_window and {layers.split(',')[0]}; page sizes are "
            f"v4graph's own, row formats {rows}"
        ),
        "attention": "num_attention_heads, head_dim, q_lora_rank, o_groups, o_lora_rank, index_*",
        "ffn": "n_routed_experts, num_experts_per_tok, moe_intermediate_size, swiglu_limit, ...",
        "layers": layers,
        "speculative": "tensor names" if stored.tensors else "num_nextn_predict_layers, dspark_*",
        "weights": formats,
    }
