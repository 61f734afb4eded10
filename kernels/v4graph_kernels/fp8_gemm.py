"""Linear layers of FP8 block-scaled weights for many tokens: a tiled product in 16-bit arithmetic.

A weight tile is decoded in registers and is the left operand of the product, so that it never goes
back to shared memory; tokens come straight from there. How the 128 x 128 block scale enters:

- e8m0 scales multiply the decoded weight. That is exact: a power of two changes no mantissa, and
  bf16 has the exponents of float32 (from scales of 2^-117 on, where no code becomes subnormal). One
  accumulator serves the whole sum, and the products of successive blocks can overlap.
- float32 scales multiply the float32 sum of each block of 128 inputs, since weight x scale would
  have to be rounded to 16 bits. So do all scales of float16 activations, whose range is short.

Shape suffixes: M tokens, G groups, N outputs, K inputs of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.launch import next_power_of_2
from v4graph_kernels.numerics import decode_e4m3, load_scale
from v4graph_kernels.tuning import tuned

BLOCK = 128
"""Outputs and inputs of a weight tile: those of one scale."""
ROW_OF_TILES = 8
"""Token tiles that neighbouring programs share a weight tile for; together they stay in the L2."""


def _config(block_m: int, num_warps: int, num_stages: int) -> triton.Config:
    return triton.Config({"BLOCK_M": block_m}, num_warps=num_warps, num_stages=num_stages)


_CONFIGS = [_config(128, 8, 3), _config(128, 8, 4), _config(64, 4, 4), _config(64, 8, 3)]
# Without a second accumulator twice as many tokens fit: half the decoding for each.
_FOLDED_CONFIGS = [*_CONFIGS, _config(256, 8, 2)]


@triton.jit(do_not_specialize=["M", "M_KEY"])
def _gemm_kernel(
    x, weight, scale, out, M, M_KEY, N, K, group_rows,
    x_stride_m, x_stride_g, weight_stride, scale_stride,
    E8M0: tl.constexpr, FOLD: tl.constexpr, BLOCK: tl.constexpr, ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """BLOCK outputs of BLOCK_M tokens over all of K; outputs are the rows of the product."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK)
    pid = tl.program_id(0)
    first = pid // (ROW * tiles_n) * ROW
    height = tl.minimum(tiles_m - first, ROW)
    inside = pid % (ROW * tiles_n)
    tile_n = inside // height
    n = tile_n * BLOCK + tl.arange(0, BLOCK)
    m = (first + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    # BLOCK divides the rows of a group, so a program has one group and one row of scales.
    group = tile_n * BLOCK // group_rows
    scales = scale + tile_n.to(tl.int64) * scale_stride
    rows = weight + n.to(tl.int64)[:, None] * weight_stride
    inputs = x + m.to(tl.int64)[:, None] * x_stride_m + group.to(tl.int64) * x_stride_g
    dtype: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros((BLOCK, BLOCK_M), tl.float32)
    for block in range(0, tl.cdiv(K, BLOCK)):
        k = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        code = tl.load(rows + k, mask=(n < N)[:, None] & (k < K), other=0)
        tile = tl.load(inputs + k, mask=(m < M)[:, None] & (k < K), other=0.0)
        s = load_scale(scales + block, True, E8M0)
        values = decode_e4m3(code, dtype)
        if FOLD:
            acc = tl.dot(values * s.to(dtype), tl.trans(tile), acc, input_precision="ieee")
        else:
            acc += tl.dot(values, tl.trans(tile), input_precision="ieee") * s
    at = out + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


_KEY = ["M_KEY", "N", "K", "FOLD"]
_folded_kernel = tuned(_FOLDED_CONFIGS, key=_KEY)(_gemm_kernel)
_scaled_kernel = tuned(_CONFIGS, key=_KEY)(_gemm_kernel)


def fp8_gemm(x_MGK: Tensor, weight: Tensor, scale: Tensor, e8m0: bool, out_MN: Tensor) -> None:
    """Fill `out [M, G, N / G]` with `weight[g] @ x[m, g]`; arguments as `fp8_linear` checked them.

    Args:
        x_MGK: bf16 or float16. float32 is right too, but on a GPU its tiles may not fit.
        weight: e4m3 `[N, K]`. scale: `[ceil(N / 128), ceil(K / 128)]`, bytes if `e8m0`, or float32.
        out_MN: contiguous, in the dtype of `x`.
    """
    M, G, K = x_MGK.shape
    N = weight.shape[0]
    fold = e8m0 and x_MGK.dtype is not torch.float16
    kernel = _folded_kernel if fold else _scaled_kernel
    kernel[lambda meta: (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, BLOCK),)](
        x_MGK, weight.view(torch.uint8), scale, out_MN, M, next_power_of_2(M), N, K, N // G,
        x_MGK.stride(0), x_MGK.stride(1), weight.stride(0), scale.stride(0),
        E8M0=e8m0, FOLD=fold, BLOCK=BLOCK, ROW=ROW_OF_TILES,
    )  # fmt: skip
