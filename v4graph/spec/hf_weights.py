"""Storage formats and draft layers of a checkpoint, from its files or, without any, its config."""

from __future__ import annotations

import re

from v4graph.spec.hf_fields import Fields
from v4graph.spec.safetensors_header import StoredCheckpoint, StoredTensor
from v4graph.spec.speculator import find_speculator

_PLAIN = {"F32": "f32", "BF16": "bf16"}
_LINEAR = {**_PLAIN, "F8_E4M3": "fp8_block"}
_EXPERTS = {**_LINEAR, "I8": "fp4"}
_SCALE = {"F8_E8M0": "e8m0", "F32": "f32"}
_EXPERT = r"layers\.\d+\.ffn\.experts\.0\.w1\.weight"
_SAMPLES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "linear": ((r"layers\.\d+\.attn\.wq_a\.weight",), _LINEAR),
    "experts": ((_EXPERT,), _EXPERTS),
    "scale": ((r"layers\.\d+\.attn\.wq_a\.scale", r"layers\.\d+\.ffn\..*\.scale"), _SCALE),
    # transformers keeps norms in F32 where it stores the rest in BF16, so norms come last.
    "other": ((r"embed\.weight", r"head\.weight", r"layers\.\d+\.attn_norm\.weight"), _PLAIN),
}
"""Spec field -> tensors to look at, first found first, and the formats of their dtypes."""
_TORCH_DTYPES = {"bfloat16": "bf16", "float32": "f32"}


def weight_formats(
    fields: Fields, stored: StoredCheckpoint, notes: list[str]
) -> tuple[dict[str, str], str]:
    """The spec's `weights` formats and a phrase that says what decided them.

    A tensor's own dtype decides; the config's words count for what no file shows.
    """
    formats = _from_config(fields, stored, notes)
    seen = []
    for key, (patterns, names) in _SAMPLES.items():
        found = next(filter(None, (_first(stored, p) for p in patterns)), None)
        if found is None:
            continue
        name, tensor = found
        if tensor.dtype not in names:
            fields.errors.append(
                f"{tensor.file}: {name}: dtype {tensor.dtype}; expected one of {', '.join(names)}"
            )
            continue
        if names[tensor.dtype] != formats[key] and fields.has("quantization_config"):
            notes.append(
                f"weights.{key} is {names[tensor.dtype]} by the dtype {tensor.dtype} of {name}, "
                f"where config.json says {formats[key]}"
            )
        formats[key] = names[tensor.dtype]
        seen.append(name)
    source = "dtypes of " + ", ".join(seen) if seen else "quantization_config, expert_dtype"
    return formats, source


def draft_layers(fields: Fields, stored: StoredCheckpoint, notes: list[str]) -> int:
    """Number of MTP layers that the checkpoint holds, 0 if it holds none that v4graph can run."""
    claimed = fields.integer("num_nextn_predict_layers", least=0, default=0)
    dspark = sorted(key for key in fields.values if key.startswith("dspark_"))
    for key in dspark:
        fields.any(key)
    held = find_speculator(stored.tensors)
    if dspark or held.kind == "dspark":
        notes.append(
            "the checkpoint holds a DSpark speculator "
            f"({', '.join(dspark) or held.evidence}), which v4graph does not run yet; it has "
            "no MTP layer, so the spec offers speculation `none` only"
        )
        return 0
    found = held.num_layers
    if found:
        if found != claimed:
            notes.append(
                f"{found} MTP layers by the tensors mtp.N.e_proj, where config.json says "
                f"num_nextn_predict_layers {claimed}"
            )
        return found
    if stored.tensors and not stored.missing_files:
        if claimed:
            notes.append(
                f"num_nextn_predict_layers is {claimed}, but no file holds mtp.0.e_proj "
                "(transformers does not save draft layers): the spec offers speculation `none` only"
            )
        return 0
    if fields.has("layer_types"):
        if claimed:
            notes.append(
                "no file shows whether the MTP layer is there, and transformers does not save it: "
                "the spec offers speculation `none` only"
            )
        return 0
    if claimed:
        notes.append(f"{claimed} MTP layer by num_nextn_predict_layers; no file shows its tensors")
    return claimed


def _from_config(fields: Fields, stored: StoredCheckpoint, notes: list[str]) -> dict[str, str]:
    dtype = fields.any("torch_dtype") or fields.any("dtype") or "bfloat16"
    plain = _TORCH_DTYPES.get(str(dtype), "")
    if not plain and not stored.tensors:
        fields.fail("torch_dtype", " or ".join(_TORCH_DTYPES))
    plain = plain or "bf16"
    words = {"fp4": "fp4", "fp8": "fp8_block"}
    experts = words[fields.choice("expert_dtype", words)] if fields.has("expert_dtype") else None
    block = fields.block("quantization_config")
    if block is None:
        return {"linear": plain, "experts": experts or plain, "scale": "e8m0", "other": plain}
    block.choice("quant_method", ("fp8",))
    block.choice("fmt", ("e4m3",), default="e4m3")
    block.choice("weight_block_size", ([128, 128],))
    block.choice("activation_scheme", ("dynamic",), default="dynamic")
    block.choice("scale_fmt", ("ue8m0",), default="ue8m0")
    for key in ("modules_to_not_convert", "ignored_layers", "dequantize"):
        block.any(key)  # the files show what is quantised
    # transformers 5.24 moves the root key into this block.
    if block.has("expert_dtype"):
        inner = words[block.choice("expert_dtype", words)]
        experts = experts or inner
    block.finish()
    if experts is None:
        experts = "fp4"
        if not _first(stored, _EXPERT):
            notes.append(
                "expert_dtype is absent and no file shows the experts' dtype: fp4, as in the first "
                "published Flash checkpoint, whose config lacked the key"
            )
    return {"linear": "fp8_block", "experts": experts, "scale": "e8m0", "other": "bf16"}


def _first(stored: StoredCheckpoint, pattern: str) -> tuple[str, StoredTensor] | None:
    matcher = re.compile(pattern)
    for name, tensor in stored.tensors.items():
        if matcher.fullmatch(name):
            return name, tensor
    return None
