"""Products with weights as checkpoints store them: FP8 in blocks of 128 x 128, FP4 in groups of 32.

A weight's value is its code times its scale, exactly; activations are not quantised. Scales are
e8m0 (2^(byte - 127); uint8 tensors mean the same) or float32: the tensor's own dtype decides.

Shape suffixes: M or T tokens, G groups, K choices, D hidden, I intermediate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from v4graph.ops.norm import swiglu

FP8_BLOCK = 128
"""Rows and inputs that share a scale in FP8."""
FP4_GROUP = 32
"""Inputs that share a scale in FP4."""
FP4_VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
"""The value of each e2m1 code; bit 3 is the sign (OCP Microscaling Formats 1.0, section 5.3.3)."""


def scale_values(scale: Tensor) -> Tensor:
    """Scales as float32; e8m0 byte 120 is 2^-7, 255 is NaN (the same, section 5.4.1)."""
    if scale.dtype is torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)


def fp8_values(weight: Tensor, scale: Tensor) -> Tensor:
    """float32 values of `weight [..., o, i]` e4m3, `scale [..., ceil(o / 128), ceil(i / 128)]`.

    The codes 0x7F and 0xFF are NaN and stay it; e4m3 has no infinity.
    """
    rows, columns = weight.shape[-2:]
    factors = scale_values(scale).repeat_interleave(FP8_BLOCK, -1)[..., :columns]
    factors = factors.repeat_interleave(FP8_BLOCK, -2)[..., :rows, :]
    return weight.to(torch.float32).mul_(factors)


def fp4_values(packed: Tensor, scale: Tensor) -> Tensor:
    """Values `[..., i]` of `packed [..., i / 2]`, low nibble first, `scale [..., i / 32]`."""
    values = torch.tensor(FP4_VALUES, dtype=torch.float32, device=packed.device)
    # One look-up a byte: row b holds the values of its low and its high nibble.
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
    out = pairs[packed.view(torch.uint8).to(torch.int32)]
    out = out.view(*scale.shape, FP4_GROUP).mul_(scale_values(scale)[..., None])
    return out.flatten(-2)


def grouped_fp8_linear(x_MGK: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`out[m, g] = weight[g] @ x[m, g]`, `[M, G, o / G]`; `weight [o, i]` is the groups' rows."""
    values = fp8_values(weight, scale).unflatten(0, (x_MGK.shape[1], -1))
    out = torch.einsum("mgi,goi->mgo", x_MGK.float(), values)
    return out.to(x_MGK.dtype).contiguous()


def fp4_experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13: Tensor,
    s13: Tensor,
    w2: Tensor,
    s2: Tensor,
    clamp: float | None,
) -> Tensor:
    """`moe_experts` for packed experts, `[T, D]`; an expert of -1 adds nothing.

    Args:
        w13, s13: `[E, 2I, D / 2]` packed and `[E, 2I, D / 32]`; w2, s2: `[E, D, I / 2]` and
            `[E, D, I / 32]`. Only the chosen experts are decoded.
    """
    out = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for k in range(experts_TK.shape[1]):
        expert, weight = experts_TK[:, k].clamp_min(0), weights_TK[:, k, None]
        both = torch.einsum("ti,toi->to", x_TD.float(), fp4_values(w13[expert], s13[expert]))
        gate, up = both.chunk(2, dim=-1)
        h = (swiglu(gate, up, clamp) * weight).to(x_TD.dtype).float()
        y = torch.einsum("ti,toi->to", h, fp4_values(w2[expert], s2[expert]))
        out = out + torch.where(experts_TK[:, k, None] >= 0, y, 0.0)
    return out.to(x_TD.dtype)


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`x @ W.T` with the values of `weight`, accumulated in float32, in the dtype of `x`."""
    return F.linear(x.float(), fp8_values(weight, scale)).to(x.dtype)
