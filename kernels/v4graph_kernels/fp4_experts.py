"""Routed experts in FP4: only the experts that somebody chose are read.

Pairs are placed into tiles of one expert each (`expert_tiles`), which `fp4_grouped` multiplies; a
token then sums its choices in order. No shape depends on the routing. See section 2.1 of the V4
report.

Shape suffixes: T tokens, K choices, P = T K pairs, E experts, D hidden, J intermediate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.fp4_grouped import grouped_pairs
from v4graph_kernels.fp8_linear import as_bytes
from v4graph_kernels.launch import check, check_inner, empty_like_output


@triton.jit
def _sum_choices_kernel(
    y, experts, out, D, num_experts, TOPK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum a token's choices, in order; experts that do not exist add nothing."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOPK):
        expert = tl.load(experts + t * TOPK + k)
        # A choice is read even where its expert does not exist, and nothing wrote it then.
        part = tl.load(y + (t * TOPK + k) * D + d, mask=d < D, other=0.0)
        total += tl.where((expert >= 0) & (expert < num_experts), part, 0.0)
    tl.store(out + t * D + d, total.to(out.dtype.element_ty), mask=d < D)


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
    """Weighted sum of the chosen experts' clamped SwiGLU, `[T, D]` in the dtype of `x`.

    Args:
        weights_TK: routing weights, float32; they multiply the hidden activation. experts_TK:
        expert ids; ids that do not exist (-1 for padding) read and add nothing. w13, w2: packed
        FP4 `[E, 2J, D / 2]` (gate over up) and `[E, D, J / 2]`, 8 bits wide. s13, s2: scales `[E,
        2J, D / 32]` and `[E, D, J / 32]`, e8m0 (uint8 means the same) or float32.

    Raises:
        ValueError: shapes, strides or dtypes that the kernels cannot address.
    """
    T, D = x_TD.shape
    K = experts_TK.shape[1]
    E, J = w13.shape[0], w13.shape[1] // 2
    P = T * K
    shapes = {
        "w13": (w13, (E, 2 * J, D // 2)),
        "s13": (s13, (E, 2 * J, D // 32)),
        "w2": (w2, (E, D, J // 2)),
        "s2": (s2, (E, D, J // 32)),
        "weights": (weights_TK, (T, K)),
    }
    check(D % 32 == 0 and J % 32 == 0, f"{D} x {J} channels: expected multiples of 32")
    for name, (tensor, shape) in shapes.items():
        check(tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)}, expected {shape}")
        check(tensor.is_contiguous(), f"{name}: expected a contiguous tensor")
    check_inner("fp4_experts", x_TD)
    s13, e8m0 = as_bytes("s13", s13)
    s2, e8m0_2 = as_bytes("s2", s2)
    check(e8m0 == e8m0_2, "s13 and s2: expected one format of scales")
    out = empty_like_output(x_TD, (T, D))
    if P == 0:
        return out.zero_()
    experts = experts_TK.contiguous()
    codes = w13.view(torch.uint8), s13, w2.view(torch.uint8), s2
    y = grouped_pairs(x_TD, weights_TK, experts, *codes, clamp, e8m0)
    _sum_choices_kernel[(T, triton.cdiv(D, 512))](
        y, experts, out, D, E, TOPK=K, BLOCK=512, num_warps=4
    )
    return out
