"""The checkpoint's quantised tensors: as stored, and decoded to ordinary floating point.

Formats are those of the published V4 files, whose `inference/convert.py` decodes them alike:

- FP8: e4m3 weights with one scale for a 128 x 128 block; the last block of a side may be partial;
- FP4: e2m1 weights packed two a byte along the input, low nibble first (OCP Microscaling Formats
  1.0, section 5.3.3), with one scale for 32 of them.

Scales are e8m0 (2^(byte - 127), 255 is NaN: the same standard, section 5.4.1) or float32; the scale
tensor's own dtype decides. Axes: `o` output rows, `i` inputs; `...` are leading axes, such as the
experts of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from v4graph.ops.quantised import FP4_GROUP, FP8_BLOCK, fp4_values, fp8_values


@dataclass(frozen=True)
class Fp8Block:
    """An e4m3 weight as its file stores it."""

    weight: Tensor
    """`[..., o, i]` float8_e4m3fn."""
    scale: Tensor
    """`[..., ceil(o / 128), ceil(i / 128)]` float8_e8m0fnu or float32."""

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.weight.nbytes + self.scale.nbytes

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, `[..., o, i]`."""
        return fp8_values(self.weight, self.scale).to(dtype)


@dataclass(frozen=True)
class Fp4:
    """A packed e2m1 weight as its file stores it."""

    packed: Tensor
    """`[..., o, i / 2]` uint8: values 2p (low nibble) and 2p + 1 (high) in byte p."""
    scale: Tensor
    """`[..., o, i / 32]` float8_e8m0fnu or float32."""

    @property
    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.packed.nbytes + self.scale.nbytes

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, `[..., o, i]`."""
        return fp4_values(self.packed, self.scale).to(dtype)


def scale_shape_fp8(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of an FP8 weight `[..., o, i]`."""
    return (*shape[:-2], *(-(-n // FP8_BLOCK) for n in shape[-2:]))


def scale_shape_fp4(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of an FP4 weight of packed shape `[..., o, i / 2]`."""
    return (*shape[:-1], shape[-1] * 2 // FP4_GROUP)


def stored_scale(scale: Tensor) -> Tensor:
    """Scales in the dtype that they mean: U8 bytes, as some files store e8m0, become e8m0."""
    return scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale
