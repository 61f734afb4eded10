"""Linear layers of FP8 block-scaled weights; for few tokens each weight byte is read once.

Weights are decoded in registers and multiplied in the dtype of `x`; the 128 x 128 block scale,
e8m0 or float32, multiplies the float32 sum of a block of 128 inputs, so no scale is rounded.
Activations are not quantised. Many tokens are `fp8_gemm`'s.

Shape suffixes: M tokens, G groups, N outputs, K inputs of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.fp8_gemm import fp8_gemm
from v4graph_kernels.launch import (
    check,
    check_inner,
    empty_like_output,
    next_power_of_2,
    splits_for,
)
from v4graph_kernels.numerics import decode_e4m3, load_scale
from v4graph_kernels.tuning import tuned

SCALE_BLOCK = 128
FEW_TOKENS = 256
"""More tokens than this are no memory-bound product: `fp8_gemm` multiplies them in larger tiles."""

_CONFIGS = [
    triton.Config({"BLOCK_N": n}, num_warps=w, num_stages=s)
    for n, w, s in ((32, 2, 4), (32, 2, 6), (16, 1, 4), (64, 4, 4), (64, 2, 3), (128, 4, 3))
]


@tuned(_CONFIGS, key=["M_KEY", "N", "K"])
@triton.jit(do_not_specialize=["M", "M_KEY"])
def _fp8_linear_kernel(
    x, weight, scale, out, M, M_KEY, N, K, group_rows, part_cols,
    x_stride_m, x_stride_g, weight_stride, scale_stride,
    E8M0: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs over one part of K; with several parts `out` is float32 `[S, M, N]`.

    Outputs are the rows of the product, for they are many and tokens few.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    # BLOCK_N divides both: a program has one group and one row of scales.
    group = tl.program_id(0) * BLOCK_N // group_rows
    scales = scale + (tl.program_id(0) * BLOCK_N // 128).to(tl.int64) * scale_stride
    rows = weight + n.to(tl.int64)[:, None] * weight_stride
    inputs = x + m.to(tl.int64)[:, None] * x_stride_m + group.to(tl.int64) * x_stride_g
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    for start in range(part * part_cols, tl.minimum((part + 1) * part_cols, K), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        code = tl.load(rows + k, mask=(n < N)[:, None] & (k < K), other=0)
        tile = tl.load(inputs + k, mask=(m < M)[:, None] & (k < K), other=0.0)
        product = tl.dot(decode_e4m3(code, dtype), tl.trans(tile), input_precision="ieee")
        acc += product * load_scale(scales + start // 128, start < K, E8M0)
    at = out + (part * M + m).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & (m < M)[None, :])


@triton.jit(do_not_specialize=["size", "num_parts"])
def _sum_parts_kernel(parts, out, size, num_parts, BLOCK: tl.constexpr):
    """Sum `[S, size]` over S, in order: the same bits in every run."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + part * size + i, mask=i < size, other=0.0)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=i < size)


def as_bytes(name: str, scale: Tensor) -> tuple[Tensor, bool]:
    """Scales as the kernel takes them, and whether they are e8m0 bytes.

    Raises:
        ValueError: a dtype that is no format of scales.
    """
    if scale.dtype is torch.float32:
        return scale, False
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return scale.view(torch.uint8), True
    raise ValueError(f"{name}: {scale.dtype}, expected float32, float8_e8m0fnu or uint8")


def grouped_fp8_linear(x_MGK: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`out[m, g] = weight[g] @ x[m, g]`, `[M, G, N / G]` in the dtype of `x`.

    Args:
        x_MGK: any number of tokens; last axis contiguous.
        weight: e4m3 `[N, K]`, the groups' rows one after the other.
        scale: `[ceil(N / 128), ceil(K / 128)]`, float32 or e8m0 (uint8 means the same).

    Raises:
        ValueError: shapes, strides or dtypes that the kernel cannot address.
    """
    M, G, K = x_MGK.shape
    N = weight.shape[0]
    check(weight.dtype is torch.float8_e4m3fn, f"weight: {weight.dtype}, expected float8_e4m3fn")
    check(weight.shape[1] == K, f"weight: {weight.shape[1]} inputs, x has {K}")
    check(N % G == 0, f"weight: {N} rows do not split into {G} groups")
    check(G == 1 or N // G % 128 == 0, f"groups of {N // G} rows: expected a multiple of 128")
    expected = (triton.cdiv(N, SCALE_BLOCK), triton.cdiv(K, SCALE_BLOCK))
    check(tuple(scale.shape) == expected, f"scale: {tuple(scale.shape)}, expected {expected}")
    check_inner("grouped_fp8_linear", x_MGK, weight, scale)
    scale, e8m0 = as_bytes("scale", scale)
    out = empty_like_output(x_MGK, (M, G, N // G))
    if M == 0:
        return out
    # float32 products use no tensor cores, so larger tiles would only fill shared memory.
    if M > FEW_TOKENS and x_MGK.dtype is not torch.float32:
        fp8_gemm(x_MGK, weight, scale, e8m0, out)
        return out
    block_m = min(max(next_power_of_2(M), 16), 64)
    chunks = triton.cdiv(K, SCALE_BLOCK)
    # Parts of at least four blocks of inputs: shorter ones read less than they cost to sum.
    programs = triton.cdiv(N, 64) * triton.cdiv(M, block_m)
    part_cols = triton.cdiv(chunks, splits_for(programs, max(chunks // 4, 1))) * SCALE_BLOCK
    parts = triton.cdiv(K, part_cols)
    sums = out if parts == 1 else empty_like_output(x_MGK, (parts, M, N), torch.float32)

    def grid(meta: dict) -> tuple[int, int, int]:
        return triton.cdiv(N, meta["BLOCK_N"]), parts, triton.cdiv(M, block_m)

    _fp8_linear_kernel[grid](
        x_MGK, weight.view(torch.uint8), scale, sums, M, next_power_of_2(M), N, K, N // G,
        part_cols, x_MGK.stride(0), x_MGK.stride(1), weight.stride(0), scale.stride(0),
        E8M0=e8m0, BLOCK_M=block_m, BLOCK_K=SCALE_BLOCK,
    )  # fmt: skip
    if parts > 1:
        _sum_parts_kernel[(triton.cdiv(M * N, 512),)](
            sums, out, M * N, parts, BLOCK=512, num_warps=4
        )
    return out


def fp8_linear(x_MK: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`x @ weight.T`, `[M, N]`: `grouped_fp8_linear` with one group."""
    return grouped_fp8_linear(x_MK[:, None], weight, scale)[:, 0]
