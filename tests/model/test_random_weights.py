"""Random checkpoints: what the inventory says, sensible numbers, one seed one checkpoint."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.tiny import Tiny
from v4graph.errors import WeightsError
from v4graph.model.export import plan_shards, prepare_directory, write_checkpoint
from v4graph.model.loader import load_params, load_quantised
from v4graph.model.projections import tensors_of
from v4graph.model.quant import Fp4, Fp8Block
from v4graph.model.random_weights import RandomSource, RandomWeights
from v4graph.plan.weights import TensorEntry, inventory
from v4graph.spec.model import ModelSpec
from v4graph.spec.safetensors_header import read_checkpoint
from v4graph.spec.shorten import first_layers

TINY = Tiny(kinds=("csa", "hca"), hidden=160, heads=8, experts=6, vocab=80)
FORMATS = {
    "published": {"linear": "fp8_block", "experts": "fp4", "scale": "e8m0", "other": "bf16"},
    "base": {"linear": "fp8_block", "experts": "fp8_block", "scale": "f32", "other": "bf16"},
    "plain": {"linear": "bf16", "experts": "f32", "other": "bf16"},
}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8, "I64": torch.int64} | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def spec_of(formats: str = "published", tiny: Tiny = TINY) -> ModelSpec:
    return ModelSpec.model_validate(tiny.data() | {"weights": FORMATS[formats]})


def write(spec: ModelSpec, directory: Path, shard_bytes: int = 10**9, seed: int = 0) -> Path:
    weights = RandomWeights(spec, seed)
    directory.mkdir(exist_ok=True)
    write_checkpoint(directory, plan_shards(weights.entries, shard_bytes), weights.tensor, None)
    return directory


def tensors(directory: Path) -> dict[str, Tensor]:
    return {k: v for f in directory.glob("*.safetensors") for k, v in load_file(f).items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor], names: Iterable[str] | None = None) -> bool:
    if names is None:
        assert a.keys() == b.keys()
    chosen = a if names is None else names
    as_bytes = ((a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in chosen)
    return all(torch.equal(*pair) for pair in as_bytes)


@pytest.mark.parametrize("formats", FORMATS)
def test_every_tensor_is_what_the_inventory_says(formats: str, tmp_path: Path) -> None:
    spec = spec_of(formats)
    stored = read_checkpoint(write(spec, tmp_path, 200_000)).tensors
    got = {name: (t.dtype, t.shape) for name, t in stored.items()}
    assert got == {e.name: (e.dtype, e.shape) for e in inventory(spec)}
    for name, tensor in tensors(tmp_path).items():
        assert tensor.dtype is DTYPES[stored[name].dtype], name
    params = load_params(spec, tmp_path, torch.float32)
    assert all(v.isfinite().all() for v in params.values())


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize(
    ("formats", "names"),
    [
        ("published", ("mtp.0.e_proj", "layers.0.ffn.experts.2.w1", "layers.1.ffn.experts.0.w2")),
        ("base", ("mtp.0.e_proj",)),
        ("plain", ("layers.0.ffn.experts.2.w1", "layers.1.attn.wq_b", "head")),
    ],
)
def test_matrices_have_the_deviation_of_their_fan_in(
    formats: str, names: tuple[str, ...], scale: float
) -> None:
    """Right on average over a hundred scales and more: one power of two is off by up to 1.41."""
    weights = RandomWeights(spec_of(formats, replace(TINY, hidden=1664)), 3, scale)
    for name in names:
        value = dequantised(weights, name)
        expected = scale * value.shape[1] ** -0.5
        assert float(value.std()) == pytest.approx(expected, rel=0.05), name
        assert abs(float(value.mean())) < 0.05 * expected, name


def dequantised(weights: RandomWeights, name: str) -> Tensor:
    entries = {e.name: e for e in weights.entries}
    entry = entries[f"{name}.weight"]
    value = weights.tensor(entry)
    if entry.dtype == "F8_E4M3":
        return Fp8Block(value, weights.tensor(entries[f"{name}.scale"])).dequantise()
    if entry.dtype == "I8":
        scale = weights.tensor(entries[f"{name}.scale"])
        return Fp4(value.view(torch.uint8), scale).dequantise()
    return value.float()


def test_the_other_tensors_are_near_neutral() -> None:
    weights = RandomWeights(spec_of())
    for entry in weights.entries:
        if entry.dtype not in ("BF16", "F32"):
            continue
        value = weights.tensor(entry).float()
        if entry.name.endswith(("norm.weight", "_scale")):
            assert float((value - 1).abs().max()) < 0.6, entry.name
        elif entry.name.endswith((".ape", "attn_sink", "gate.bias", "_base")):
            assert 0 < float(value.abs().max()) < 0.6, entry.name
        else:
            assert entry.name == "embed.weight" or len(entry.shape) == 2, entry.name


def test_scales_vary_and_every_fp4_code_occurs() -> None:
    """A reader that takes one scale for all, or loses a code, must not pass on these files."""
    weights = RandomWeights(spec_of())
    entries = {e.name: e for e in weights.entries}
    name = "layers.1.ffn.experts.0.w1"
    scale = weights.tensor(entries[f"{name}.scale"]).view(torch.uint8)
    low = int(scale.min())
    assert set(scale.flatten().tolist()) == {low, low + 1}
    byte = weights.tensor(entries[f"{name}.weight"]).view(torch.uint8)
    for nibble in (byte & 15, byte >> 4):
        assert set(nibble.flatten().tolist()) == set(range(16))


def test_routing_tables_hold_distinct_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("v4graph.model.random_weights._TABLE_ROWS", 300)  # parts of a long table
    tiny = replace(TINY, vocab=700, experts=6, experts_topk=3)
    weights = RandomWeights(spec_of(tiny=tiny))
    entry = next(e for e in weights.entries if e.name.endswith("tid2eid"))
    table = weights.tensor(entry)
    assert table.shape == (700, 3)
    assert all(len(set(row)) == 3 for row in table.tolist())
    share = torch.bincount(table.flatten(), minlength=6) / table.numel()
    assert float((share - 1 / 6).abs().max()) < 0.03
    assert not torch.equal(table[:300], table[300:600])


def test_a_seed_gives_one_checkpoint(tmp_path: Path) -> None:
    spec = spec_of()
    one, many = write(spec, tmp_path / "one"), write(spec, tmp_path / "many", 100_000)
    assert len(list(one.glob("*.safetensors"))) == 1
    assert len(list(many.glob("*.safetensors"))) > 5
    first = tensors(one)
    assert same(first, tensors(many))
    other = tensors(write(spec, tmp_path / "other", seed=1))
    assert not any(same(first, other, [n]) for n in first if first[n].numel() > 64)
    short = first_layers(spec, 1)
    assert same(
        first, tensors(write(short, tmp_path / "short")), [e.name for e in inventory(short)]
    )


def test_shards(tmp_path: Path) -> None:
    spec = spec_of()
    limit = 60_000
    write(spec, tmp_path, limit)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    entries = {e.name: e for e in inventory(spec)}
    assert index["metadata"]["total_size"] == sum(e.num_bytes for e in entries.values())
    assert list(index["weight_map"]) == list(entries)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    for file in files:
        held = [entries[n].num_bytes for n, f in index["weight_map"].items() if f == file]
        assert sum(held) <= limit or len(held) == 1
    mode = stat.S_IMODE(os.stat(tmp_path / "model.safetensors.index.json").st_mode)
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.glob("*.safetensors")} == {mode}


def test_a_tensor_beyond_the_limit_has_its_own_shard() -> None:
    entries = [TensorEntry(n, "I8", (size,)) for n, size in zip("abcd", (5, 30, 5, 5), strict=True)]
    assert [[e.name for e in s.entries] for s in plan_shards(entries, 10)] == [
        ["a"],
        ["b"],
        ["c", "d"],
    ]


def test_directories(tmp_path: Path) -> None:
    spec = spec_of()
    write(spec, tmp_path / "old", 100_000)
    (tmp_path / "old" / "tokenizer.json").write_text("{}")
    (tmp_path / "old" / "model.safetensors").write_text("somebody's")
    with pytest.raises(WeightsError, match=r"not empty \(it holds .*--force"):
        prepare_directory(tmp_path / "old", 1, 1, force=False)
    prepare_directory(tmp_path / "old", 1, 1, force=True)
    left = sorted(p.name for p in (tmp_path / "old").iterdir())
    assert left == ["model.safetensors", "tokenizer.json"]
    with pytest.raises(WeightsError, match="a file; expected a directory"):
        prepare_directory(tmp_path / "old" / "tokenizer.json", 1, 1, force=True)
    prepare_directory(tmp_path / "a" / "b", 1, 1, force=False)
    assert (tmp_path / "a" / "b").is_dir()


def test_too_little_room(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"deep: 1000000000\.0 GB are needed and [\d.]+ GB are"):
        prepare_directory(tmp_path / "new" / "deep", 10**18, 1, force=False)
    assert not (tmp_path / "new").exists()


def test_a_write_that_fails_is_told(tmp_path: Path) -> None:
    weights = RandomWeights(spec_of())
    shards = plan_shards(weights.entries, 10**9)
    (tmp_path / shards[0].file).mkdir()
    with pytest.raises(WeightsError, match=r"model-00001-of-00001\.safetensors: cannot be written"):
        write_checkpoint(tmp_path, shards, weights.tensor, None)
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_it_loads_as_stored(tmp_path: Path) -> None:
    spec = spec_of()
    params = load_quantised(spec, write(spec, tmp_path, 50_000), torch.bfloat16)
    kinds = {type(p).__name__ for p in params.values()}
    assert kinds == {"Fp4", "Fp8Block", "Tensor"}


@pytest.mark.parametrize("formats", FORMATS)
def test_a_model_in_memory_is_that_of_the_files(formats: str, tmp_path: Path) -> None:
    tiny = replace(TINY, hidden=128) if formats == "base" else TINY
    spec = spec_of(formats, tiny)
    if formats == "base":
        data = spec.model_dump()
        for ffn in data["ffn"].values():
            ffn["intermediate"] = 128
        spec = ModelSpec.model_validate(data)
    from_files = load_quantised(spec, write(spec, tmp_path / "files"), torch.bfloat16)
    in_memory = load_quantised(spec, RandomSource(RandomWeights(spec)), torch.bfloat16)
    assert from_files.keys() == in_memory.keys()
    for name, param in from_files.items():
        for a, b in zip(tensors_of(param), tensors_of(in_memory[name]), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
