"""FP8 and FP4 checkpoints: the values that come out, and the formats that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.runner import Runner
from tests.support.tiny import Tiny
from v4graph.errors import WeightsError
from v4graph.model.loader import load_params
from v4graph.model.params import random_params, unstack_experts
from v4graph.plan.types import Limits
from v4graph.plan.weights import inventory
from v4graph.spec.model import ModelSpec

KEYS = "layers.0.attn.indexer.wq_b"  # six blocks of rows
QUERY, EXPERT = "layers.0.attn.wq_b", "layers.1.ffn.experts.2.w1"
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def quantised_spec(scale: str = "e8m0") -> ModelSpec:
    # 160 wide: the last FP8 block is a partial one.
    data = Tiny(kinds=("csa", "hca"), hidden=160, heads=6, experts=4, vocab=40).data()
    data["weights"] = {"linear": "fp8_block", "experts": "fp4", "other": "bf16", "scale": scale}
    return ModelSpec.model_validate(data)


def stored_tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Random bytes for quantised tensors and their scales, random values for the others."""
    gen = torch.Generator().manual_seed(1)
    plain = dict(unstack_experts(random_params(spec, seed=2)))
    out = {}
    for e in inventory(spec):
        if e.dtype == "F8_E4M3":
            out[e.name] = (torch.randn(e.shape, generator=gen) * 4).to(torch.float8_e4m3fn)
        elif e.dtype == "I8":
            byte = torch.randint(0, 256, e.shape, generator=gen, dtype=torch.uint8)
            out[e.name] = byte.view(torch.int8)
        elif e.name.endswith(".scale") and e.dtype == "F8_E8M0":
            exponent = torch.randint(117, 123, e.shape, generator=gen, dtype=torch.uint8)
            out[e.name] = exponent.view(torch.float8_e8m0fnu)
        elif e.name.endswith(".scale"):
            out[e.name] = torch.rand(e.shape, generator=gen) * 0.01 + 0.001
        else:
            out[e.name] = plain[e.name].bfloat16() if e.dtype == "BF16" else plain[e.name]
    return out


def factor(scale: Tensor) -> Tensor:
    """The value of stored scales, float64."""
    if scale.dtype is torch.float8_e8m0fnu:
        return 2.0 ** (scale.view(torch.uint8).double() - 127)
    return scale.double()


