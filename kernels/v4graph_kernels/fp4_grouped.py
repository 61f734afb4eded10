"""Routed experts in FP4: a grouped product over tiles of one expert's pairs.

Low nibbles are even inputs and high ones odd, so activations lie as two halves, even channels and
odd ones: a nibble tile and its half multiply without shuffles, and the half goes straight to shared
memory. Weights are decoded in registers as `fp4_experts` does, and are the left operand.

Shape suffixes: T tokens, K choices, P pairs, N tiles, E experts, D hidden, J intermediate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.expert_tiles import expert_tiles
from v4graph_kernels.fp4_tiles import down, gate_up
from v4graph_kernels.launch import empty_like_output, next_power_of_2
from v4graph_kernels.tuning import tuned

_CONFIGS = [
    triton.Config({"BLOCK_N": n, "BLOCK_K": k}, num_warps=w, num_stages=s)
    for n, k, w, s in ((64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 8, 4), (128, 128, 8, 3))
]
# Where few pairs share an expert, reading is all: small programs, several a multiprocessor.
_FEW_CONFIGS = [
    triton.Config({"BLOCK_N": n, "BLOCK_K": k}, num_warps=w, num_stages=s)
    for n, k, w, s in (
        (32, 128, 2, 4),
        (32, 256, 2, 3),
        (32, 128, 2, 6),
        (64, 128, 4, 4),
        (16, 256, 1, 3),
        (64, 256, 4, 3),
    )
]
FEW_PLACES = 16
"""Pairs of the smallest tiles, the least that a product takes."""


@triton.jit
def _tile(pairs, expert_of_tile, M: tl.constexpr):
    """This program's expert, its pairs, and which of these are real."""
    tile = tl.program_id(1)
    pair = tl.load(pairs + tile * M + tl.arange(0, M)).to(tl.int64)
    return tl.load(expert_of_tile + tile).to(tl.int64), pair, pair >= 0


@triton.jit
def halves(block, BLOCK_N: tl.constexpr):
    """BLOCK_N channels, the even ones of a block and then the odd ones, so that both halves are
    stored in runs: `(channel, half, place in the half)`."""
    i = tl.arange(0, BLOCK_N)
    half = i // (BLOCK_N // 2)
    place = block * (BLOCK_N // 2) + i % (BLOCK_N // 2)
    return 2 * place + half, half, place


@triton.jit(do_not_specialize=["P", "P_KEY"])
def _gate_up_kernel(
    x, x_odd, weights, pairs, expert_of_tile, w13, s13, h, P, P_KEY, clamp,
    D: tl.constexpr, J: tl.constexpr, TOPK: tl.constexpr, CLAMP: tl.constexpr, E8M0: tl.constexpr,
    M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`h[:, p] = weight_p * swiglu(gate, up)` of BLOCK_N channels, for the pairs of a tile."""
    expert, pair, m_in = _tile(pairs, expert_of_tile, M)
    if expert < 0:
        return
    row, half, c = halves(tl.program_id(0), BLOCK_N)
    n_in = row < J
    gate_row = expert * 2 * J + row
    EVEN: tl.constexpr = (J % BLOCK_N == 0) and (D % BLOCK_K == 0)
    at = tl.where(m_in, pair // TOPK, 0) * (D // 2)
    out = gate_up(
        x + at, x_odd + at, m_in, w13 + gate_row * (D // 2), w13 + (gate_row + J) * (D // 2),
        s13 + gate_row * (D // 32), s13 + (gate_row + J) * (D // 32), n_in, D, clamp,
        CLAMP, E8M0, EVEN, M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    weight = tl.load(weights + pair, mask=m_in, other=0.0).to(tl.float32)
    to = h + (pair[None, :] + (half * P)[:, None]) * (J // 2) + c[:, None]
    out = (out * weight[None, :]).to(h.dtype.element_ty)
    tl.store(to, out, mask=n_in[:, None] & m_in[None, :])


@triton.jit(do_not_specialize=["P_KEY"])
def _down_kernel(
    h, h_odd, pairs, expert_of_tile, w2, s2, y, P_KEY,
    D: tl.constexpr, J: tl.constexpr, E8M0: tl.constexpr,
    M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`y[p] = w2 h[p]`, float32 `[P, D]`; pairs without a tile are not written."""
    expert, pair, m_in = _tile(pairs, expert_of_tile, M)
    if expert < 0:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < D
    row = expert * D + n
    EVEN: tl.constexpr = (D % BLOCK_N == 0) and (J % BLOCK_K == 0)
    at = tl.where(m_in, pair, 0) * (J // 2)
    acc = down(
        h + at, h_odd + at, m_in, w2 + row * (J // 2), s2 + row * (J // 32), n_in, J,
        E8M0, EVEN, M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    to = y + pair[None, :] * D + n[:, None]
    tl.store(to, acc, mask=n_in[:, None] & m_in[None, :])


_KEY = ["P_KEY", "D", "J", "M"]
_few = tuned(_FEW_CONFIGS, key=_KEY)
_many = tuned(_CONFIGS, key=_KEY)
_KERNELS = {
    True: (_few(_gate_up_kernel), _few(_down_kernel)),
    False: (_many(_gate_up_kernel), _many(_down_kernel)),
}


def split_channels(x_TD: Tensor) -> Tensor:
    """Even channels, then odd ones: `[2, T, D / 2]`."""
    return x_TD.unflatten(1, (-1, 2)).permute(2, 0, 1).contiguous()


def places_for(num_pairs: int, num_experts: int) -> int:
    """Pairs of a tile, 16 to 128: about those of one expert if all are chosen alike."""
    return min(max(next_power_of_2(num_pairs // num_experts), FEW_PLACES), 128)


def grouped_pairs(
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
    """What each pair adds to its token, float32 `[P, D]`; garbage where its expert does not exist.

    Arguments as `fp4_experts` has checked them, codes and e8m0 scales as uint8. The result takes
    4 D bytes a pair: 805 MB for 8,192 tokens of 6 choices and 4,096 channels.
    """
    D, topk = x_TD.shape[1], experts_TK.shape[1]
    E, J = w13.shape[0], w13.shape[1] // 2
    P = experts_TK.numel()
    places = places_for(P, E)
    pairs, expert_of_tile = expert_tiles(experts_TK.flatten(), E, places)
    x = split_channels(x_TD)
    h = empty_like_output(x_TD, (2, P, J // 2))
    y = empty_like_output(x_TD, (P, D), torch.float32)
    # Channels vary fastest: concurrent programs then share the rows of few tiles.
    tiles, key = expert_of_tile.shape[0], next_power_of_2(P)
    gate_up_kernel, down_kernel = _KERNELS[places == FEW_PLACES]
    gate_up_kernel[lambda meta: (triton.cdiv(J, meta["BLOCK_N"]), tiles)](
        x[0], x[1], weights_TK, pairs, expert_of_tile, w13, s13, h, P, key, clamp or 0.0,
        D=D, J=J, TOPK=topk, CLAMP=clamp is not None, E8M0=e8m0, M=places,
    )  # fmt: skip
    down_kernel[lambda meta: (triton.cdiv(D, meta["BLOCK_N"]), tiles)](
        h[0], h[1], pairs, expert_of_tile, w2, s2, y, key, D=D, J=J, E8M0=e8m0, M=places
    )
    return y
