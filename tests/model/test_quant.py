"""Decoding of FP8 and FP4 tensors: golden bytes, and every byte against a table by hand."""

from __future__ import annotations

import math

import pytest
import torch

from v4graph.ops.quantised import fp4_values, fp8_values, scale_values

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4 = E2M1 + [-v for v in E2M1]


def e8m0(*exponents: int) -> torch.Tensor:
    return torch.tensor(exponents, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def e4m3(byte: int) -> float:
    """The value of a byte by the format's definition: 1 sign, 4 exponent, 3 mantissa bits."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_scale_bytes_are_exponents() -> None:
    """A18: byte 120 is 2^-7, not 120."""
    assert scale_values(e8m0(120, 127, 128, 0, 254)).tolist() == [
        2.0**-7,
        1.0,
        2.0,
        2.0**-127,
        2.0**127,
    ]
    assert math.isnan(scale_values(e8m0(255)))


def test_every_fp8_byte() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 256)
    weight = every.view(torch.float8_e4m3fn)
    got = fp8_values(weight, e8m0(120, 121)[None])[0].tolist()
    for byte, value in enumerate(got):
        expected = e4m3(byte) * (2.0**-7, 2.0**-6)[byte // 128]
        assert value == expected or (math.isnan(value) and math.isnan(expected)), byte


def test_every_fp4_byte_low_nibble_first() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scale = e8m0(*[120] * 16)[:, None]
    for stored in (packed, packed.view(torch.int8)):
        got = fp4_values(stored, scale).flatten().tolist()
        for byte in range(256):
            low, high = FP4[byte & 15] * 2.0**-7, FP4[byte >> 4] * 2.0**-7
            assert got[2 * byte : 2 * byte + 2] == [low, high], byte


def test_fp4_signs_of_zero() -> None:
    zeros = fp4_values(torch.full((1, 16), 0x80, dtype=torch.uint8), torch.ones(1, 1))
    assert [math.copysign(1, v) for v in zeros[0].tolist()] == [1, -1] * 16


def test_fp4_scales_belong_to_32_values_along_the_input() -> None:
    packed = torch.full((2, 48), 0x22, dtype=torch.uint8).view(torch.int8)  # every value is 1
    scale = e8m0(127, 128, 129, 124, 125, 126).view(2, 3)
    got = fp4_values(packed, scale)
    assert got.shape == (2, 96)
    for row, scales in enumerate(([1, 2, 4], [1 / 8, 1 / 4, 1 / 2])):
        assert got[row].tolist() == [s for s in scales for _ in range(32)]


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 257), (1, 1), (127, 129)])
def test_fp8_scales_belong_to_blocks(shape: tuple[int, int]) -> None:
    weight = torch.ones(shape).to(torch.float8_e4m3fn)
    blocks = (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128))
    scale = torch.arange(1.0, blocks[0] * blocks[1] + 1).view(blocks)
    got = fp8_values(weight, scale)
    assert got.shape == shape
    for i in {0, min(127, shape[0] - 1), shape[0] - 1}:
        for j in {0, min(127, shape[1] - 1), min(128, shape[1] - 1), shape[1] - 1}:
            assert got[i, j] == scale[i // 128, j // 128]


def test_scales_that_are_no_powers_of_two_count_in_full() -> None:
    """A17: a truncated mantissa is off by up to a quarter."""
    scale = torch.rand(2, 2) + 0.01
    weight = torch.randn(200, 200).to(torch.float8_e4m3fn)
    blocks = torch.arange(200) // 128
    expected = weight.double() * scale.double()[blocks][:, blocks]
    torch.testing.assert_close(fp8_values(weight, scale).double(), expected, rtol=1e-6, atol=0)
    packed = torch.full((1, 16), 0x33, dtype=torch.uint8)
    assert fp4_values(packed, torch.tensor([[0.3]]))[0, 0] == pytest.approx(0.45, rel=1e-6)
