"""Rotary frequencies of a spec's `rope` entries, YaRN included."""

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
