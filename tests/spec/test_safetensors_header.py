"""Headers without torch: three naming schemes, shards, and files that are not what they claim."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from v4graph.errors import SpecError
from v4graph.spec.safetensors_header import official_name, read_checkpoint, read_header


def write(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)


@pytest.mark.parametrize(
    ("stored", "official"),
    [
        ("layers.0.attn.wq_a.weight", "layers.0.attn.wq_a.weight"),
        ("layers.0.attn.compressor.norm.weight", "layers.0.attn.compressor.norm.weight"),
        ("mtp.0.hc_head_fn", "mtp.0.hc_head_fn"),
        ("mtp.0.norm.weight", "mtp.0.norm.weight"),
        ("norm.weight", "norm.weight"),
        # save_pretrained
        ("head.weight", "head.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.embed_tokens.weight", "embed.weight"),
        ("model.hc_head.hc_fn", "hc_head_fn"),
        ("model.layers.3.attn.norm.weight", "layers.3.attn.kv_norm.weight"),
        ("model.layers.3.attn.indexer.compressor.ape", "layers.3.attn.indexer.compressor.ape"),
        # save_original_format=False
        ("lm_head.weight", "head.weight"),
        ("model.layers.1.self_attn.kv_norm.weight", "layers.1.attn.kv_norm.weight"),
        ("model.layers.1.self_attn.sinks", "layers.1.attn.attn_sink"),
        (
            "model.layers.1.self_attn.compressor.gate_proj.weight",
            "layers.1.attn.compressor.wgate.weight",
        ),
        (
            "model.layers.1.self_attn.compressor.indexer.kv_norm.weight",
            "layers.1.attn.indexer.compressor.norm.weight",
        ),
        (
            "model.layers.1.self_attn.compressor.indexer.scorer.weights_proj.weight",
            "layers.1.attn.indexer.weights_proj.weight",
        ),
        (
            "model.layers.1.mlp.shared_experts.gate_proj.weight",
            "layers.1.ffn.shared_experts.w1.weight",
        ),
        ("model.layers.1.mlp.gate.e_score_correction_bias", "layers.1.ffn.gate.bias"),
        ("model.layers.1.self_attn.q_a_proj.weight_scale_inv", "layers.1.attn.wq_a.scale"),
    ],
)
def test_official_name(stored: str, official: str) -> None:
    assert official_name(stored) == official


def test_stacked_experts_are_listed_one_by_one(tmp_path: Path) -> None:
    prefix = "model.layers.0.mlp.experts"
    write(
        tmp_path / "model.safetensors",
        {f"{prefix}.gate_up_proj": ("BF16", [2, 6, 4]), f"{prefix}.down_proj": ("BF16", [2, 4, 3])},
    )
    tensors = read_checkpoint(tmp_path).tensors
    assert {n: t.shape for n, t in tensors.items()} == {
        f"layers.0.ffn.experts.{e}.{w}.weight": (4, 3) if w == "w2" else (3, 4)
        for e in range(2)
        for w in ("w1", "w2", "w3")
    }


def test_shards_of_an_index_may_be_missing(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"norm.weight": ("BF16", [4])})
    index = {"weight_map": {"norm.weight": "a.safetensors", "head.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    stored = read_checkpoint(tmp_path)
    assert list(stored.tensors) == ["norm.weight"]
    assert stored.missing_files == ("b.safetensors",)


def test_a_directory_without_files_has_no_tensors(tmp_path: Path) -> None:
    assert not read_checkpoint(tmp_path).tensors


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors", {"norm.weight": ("BF16", [4])})
    write(tmp_path / "b.safetensors", {"model.norm.weight": ("BF16", [4])})
    with pytest.raises(SpecError, match=r"norm\.weight is stored twice, also in a\.safetensors"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 16, "not a safetensors file"),
        (struct.pack("<Q", 4) + b"{{{{", "not JSON"),
        (struct.pack("<Q", 50) + b"{}", "cut short: 2 of 50"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
    ],
)
def test_broken_files(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=message):
        read_header(path)


def test_broken_entries_and_index(tmp_path: Path) -> None:
    raw = json.dumps({"norm.weight": [1, 2]}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(SpecError, match="not a safetensors entry"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(SpecError, match="weight_map"):
        read_checkpoint(tmp_path)
