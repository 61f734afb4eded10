"""`v4graph import` on directories: a transformers round trip, and files that differ from config."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from v4graph.cli.import_checkpoint import import_checkpoint, import_command
from v4graph.errors import SpecError, WeightsError
from v4graph.plan.weights import inventory
from v4graph.spec.load import load_spec
from v4graph.spec.safetensors_header import read_checkpoint

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_hash_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 8,
    "sliding_window": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def write_tensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file whose header is right; its data is left out, for nothing reads it."""
    header = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [0, 0]}
        for name, (dtype, shape) in tensors.items()
    }
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with CONFIG and exactly the tensors that its spec lists, MTP included."""
    directory = tmp_path / "Tiny V4"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    text, _ = import_checkpoint(directory)
    spec_path = tmp_path / "expected.yaml"
    spec_path.write_text(text)
    tensors = {e.name: (e.dtype, e.shape) for e in inventory(load_spec(str(spec_path)))}
    assert "mtp.0.e_proj.weight" in tensors
    write_tensors(directory / "model.safetensors", tensors)
    return directory


def rewrite(directory: Path, change: Any) -> None:
    tensors = {n: (t.dtype, t.shape) for n, t in read_checkpoint(directory).tensors.items()}
    change(tensors)
    write_tensors(directory / "model.safetensors", tensors)


def cli() -> typer.Typer:
    app = typer.Typer()
    app.command("import")(import_command)
    return app


def test_command_writes_a_spec_that_loads(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.yaml"
    arguments = [str(checkpoint), "-o", str(output)]
    result = CliRunner().invoke(cli(), arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    spec = load_spec(str(output))
    assert spec.name == "tiny-v4"
    assert set(spec.speculative) == {"none", "mtp"}
    with pytest.raises(SpecError, match="--force"):
        CliRunner().invoke(cli(), arguments, catch_exceptions=False)
    assert CliRunner().invoke(cli(), [*arguments, "--force"]).exit_code == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("head.weight"), "head.weight: missing"),
        (lambda t: t.update(extra=("BF16", (1,))), "extra: unexpected"),
        (lambda t: t.update({"norm.weight": ("BF16", (65,))}), r"shape \[65\]; expected \[64\]"),
        (lambda t: t.update({"norm.weight": ("I8", (64,))}), "norm.weight: I8; expected BF16"),
    ],
)
def test_tensors_that_differ_are_listed(checkpoint: Path, change: Any, message: str) -> None:
    rewrite(checkpoint, change)
    with pytest.raises(WeightsError, match=message):
        import_checkpoint(checkpoint)
    import_checkpoint(checkpoint, check=False)


def test_f32_beside_bf16_is_a_note(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda t: t.update({"norm.weight": ("F32", (64,))}))
    _, notes = import_checkpoint(checkpoint)
    assert any(note.startswith("1 tensor is stored in F32") for note in notes)


def test_missing_shards_are_told(checkpoint: Path) -> None:
    names = read_checkpoint(checkpoint).tensors
    weight_map = dict.fromkeys(names, "model.safetensors") | {"head.weight": "b.safetensors"}
    rewrite(checkpoint, lambda t: t.pop("head.weight"))
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    _, notes = import_checkpoint(checkpoint)
    assert any(note.startswith("1 of 2 files") for note in notes)


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"config\.json: .*expected a checkpoint directory"):
        import_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match="not JSON"):
        import_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SpecError, match="expected a JSON object"):
        import_checkpoint(tmp_path)


@pytest.mark.parametrize("original_format", [True, False])
def test_transformers_round_trip(original_format: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV4Config(
        vocab_size=128,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=24,
        num_experts_per_tok=2,
        n_routed_experts=8,
        max_position_embeddings=4096,
        compress_ratios=[0, 4, 128, 4],
        num_hash_layers=2,
        sliding_window=16,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=8,
        index_head_dim=32,
        index_topk=8,
        partial_rotary_factor=0.5,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )
    model = transformers.DeepseekV4ForCausalLM(config)
    model.save_pretrained(tmp_path, save_original_format=original_format)
    text, notes = import_checkpoint(tmp_path, "round-trip")
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    spec = load_spec(str(path))
    assert {e.name: e.shape for e in inventory(spec)} == {
        name: tensor.shape for name, tensor in read_checkpoint(tmp_path).tensors.items()
    }
    assert [kind for kind, _ in spec.layer_kinds] == ["swa", "csa", "hca", "csa"]
    assert [kind for _, kind in spec.layer_kinds] == ["hash", "hash", "routed", "routed"]
    assert (spec.weights.linear, spec.weights.experts, spec.weights.other) == ("f32",) * 3
    yarn = spec.rope["compress"].yarn
    assert yarn is not None
    assert (yarn.factor, yarn.original_max_position, spec.rope["main"].dim) == (4, 64, 16)
    assert list(spec.speculative) == ["none"]
    assert any("does not save draft layers" in note for note in notes)
