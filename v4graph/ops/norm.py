"""RMS normalisation and the clamped SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x * rsqrt(mean(x^2) + eps) * weight` over the last axis in float32, cast back once."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor, clamp: float | None) -> Tensor:
    """`silu(gate) * up` with the gate clamped above and `up` on both sides."""
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return F.silu(gate) * up
