"""Rotary embedding: cosines, sines and the interleaved rotation."""

from __future__ import annotations

import torch


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
