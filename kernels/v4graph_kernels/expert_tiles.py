"""Sorting (token, choice) pairs into tiles of one expert each, on the device, in fixed shapes.

The number of tiles is the most that so many pairs can need, so a CUDA graph captures it; those that
the routing does not fill name no expert. Pairs of an expert keep their order: the same bits in
every run, no atomics.

Shape suffixes: P pairs, E experts, N tiles of M places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.launch import empty_like_output, next_power_of_2

SCAN = 2048
"""Pairs that one step of a scan looks at."""
FEW_PAIRS = 1024
"""Up to so many pairs one launch places them; of more, another one counts first."""


@triton.jit
def _count_kernel(experts, counts, P, SCAN: tl.constexpr):
    """How many pairs chose this program's expert."""
    expert = tl.program_id(0)
    count = tl.zeros((SCAN,), tl.int32)
    for start in range(0, P, SCAN):
        p = start + tl.arange(0, SCAN)
        count += (tl.load(experts + p, mask=p < P, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count))


@triton.jit
def _count_all(experts, P, E_PAD: tl.constexpr, CHUNK: tl.constexpr):
    """How many pairs chose each expert, `[E_PAD]`."""
    e = tl.arange(0, E_PAD)[None, :]
    count = tl.zeros((E_PAD,), tl.int32)
    for start in range(0, P, CHUNK):
        p = start + tl.arange(0, CHUNK)
        chosen = tl.load(experts + p, mask=p < P, other=-1)
        count += tl.sum((chosen[:, None] == e).to(tl.int32), axis=0)
    return count


@triton.jit(do_not_specialize=["P", "N"])
def _place_kernel(
    experts, counts, pair, expert_of_tile, P, E, N,
    COUNTED: tl.constexpr, M: tl.constexpr, E_PAD: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Fill the tiles of one expert; program E fills those that are left."""
    expert = tl.program_id(0)
    e = tl.arange(0, E_PAD)
    if COUNTED:
        count = tl.load(counts + e, mask=e < E, other=0)
    else:
        # Few pairs are counted by every program: sooner done than another launch.
        count = tl.where(e < E, _count_all(experts, P, E_PAD, 32), 0)
    first = tl.sum(tl.where(e < expert, (count + M - 1) // M, 0))
    own = tl.sum(tl.where(e == expert, count, 0))
    tiles = (own + M - 1) // M
    if expert == E:
        tiles = N - first
    m = tl.arange(0, M)
    for tile in range(first, first + tiles):
        tl.store(expert_of_tile + tile, tl.where(expert == E, -1, expert))
        # The places that hold no pair; the others are stored below.
        tl.store(pair + tile * M + m, m * 0 - 1, mask=(tile - first) * M + m >= own)
    done = own * 0
    # An expert that nobody chose scans nothing.
    for start in range(0, tl.where(own > 0, P, 0), SCAN):
        p = start + tl.arange(0, SCAN)
        mine = tl.load(experts + p, mask=p < P, other=-1) == expert
        rank = done + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pair + first * M + rank, p, mask=mine)
        done += tl.sum(mine.to(tl.int32))


def expert_tiles(experts_P: Tensor, num_experts: int, places: int) -> tuple[Tensor, Tensor]:
    """`pair [N, places]` and `expert [N]`, int32, -1 where a place or a tile is empty.

    Args:
        experts_P: the expert of each pair; ids that do not exist have no place.
        places: pairs of a tile, a power of two.
    """
    P, E = experts_P.shape[0], num_experts
    # Each touched expert begins one tile; what is left fills whole ones.
    touched = min(P, E)
    N = touched + (P - touched) // places
    pair = empty_like_output(experts_P, (N, places), torch.int32)
    expert = empty_like_output(experts_P, (N,), torch.int32)
    scan = min(SCAN, next_power_of_2(P))
    counts = expert
    if P > FEW_PAIRS:
        counts = empty_like_output(experts_P, (E,), torch.int32)
        _count_kernel[(E,)](experts_P, counts, P, SCAN=scan, num_warps=4)
    _place_kernel[(E + 1,)](
        experts_P, counts, pair, expert, P, E, N,
        COUNTED=P > FEW_PAIRS, M=places, E_PAD=next_power_of_2(E), SCAN=scan, num_warps=4,
    )  # fmt: skip
    return pair, expert
