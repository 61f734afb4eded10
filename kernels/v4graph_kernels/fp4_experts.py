"""Routed experts in FP4: only the experts that somebody chose are read.

The kernels here are those of few tokens, and read each expert once; `fp4_grouped` has those of
many. A program belongs to a (token, choice) pair and a block of outputs. The first pair of an
expert serves all pairs of it; the programs of the others end at once. So nothing is sorted, and no
shape depends on the routing. See section 2.1 of the V4 report.

Shape suffixes: T tokens, K choices, P = T K pairs, E experts, D hidden, J intermediate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.fp4_grouped import grouped_pairs, halves, split_channels
from v4graph_kernels.fp4_tiles import down, gate_up
from v4graph_kernels.fp8_linear import as_bytes
from v4graph_kernels.launch import check, check_inner, empty_like_output, next_power_of_2
from v4graph_kernels.tuning import tuned

FEW_PAIRS = 1024
"""More pairs than this are sorted: a program here looks at all of them to find its expert's."""
BLOCK_M = 16

_CONFIGS = [
    triton.Config({"BLOCK_N": n, "BLOCK_K": k}, num_warps=w, num_stages=s)
    for n, k, w, s in ((32, 256, 2, 3), (64, 256, 4, 3), (32, 256, 2, 4), (32, 128, 2, 4))
]


@triton.jit
def _own_pairs(experts, P, num_experts, P_PAD: tl.constexpr):
    """The expert of this program's pair, how many pairs it serves, and each pair's rank or -1.

    The number is 0 for pairs that another one serves, and for experts that do not exist.
    """
    pair = tl.program_id(1)
    p = tl.arange(0, P_PAD)
    all_experts = tl.load(experts + p, mask=p < P, other=-1)
    expert = tl.load(experts + pair)
    same = (all_experts == expert) & (p < P)
    exists = (expert >= 0) & (expert < num_experts)
    is_first = tl.sum((same & (p < pair)).to(tl.int32)) == 0
    rank = tl.where(same, tl.cumsum(same.to(tl.int32), 0) - 1, -1)
    count = tl.where(exists & is_first, tl.sum(same.to(tl.int32)), 0)
    return expert.to(tl.int64), count, rank


@triton.jit
def _pairs_at(rank, m, P_PAD: tl.constexpr):
    """The pairs of ranks `m`; 0 where there is none."""
    p = tl.arange(0, P_PAD)
    pair = tl.sum(tl.where(rank[None, :] == m[:, None], p[None, :], 0), axis=1)
    return pair.to(tl.int64)


@tuned(_CONFIGS, key=["P", "D", "J"])
@triton.jit(do_not_specialize=["P"])
def _gate_up_kernel(
    x, x_odd, weights, experts, w13, s13, h, P, num_experts, clamp,
    D: tl.constexpr, J: tl.constexpr, TOPK: tl.constexpr, CLAMP: tl.constexpr, E8M0: tl.constexpr,
    P_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`h[:, p] = weight_p * swiglu(gate, up)` of BLOCK_N channels, even ones and odd ones apart."""
    expert, count, rank = _own_pairs(experts, P, num_experts, P_PAD)
    row, half, c = halves(tl.program_id(0), BLOCK_N)
    n_in = row < J
    gate_row = expert * 2 * J + row
    EVEN: tl.constexpr = (J % BLOCK_N == 0) and (D % BLOCK_K == 0)
    for first in range(0, count, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        m_in = m < count
        pair = _pairs_at(rank, m, P_PAD)
        at = pair // TOPK * (D // 2)
        out = gate_up(
            x + at, x_odd + at, m_in, w13 + gate_row * (D // 2), w13 + (gate_row + J) * (D // 2),
            s13 + gate_row * (D // 32), s13 + (gate_row + J) * (D // 32), n_in, D, clamp,
            CLAMP, E8M0, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        weight = tl.load(weights + pair, mask=m_in, other=0.0).to(tl.float32)
        to = h + (pair[None, :] + (half * P)[:, None]) * (J // 2) + c[:, None]
        out = (out * weight[None, :]).to(h.dtype.element_ty)
        tl.store(to, out, mask=n_in[:, None] & m_in[None, :])


@tuned(_CONFIGS, key=["P", "D", "J"])
@triton.jit(do_not_specialize=["P"])
def _down_kernel(
    h, h_odd, experts, w2, s2, y, P, num_experts,
    D: tl.constexpr, J: tl.constexpr, E8M0: tl.constexpr, P_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`y[p] = w2 h[p]`, float32 `[P, D]`; pairs whose expert does not exist are not written."""
    expert, count, rank = _own_pairs(experts, P, num_experts, P_PAD)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < D
    row = expert * D + n
    EVEN: tl.constexpr = (D % BLOCK_N == 0) and (J % BLOCK_K == 0)
    for first in range(0, count, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        m_in = m < count
        pair = _pairs_at(rank, m, P_PAD)
        at = pair * (J // 2)
        acc = down(
            h + at, h_odd + at, m_in, w2 + row * (J // 2), s2 + row * (J // 32), n_in, J,
            E8M0, EVEN, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        to = y + pair[None, :] * D + n[:, None]
        tl.store(to, acc, mask=n_in[:, None] & m_in[None, :])


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
    pairs = _few_pairs if P <= FEW_PAIRS else grouped_pairs
    y = pairs(x_TD, weights_TK, experts, *codes, clamp, e8m0)
    _sum_choices_kernel[(T, triton.cdiv(D, 512))](
        y, experts, out, D, E, TOPK=K, BLOCK=512, num_warps=4
    )
    return out


def _few_pairs(
    x_TD: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    w13: Tensor,
    s13: Tensor,
    w2: Tensor,
    s2: Tensor,
    clamp: float | None,
    e8m0: bool,
) -> Tensor:
    """What each pair adds to its token; arguments and result as in `grouped_pairs`."""
    D, K = x_TD.shape[1], experts_TK.shape[1]
    E, J = w13.shape[0], w13.shape[1] // 2
    P = experts_TK.numel()
    x = split_channels(x_TD)
    h = empty_like_output(x_TD, (2, P, J // 2))
    y = empty_like_output(x_TD, (P, D), torch.float32)
    constants = {"E8M0": e8m0, "P_PAD": next_power_of_2(P), "BLOCK_M": BLOCK_M}
    _gate_up_kernel[lambda meta: (triton.cdiv(J, meta["BLOCK_N"]), P)](
        x[0], x[1], weights_TK, experts_TK, w13, s13, h, P, E, clamp or 0.0,
        D=D, J=J, TOPK=K, CLAMP=clamp is not None, **constants,
    )  # fmt: skip
    _down_kernel[lambda meta: (triton.cdiv(D, meta["BLOCK_N"]), P)](
        h[0], h[1], experts_TK, w2, s2, y, P, E, D=D, J=J, **constants
    )
    return y