def fp8_value(stored: dict[str, Tensor], name: str, i: int, j: int) -> float:
    block = factor(stored[f"{name}.scale"])[i // 128, j // 128]
    return float(stored[f"{name}.weight"][i, j].double() * block)


def fp4_value(stored: dict[str, Tensor], name: str, i: int, j: int) -> float:
    byte = int(stored[f"{name}.weight"].view(torch.uint8)[i, j // 2])
    nibble = byte >> 4 if j % 2 else byte & 15
    value = FP4[nibble & 7] * (-1 if nibble & 8 else 1)
    return value * float(factor(stored[f"{name}.scale"])[i, j // 32])


@pytest.mark.parametrize("scale", ["e8m0", "f32"])
def test_values(scale: str, tmp_path: Path) -> None:
    spec = quantised_spec(scale)
    stored = stored_tensors(spec)
    save_file(stored, tmp_path / "model.safetensors")
    params = load_params(spec, tmp_path, torch.float32)
    matrix = params["layers.0.attn.wq_a.weight"]
    assert matrix.shape == (24, 160)
    for i in (0, 23):
        for j in (0, 1, 127, 128, 159):
            expected = fp8_value(stored, "layers.0.attn.wq_a", i, j)
            assert float(matrix[i, j]) == pytest.approx(expected, rel=1e-6)
    tall = params[f"{QUERY}.weight"]
    assert tall.shape[0] > 128
    for i in (0, 127, 128, tall.shape[0] - 1):
        assert float(tall[i, 3]) == pytest.approx(fp8_value(stored, QUERY, i, 3), rel=1e-6)
    gate_up = params["layers.1.ffn.experts.w13"]
    assert gate_up.shape == (4, 64, 160)
    for i in (0, 31):
        for j in (0, 1, 31, 32, 158, 159):
            expected = fp4_value(stored, EXPERT, i, j)
            assert float(gate_up[2, i, j]) == pytest.approx(expected, rel=1e-6)
            expected = fp4_value(stored, EXPERT.replace("w1", "w3"), i, j)
            assert float(gate_up[2, 32 + i, j]) == pytest.approx(expected, rel=1e-6)


def test_a_quantised_checkpoint_runs(tmp_path: Path) -> None:
    spec = quantised_spec()
    save_file(stored_tensors(spec), tmp_path / "model.safetensors")
    params = load_params(spec, tmp_path, torch.bfloat16)
    assert params[f"{QUERY}.weight"].dtype is torch.bfloat16
    params = load_params(spec, tmp_path, torch.float32)
    runner = Runner(spec, params, Limits(max_num_seqs=1, max_num_batched_tokens=32))
    assert runner.step([(runner.add(list(range(2, 22))), 20)]).isfinite().all()


@pytest.mark.parametrize("name", [QUERY, EXPERT])
def test_a_missing_scale_is_told_by_name(name: str, tmp_path: Path) -> None:
    spec = quantised_spec()
    stored = stored_tensors(spec)
    del stored[f"{name}.scale"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"tensor {name}\.weight: .*without a scale"):
        load_params(spec, tmp_path, torch.float32)


def test_the_stored_dtype_decides_not_the_spec(tmp_path: Path) -> None:
    """A bfloat16 matrix in a checkpoint that is FP8 elsewhere is what it says it is."""
    spec = quantised_spec()
    stored = stored_tensors(spec)
    matrix = torch.randn(stored[f"{QUERY}.weight"].shape).bfloat16()
    del stored[f"{QUERY}.scale"]
    stored[f"{QUERY}.weight"] = matrix
    save_file(stored, tmp_path / "model.safetensors")
    params = load_params(spec, tmp_path, torch.float32)
    assert torch.equal(params[f"{QUERY}.weight"], matrix.float())


@pytest.mark.parametrize("name", [QUERY, EXPERT])
def test_scale_bytes_stored_as_integers_are_never_numbers(name: str, tmp_path: Path) -> None:
    """A18: some exports write e8m0 as U8; byte 120 is 2^-7 there too, not 120."""
    spec = quantised_spec()
    stored = stored_tensors(spec)
    save_file(stored, tmp_path / "model.safetensors")
    expected = load_params(spec, tmp_path, torch.float32)
    stored[f"{name}.scale"] = stored[f"{name}.scale"].view(torch.uint8)
    save_file(stored, tmp_path / "model.safetensors")
    got = load_params(spec, tmp_path, torch.float32)
    assert all(torch.equal(got[k], expected[k]) for k in expected)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (KEYS, "one row"),
        (KEYS, "transposed"),
        (KEYS, "too many"),
        (EXPERT, "one row"),
        (EXPERT, "one column"),
        (EXPERT, "transposed"),
        (EXPERT, "too many"),
    ],
)
def test_a_scale_of_another_shape_is_told_by_name(name: str, change: str, tmp_path: Path) -> None:
    """Broadcasting or cutting it would load a wrong model in silence."""
    spec = quantised_spec("f32")
    stored = stored_tensors(spec)
    scale = stored[f"{name}.scale"]
    changed = {
        "one row": scale[:1],
        "one column": scale[:, :1],
        "transposed": scale.t(),
        "too many": torch.cat((scale, scale)),
    }[change]
    assert changed.shape != scale.shape
    stored[f"{name}.scale"] = changed.contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=name):
        load_params(spec, tmp_path, torch.float32)


@pytest.mark.parametrize("bad", [-1, 4, 10**6])
def test_a_routing_table_beyond_the_experts_is_told_by_name(bad: int, tmp_path: Path) -> None:
    spec = quantised_spec()
    stored = stored_tensors(spec)
    stored["layers.0.ffn.gate.tid2eid"][7, 1] = bad
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="tid2eid"):
        load_params(spec, tmp_path, torch.float32)
