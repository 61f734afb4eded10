"""Decoding of the checkpoint's quantised tensors to ordinary floating point.

Formats are those of the published V4 files: e4m3 weights with one scale for a 128 x 128 block, e2m1
("FP4") weights packed two a byte, low nibble first, with one scale for 32 values along the input.
Scales are e8m0 (2^(byte - 127)) or float32; the tensor's own dtype decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_BLOCK = 128
FP4_GROUP = 32
FP4_VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def decode_scale(scale: Tensor) -> Tensor:
    """Scales as float32: e8m0 bytes are exponents (byte 120 is 2^-7, 255 is NaN).

    Some files store e8m0 as U8; those bytes mean the same.
    """
    if scale.dtype is torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)


def decode_fp8(weight: Tensor, scale: Tensor) -> Tensor:
    """`weight [o, i]` e4m3 times its block scales `[ceil(o / 128), ceil(i / 128)]`, float32."""
    factors = decode_scale(scale).repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return weight.to(torch.float32) * factors[: weight.shape[0], : weight.shape[1]]


def decode_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """`packed [o, i / 2]` int8 with scales `[o, i / 32]` as float32 `[o, i]`."""
    values = torch.tensor(FP4_VALUES, dtype=torch.float32, device=packed.device)
    byte = packed.view(torch.uint8).to(torch.int64)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1).flatten(-2)
    return pairs * decode_scale(scale).repeat_interleave(FP4_GROUP, 1)
