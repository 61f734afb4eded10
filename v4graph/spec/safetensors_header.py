"""Names, dtypes and shapes of stored tensors, read from safetensors headers without torch.

Three naming schemes of DeepSeek-V4 exist in files; `official_name` maps all to the published one:

1. the published checkpoints: `layers.0.attn.wq_a.weight`;
2. transformers 5.24 `save_pretrained`: it turns its renaming back before it writes, but not wholly.
   The prefix `model.` stays on all but the head, so the anchored patterns miss and
   `model.embed_tokens.weight` and `model.hc_head.hc_fn` keep transformers' names, and the pattern
   that maps `.norm.` to `.kv_norm.` also turns `attn.kv_norm` into `attn.norm`;
3. transformers with `save_original_format=False`: `model.layers.0.self_attn.q_a_proj.weight`, with
   the routed experts of a layer stacked into `mlp.experts.gate_up_proj` and `down_proj`.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from v4graph.errors import SpecError
from v4graph.words import counted

INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""

_RENAMES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), target)
    for pattern, target in (
        (r"^model\.", ""),
        (r"^embed_tokens\.", "embed."),
        (r"^lm_head\.", "head."),
        (r"(^|\.)hc_head\.hc_", r"\1hc_head_"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.attn_hc\.", ".hc_attn_"),
        (r"\.ffn_hc\.", ".hc_ffn_"),
        (r"\.attn\.sinks$", ".attn.attn_sink"),
        (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.position_bias$", ".ape"),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
        (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
        (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
        (r"\.weight_scale_inv$", ".scale"),
    )
)
STACKED_EXPERTS = re.compile(r"^(.*\.ffn\.experts)\.(gate_up_proj|down_proj)(\.weight|\.scale)?$")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as its file declares it; `dtype` is the safetensors name."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class StoredCheckpoint:
    """Every tensor of a directory, under its official name."""

    tensors: Mapping[str, StoredTensor]
    missing_files: tuple[str, ...]
    """Shards that the index names and the directory lacks."""


def official_name(name: str) -> str:
    """The published name of a tensor that one of the three schemes stored as `name`."""
    for pattern, target in _RENAMES:
        name = pattern.sub(target, name)
    return name


def check_shard(name: str, file: object) -> str:
    """The file that an index's weight_map gives for a tensor: a path inside the directory.

    Links inside the directory may lead anywhere: download caches are made of them.

    Raises:
        ValueError: no text, an absolute path, or one that leaves the directory.
    """
    if not isinstance(file, str) or not file:
        raise ValueError(f"weight_map says {file!r} for {name}; expected a file name")
    outside = any(
        path.anchor or ".." in path.parts for path in (PurePosixPath(file), PureWindowsPath(file))
    )
    if outside or "\0" in file:
        raise ValueError(
            f"weight_map says {file!r} for {name}; expected a path inside the checkpoint directory"
        )
    return file


def read_checkpoint(directory: Path) -> StoredCheckpoint:
    """Headers of all shards in `directory`; no tensors if it holds no safetensors file.

    Raises:
        SpecError: a header that cannot be read, or two tensors of one official name.
    """
    files = _shards(directory)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        if not (directory / file).is_file():
            continue
        for name, entry in read_header(directory / file).items():
            try:
                stored = StoredTensor(str(entry["dtype"]), tuple(entry["shape"]), file)
            except (KeyError, TypeError) as fault:
                raise SpecError(f"{file}: {name}: not a safetensors entry: {entry!r}") from fault
            for official, tensor in _unstacked(official_name(name), stored):
                if official in tensors:
                    other = tensors[official].file
                    raise SpecError(f"{file}: {name}: {official} is stored twice, also in {other}")
                tensors[official] = tensor
    missing = tuple(file for file in files if not (directory / file).is_file())
    return StoredCheckpoint(tensors, missing)


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of one safetensors file, `__metadata__` left out.

    Raises:
        SpecError: the file is not in the safetensors format.
    """
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise SpecError(f"{path.name}: not a safetensors file: header length {length}")
        raw = file.read(length)
    if len(raw) < length:
        raise SpecError(
            f"{path.name}: the header is cut short: {len(raw)} of {counted(length, 'byte')}"
        )
    try:
        header = json.loads(raw)
    except ValueError as fault:
        raise SpecError(f"{path.name}: the safetensors header is not JSON: {fault}") from fault
    if not isinstance(header, dict):
        raise SpecError(f"{path.name}: the safetensors header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _shards(directory: Path) -> list[str]:
    index = directory / INDEX_FILE
    if not index.is_file():
        return sorted(path.name for path in directory.glob("*.safetensors"))
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as fault:
        raise SpecError(f"{INDEX_FILE}: expected a JSON object with a weight_map") from fault
    try:
        return sorted({check_shard(name, file) for name, file in weight_map.items()})
    except ValueError as fault:
        raise SpecError(f"{INDEX_FILE}: {fault}") from fault


def _unstacked(name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    """One entry an expert for the stacked tensors of scheme 3, else the tensor itself."""
    match = STACKED_EXPERTS.match(name)
    if match is None or len(tensor.shape) != 3:
        yield name, tensor
        return
    prefix, which, suffix = match.groups()
    experts, rows, columns = tensor.shape
    parts, rows = (("w1", "w3"), rows // 2) if which == "gate_up_proj" else (("w2",), rows)
    for expert in range(experts):
        for part in parts:
            official = f"{prefix}.{expert}.{part}{suffix or '.weight'}"
            yield official, StoredTensor(tensor.dtype, (rows, columns), tensor.file)
