"""Projections by weights of any format: plain, FP8 in blocks, FP4 experts.

A layer's weights are tensors by name. What is stored in FP8 or FP4 has its scales beside it, as
`<name>.scale`; nothing else says how a projection is computed, so one code path serves checkpoints
of every kind. Decoded weights are multiplied by the compiler's own products, stored ones by the
registered operators.

Shape suffixes: T tokens, D inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from v4graph.model.quant import Fp4, Fp8Block
from v4graph.ops.custom import quantised
from v4graph.ops.moe import moe_experts
from v4graph.ops.quantised import FP8_BLOCK

Tensors = dict[str, Tensor]
StoredParam = Tensor | Fp8Block | Fp4
"""A parameter: plain, or as its file stores it."""
FLOAT32 = ("attn.compress", "ffn.gate.weight")
"""Projections whose products are float32: the compressors' and the routers'."""


_MULTIPLIED = (
    *("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3", "w13"),
    *("e_proj", "h_proj", "main_proj"),
)


def tensors_of(param: StoredParam) -> tuple[Tensor, ...]:
    """The tensors of a parameter: itself, or codes and scales."""
    if isinstance(param, Fp8Block):
        return param.weight, param.scale
    return (param.packed, param.scale) if isinstance(param, Fp4) else (param,)


def decode_others(w: Mapping[str, StoredParam], dtype: torch.dtype) -> dict[str, StoredParam]:
    """Parameters, those decoded that no operator multiplies as stored (compressors, head, ...)."""

    def kept(name: str) -> bool:
        layer = name.removesuffix(".weight").rsplit(".", 1)[-1]
        return layer in _MULTIPLIED and "compressor" not in name

    return {
        k: p.dequantise(dtype) if isinstance(p, Fp8Block) and not kept(k) else p
        for k, p in w.items()
    }


def stack(w: dict[str, StoredParam], name: str, parts: Sequence[str]) -> None:
    """Replace `parts` by their concatenation along the output axis, as `name`.

    What cannot lie in one tensor (another format, FP8 rows that begin within a block) goes on as
    `name.1`, `name.2`, ...; `split_linear` puts the outputs in a row again.
    """
    runs: list[list[StoredParam]] = []
    for part in parts:
        param = w.pop(part)
        if runs and _joins(runs[-1], param):
            runs[-1].append(param)
        else:
            runs.append([param])
    for i, run in enumerate(runs):
        w[_run_name(name, i)] = _concatenated(run)


def _run_name(name: str, index: int) -> str:
    return f"{name}.{index}" if index else name


def _joins(run: list[StoredParam], param: StoredParam) -> bool:
    last = run[-1]
    if isinstance(last, Tensor) and isinstance(param, Tensor):
        return last.dtype == param.dtype
    if isinstance(last, Fp8Block) and isinstance(param, Fp8Block):
        return last.weight.shape[0] % FP8_BLOCK == 0 and last.scale.dtype == param.scale.dtype
    return False


def _concatenated(run: list[StoredParam]) -> StoredParam:
    plain = [p for p in run if isinstance(p, Tensor)]
    blocks = [p for p in run if isinstance(p, Fp8Block)]
    if len(run) == 1:
        return run[0]
    if blocks:
        # Not every torch concatenates e8m0.
        scales = torch.cat([_as_bytes(p.scale) for p in blocks])
        scales = scales.view(blocks[0].scale.dtype) if scales.dtype is torch.uint8 else scales
        return Fp8Block(torch.cat([p.weight for p in blocks]), scales)
    return torch.cat(plain)


def flatten(w: Mapping[str, StoredParam], dtype: torch.dtype) -> Tensors:
    """Stored parameters as tensors, scales beside them; e8m0 scales as bytes.

    Experts in FP8 have no operator of their own: they are decoded to `dtype`.
    """
    out: Tensors = {}
    for name, param in w.items():
        if isinstance(param, Tensor):
            out[name] = param
        elif isinstance(param, Fp4):
            out[name], out[f"{name}.scale"] = param.packed, _as_bytes(param.scale)
        elif param.weight.dim() > 2:
            out[name] = param.dequantise(dtype)
        else:
            out[name], out[f"{name}.scale"] = param.weight, _as_bytes(param.scale)
    return out


def _as_bytes(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8) if scale.dtype is torch.float8_e8m0fnu else scale


def linear(x: Tensor, w: Tensors, name: str) -> Tensor:
    """`x [..., D]` times the weight called `name`, in the dtype of `x`."""
    scale = w.get(f"{name}.scale")
    if scale is None:
        return F.linear(x, w[name])
    return quantised.fp8_linear(x.flatten(0, -2), w[name], scale).unflatten(0, x.shape[:-1])


def split_linear(x_TD: Tensor, w: Tensors, name: str, sizes: Sequence[int]) -> list[Tensor]:
    """The outputs of projections that `stack` put together, `[T, size]` each."""
    out: list[Tensor] = []
    run = 0
    while len(out) < len(sizes):
        y = linear(x_TD, w, _run_name(name, run))
        begin = 0
        while len(out) < len(sizes) and begin < y.shape[1]:
            out.append(y[:, begin : begin + sizes[len(out)]])
            begin += sizes[len(out) - 1]
        run += 1
    return out


def joint_linear(x_TD: Tensor, w: Tensors, name: str) -> Tensor:
    """The outputs of all projections that `stack` put together, `[T, sum of their rows]`."""
    parts = [linear(x_TD, w, name)]
    while (more := _run_name(name, len(parts))) in w:
        parts.append(linear(x_TD, w, more))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def linear_rows(x_TD: Tensor, w: Tensors, name: str, begin: int, size: int) -> Tensor:
    """Outputs [begin, begin + size) of projections that `stack` put together, `[T, size]`."""
    weight = w[name]
    if f"{name}.scale" in w or begin + size > weight.shape[0]:
        return split_linear(x_TD, w, name, [begin, size])[1]
    return F.linear(x_TD, weight[begin : begin + size])


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` with float32 products and sums.

    Weights that a GPU keeps in bf16 are multiplied there with bf16 inputs, whose products float32
    holds exactly: nothing is converted, and a matrix is read at its stored size.
    """
    if weight.dtype is torch.float32 or weight.device.type != "cuda":
        return F.linear(x.float(), weight.float())
    return torch.mm(x.to(weight.dtype), weight.t(), out_dtype=torch.float32)


