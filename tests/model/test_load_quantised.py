"""Loading without decoding: codes and scales as stored, experts stacked, one reference decoding."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.model.test_loader_quantised import EXPERT, QUERY, quantised_spec, stored_tensors
from v4graph.errors import NonFiniteWeightsError, WeightsError
from v4graph.model.loader import load_params, load_quantised
from v4graph.model.quant import Fp4, Fp8Block
from v4graph.spec.model import ModelSpec

GATE_UP = "layers.1.ffn.experts.w13"


def fp8_experts(intermediate: int) -> ModelSpec:
    data = quantised_spec("f32").model_dump()
    data["weights"]["experts"] = "fp8_block"
    for ffn in data["ffn"].values():
        ffn["intermediate"] = intermediate
    return ModelSpec.model_validate(data)


def save(tensors: dict[str, Tensor], directory: Path) -> Path:
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("scale", ["e8m0", "f32"])
def test_bytes_are_those_of_the_files(scale: str, tmp_path: Path) -> None:
    spec = quantised_spec(scale)
    stored = stored_tensors(spec)
    params = load_quantised(spec, save(stored, tmp_path), torch.bfloat16)
    matrix = params[f"{QUERY}.weight"]
    assert isinstance(matrix, Fp8Block)
    assert same_bytes(matrix.weight, stored[f"{QUERY}.weight"])
    assert same_bytes(matrix.scale, stored[f"{QUERY}.scale"])
    experts = params[GATE_UP]
    assert isinstance(experts, Fp4)
    assert experts.packed.shape == (4, 64, 80)
    assert experts.scale.shape == (4, 64, 5)
    for part, rows in (("w1", slice(0, 32)), ("w3", slice(32, 64))):
        name = EXPERT.replace("w1", part)
        assert same_bytes(experts.packed[2, rows], stored[f"{name}.weight"])
        assert same_bytes(experts.scale[2, rows], stored[f"{name}.scale"])
    plain = params["embed.weight"]
    assert isinstance(plain, Tensor)
    assert plain.dtype is torch.bfloat16


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", ["fp4", "fp8_block"])
def test_dequantised_it_is_what_load_params_gives(
    dtype: torch.dtype, experts: str, tmp_path: Path
) -> None:
    spec = quantised_spec() if experts == "fp4" else fp8_experts(256)
    save(stored_tensors(spec), tmp_path)
    expected = load_params(spec, tmp_path, dtype)
    kept = load_quantised(spec, tmp_path, dtype)
    assert list(kept) == list(expected)
    for name, value in kept.items():
        got = value if isinstance(value, Tensor) else value.dequantise(dtype)
        assert got.dtype is expected[name].dtype, name
        assert torch.equal(got, expected[name]), name
    assert isinstance(kept[GATE_UP], Fp4 if experts == "fp4" else Fp8Block)


def test_it_is_smaller(tmp_path: Path) -> None:
    """An FP4 value with its share of the scale takes 4.25 bits."""
    spec = quantised_spec()
    save(stored_tensors(spec), tmp_path)
    experts = load_quantised(spec, tmp_path, torch.bfloat16)[GATE_UP]
    assert isinstance(experts, Fp4)
    assert experts.num_bytes * 8 == 4.25 * experts.dequantise().numel()


def test_stacked_fp8_needs_whole_blocks(tmp_path: Path) -> None:
    """w1 and w3 of 32 rows would share a block, hence a scale."""
    spec = fp8_experts(32)
    save(stored_tensors(spec), tmp_path)
    with pytest.raises(WeightsError, match=r"experts\.0\.w1\.weight: 32 rows.*multiple of 128"):
        load_quantised(spec, tmp_path, torch.bfloat16)
    assert load_params(spec, tmp_path, torch.bfloat16)[GATE_UP].shape == (4, 64, 160)


@pytest.mark.parametrize("scale", ["f32", "plain"])
def test_experts_of_a_layer_agree(scale: str, tmp_path: Path) -> None:
    spec = quantised_spec()
    stored = stored_tensors(spec)
    if scale == "plain":
        del stored[f"{EXPERT}.scale"]
        stored[f"{EXPERT}.weight"] = torch.ones(32, 160).bfloat16()
    else:
        stored[f"{EXPERT}.scale"] = stored[f"{EXPERT}.scale"].float()
    save(stored, tmp_path)
    load_params(spec, tmp_path, torch.float32)  # decoded, they need not
    with pytest.raises(WeightsError, match=rf"tensor {EXPERT}\.weight: .*must agree"):
        load_quantised(spec, tmp_path, torch.float32)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_codes_are_refused(byte: int, tmp_path: Path) -> None:
    spec = quantised_spec()
    stored = stored_tensors(spec)
    stored[f"{QUERY}.weight"].view(torch.uint8)[3, 5] = byte
    save(stored, tmp_path)
    for load in (load_params, load_quantised):
        with pytest.raises(
            NonFiniteWeightsError, match=rf"tensor {QUERY}\.weight: 1 of \d+ e4m3 codes"
        ):
            load(spec, tmp_path, torch.float32)


@pytest.mark.parametrize("name", [QUERY, EXPERT])
@pytest.mark.parametrize(
    ("scale", "value"), [("e8m0", math.nan), ("f32", math.nan), ("f32", math.inf)]
)
def test_nan_scales_are_refused(name: str, scale: str, value: float, tmp_path: Path) -> None:
    spec = quantised_spec(scale)
    stored = stored_tensors(spec)
    if scale == "e8m0":
        stored[f"{name}.scale"].view(torch.uint8)[0, 0] = 255
    else:
        stored[f"{name}.scale"][0, 0] = value
    save(stored, tmp_path)
    for load in (load_params, load_quantised):
        with pytest.raises(
            NonFiniteWeightsError, match=rf"tensor {name}\.weight: 1 of \d+ scales are NaN"
        ):
            load(spec, tmp_path, torch.float32)


def test_faults_of_headers_are_told_together(tmp_path: Path) -> None:
    spec = quantised_spec("f32")
    stored = stored_tensors(spec)
    stored[f"{QUERY}.scale"] = stored[f"{QUERY}.scale"].bfloat16()
    stored[f"{EXPERT}.scale"] = stored[f"{EXPERT}.scale"][:, :1]
    stored["norm.weight"] = torch.ones(161)
    del stored["head.weight"]
    save(stored, tmp_path)
    with pytest.raises(WeightsError) as caught:
        load_quantised(spec, tmp_path, torch.float32)
    for fault in (
        "4 tensors differ",
        "missing head.weight",
        f"{QUERY}.weight: scale of dtype BF16, expected one of F8_E8M0, F32, U8",
        f"{EXPERT}.weight: scale of shape (32, 1), expected (32, 5)",
        "norm.weight: shape (161,), expected (160,)",
    ):
        assert fault in str(caught.value)


def test_the_same_scales_as_e8m0_and_f32_give_the_same_values(tmp_path: Path) -> None:
    """The scale's own dtype decides, whatever the spec or a `scale_fmt` says."""
    spec = quantised_spec("e8m0")
    stored = stored_tensors(spec)
    save(stored, tmp_path)
    expected = load_params(spec, tmp_path, torch.float32)
    for name, tensor in stored.items():
        if tensor.dtype is torch.float8_e8m0fnu:
            exponent = tensor.view(torch.uint8).float() - 127
            stored[name] = torch.exp2(exponent)
    save(stored, tmp_path)
    got = load_params(spec, tmp_path, torch.float32)
    assert all(torch.equal(got[k], expected[k]) for k in expected)


def test_parameters_do_not_lie_in_the_files(tmp_path: Path) -> None:
    """A checkpoint that is written anew must not change what was loaded."""
    spec = quantised_spec()
    stored = stored_tensors(spec)
    path = save(stored, tmp_path) / "model.safetensors"
    params = load_quantised(spec, tmp_path, torch.bfloat16)
    before = params["embed.weight"]
    assert isinstance(before, Tensor)
    kept = before.clone()
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(before, kept)


def test_parameters_go_to_the_device_that_is_named(tmp_path: Path) -> None:
    """The meta device stands for a GPU: it has shapes, and nothing is left on the CPU."""
    spec = quantised_spec()
    save(stored_tensors(spec), tmp_path)
    here = load_quantised(spec, tmp_path, torch.bfloat16)
    there = load_quantised(spec, tmp_path, torch.bfloat16, device=torch.device("meta"))
    assert list(there) == list(here)
    for name, value in there.items():
        assert type(value) is type(here[name])
        for got, expected in zip(parts(value), parts(here[name]), strict=True):
            assert got.is_meta, name
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype), name


def parts(value: Tensor | Fp8Block | Fp4) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    first = value.weight if isinstance(value, Fp8Block) else value.packed
    return [first, value.scale]
