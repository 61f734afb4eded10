"""Parameters as V4 checkpoints store them: FP8 linears in blocks, FP4 experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from v4graph.model.projections import StoredParam
from v4graph.model.quant import Fp4, Fp8Block
from v4graph.ops.quantised import FP4_GROUP, FP4_VALUES, FP8_BLOCK
from v4graph.ops.rows import power_of_two_exponent

LINEARS = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "e_proj", "h_proj")


def fp8(weight: Tensor) -> Fp8Block:
    """A matrix in e4m3 with an e8m0 scale for each block."""
    rows, columns = weight.shape
    blocks = torch.nn.functional.pad(weight, (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = blocks.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    exponent = power_of_two_exponent(blocks.abs().amax((1, 3)))
    scale = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    factors = torch.exp2(exponent.float()).repeat_interleave(FP8_BLOCK, 0)[:rows]
    factors = factors.repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return Fp8Block((weight / factors).to(torch.float8_e4m3fn), scale)


def fp4(weight: Tensor) -> Fp4:
    """Stacked matrices in e2m1 with an e8m0 scale for each group of 32 inputs."""
    groups = weight.unflatten(-1, (-1, FP4_GROUP))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    scaled = groups / torch.exp2(exponent)[..., None]
    codes = (scaled[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1).flatten(-2)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return Fp4(packed, (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu))


def stored(params: Mapping[str, Tensor]) -> dict[str, StoredParam]:
    """Parameters with linears in FP8 and experts in FP4, the others plain."""
    out: dict[str, StoredParam] = {}
    for name, value in params.items():
        last = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if name.endswith((".experts.w13", ".experts.w2")):
            out[name] = fp4(value)
        elif last in LINEARS and "compressor" not in name:
            out[name] = fp8(value)
        else:
            out[name] = value
    return out


def decoded(params: Mapping[str, StoredParam]) -> dict[str, Tensor]:
    """The values of all parameters, float32."""
    return {k: v if isinstance(v, Tensor) else v.dequantise() for k, v in params.items()}