def grouped_linear(x_TGD: Tensor, w: Tensors, name: str) -> Tensor:
    """`out[t, g] = weight[g] @ x[t, g]`, `[T, G, rows / G]`; the weight is the groups' rows."""
    scale, groups = w.get(f"{name}.scale"), x_TGD.shape[1]
    if scale is not None:
        return quantised.grouped_fp8_linear(x_TGD, w[name], scale)
    weight = w[name].unflatten(0, (groups, -1))
    return torch.bmm(x_TGD.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def experts(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    is_valid_T: Tensor,
    w: Tensors,
    name: str,
    clamp: float | None,
) -> Tensor:
    """`moe_experts` by the stacked matrices `name.w13` and `name.w2`; padding may yield anything.

    Args:
        is_valid_T: tokens that are no padding: only their experts need be read.
    """
    w13, w2 = w[f"{name}.w13"], w[f"{name}.w2"]
    s13, s2 = w.get(f"{name}.w13.scale"), w.get(f"{name}.w2.scale")
    if s13 is None or s2 is None:
        return moe_experts(x_TD, weights_TK, experts_TK, w13, w2, clamp)
    chosen = torch.where(is_valid_T[:, None], experts_TK, -1)
    return quantised.fp4_experts(x_TD, weights_TK, chosen, w13, s13, w2, s2, clamp)
