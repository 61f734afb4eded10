"""Rotary tables: frequencies per rope entry, YaRN included, and the interleaved rotation."""

from __future__ import annotations

import math

import torch

from v4graph.spec.model import Rope


def inverse_frequencies(rope: Rope) -> torch.Tensor:
    """Angular frequency of every rotated pair, `[dim / 2]`, float32.

    YaRN blends f and f / factor along a ramp between the dimensions that turn `beta_fast` and
    `beta_slow` times over the original context (YaRN paper section 3.2; DeepSeek-V4 applies no
    mscale to the amplitude).
    """
    freqs = 1.0 / rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    if rope.yarn is None:
        return freqs
    y = rope.yarn

    def corrected_dim(turns: float) -> float:
        span = y.original_max_position / (turns * 2 * math.pi)
        return rope.dim * math.log(span) / (2 * math.log(rope.theta))

    low = max(math.floor(corrected_dim(y.beta_fast)), 0)
    high = min(math.ceil(corrected_dim(y.beta_slow)), rope.dim - 1)
    steps = torch.arange(rope.dim // 2, dtype=torch.float32)
    # A ramp of zero length would divide by zero.
    ramp = ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return freqs / y.factor * ramp + freqs * (1 - ramp)


def cos_sin(positions: torch.Tensor, freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of integer `positions [...]`: two float32 tensors `[..., dim / 2]`."""
    angles = positions[..., None].to(torch.float32) * freqs
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the last `2 * cos.shape[-1]` channels of `x [..., D]` in adjacent pairs.

    `cos` and `sin` must broadcast against `x [..., dim / 2]`. The inverse rotation is
    `rotate(x, cos, -sin)`. The result keeps the dtype of `x`; arithmetic is float32.
    """
    dim = 2 * cos.shape[-1]
    keep, turn = x[..., : x.shape[-1] - dim], x[..., x.shape[-1] - dim :]
    pairs = turn.to(torch.float32).unflatten(-1, (dim // 2, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return torch.cat((keep, turned.flatten(-2).to(x.dtype)), dim=-1)
