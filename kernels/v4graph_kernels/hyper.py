"""Hyper-connections: what surrounds a sublayer in two launches, or three if it stands alone.

`mix` reads the streams, split along their channels so that many programs share one token, and
leaves partial products; `enter` joins these into the mixing weights, projects by Sinkhorn,
collapses the streams and normalises. `leave` puts a sublayer's output back; fused with the next
site's `mix` it reads the new streams while they are in registers. See section 2.2 of the V4
report.

Shape suffixes: T tokens, N streams, D hidden, M = (2 + N) N mixing numbers, S parts of the
channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from v4graph_kernels.launch import (
    check,
    check_inner,
    empty_like_output,
    next_power_of_2,
    splits_for,
)
from v4graph_kernels.numerics import through
from v4graph_kernels.tuning import tuned

BLOCK_T = 16
"""Tokens of one program: the least that a matrix product takes."""
FEW_TOKENS = 4
"""Up to so many tokens are a program each: a product of 16 rows would be padding."""

_CONFIGS = [
    triton.Config({"BLOCK_D": d}, num_warps=w, num_stages=s)
    for d, w, s in ((64, 4, 1), (32, 4, 1), (32, 4, 2), (64, 8, 1))
]


@tuned(_CONFIGS, key=["T_KEY", "D", "LEAVE"])
@triton.jit(do_not_specialize=["T", "T_KEY"])
def _mix_kernel(
    x, y, post, comb, fn, out, mixes, squares, T, T_KEY, D, part_cols,
    LEAVE: tl.constexpr, N: tl.constexpr, M: tl.constexpr, M_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Partial `fn @ flat` and sum of squares over the channels of one part, of every stream.

    With LEAVE the streams are first `x'_k = post_k y + sum_j comb[j, k] x_j`, written to `out`.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    in_t = t < T
    row = t.to(tl.int64)
    m = tl.arange(0, M_PAD)
    acc = tl.zeros((BLOCK_T, M_PAD), tl.float32)
    single = tl.zeros((BLOCK_D if BLOCK_T == 1 else 1, M_PAD), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    for start in range(part * part_cols, tl.minimum((part + 1) * part_cols, D), BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        in_d = d < tl.minimum((part + 1) * part_cols, D)
        seen = in_t[:, None] & in_d[None, :]
        if LEAVE:
            y_tile = tl.load(y + row[:, None] * D + d[None, :], mask=seen, other=0.0).to(tl.float32)
        for k in tl.static_range(N):
            if LEAVE:
                factor = tl.load(post + row * N + k, mask=in_t, other=0.0)
                value = factor[:, None] * y_tile
                for j in tl.static_range(N):
                    at = x + row[:, None] * (N * D) + j * D + d[None, :]
                    stream = tl.load(at, mask=seen, other=0.0).to(tl.float32)
                    weight = tl.load(comb + row * (N * N) + j * N + k, mask=in_t, other=0.0)
                    value += weight[:, None] * stream
                to = out + row[:, None] * (N * D) + k * D + d[None, :]
                value = through(value, dtype)
                tl.store(to, value.to(dtype), mask=seen)
            else:
                at = x + row[:, None] * (N * D) + k * D + d[None, :]
                value = tl.load(at, mask=seen, other=0.0).to(tl.float32)
            at = fn + m[None, :] * (N * D) + k * D + d[:, None]
            w = tl.load(at, mask=(m < M)[None, :] & in_d[:, None], other=0.0)
            if BLOCK_T == 1:
                single += tl.reshape(value, (BLOCK_D,))[:, None] * w
            else:
                acc += tl.dot(value, w, input_precision="ieee")
            total += tl.sum(value * value, axis=1)
    if BLOCK_T == 1:
        acc = tl.sum(single, axis=0)[None, :]
    at = row * parts + part
    tl.store(mixes + at[:, None] * M_PAD + m[None, :], acc, mask=in_t[:, None])
    tl.store(squares + at, total, mask=in_t)


@triton.jit
def _gather_mixes(mixes, t, index, parts, M_PAD: tl.constexpr, PARTS: tl.constexpr):
    """Sum over the parts of mixing numbers `index [K]` of token t."""
    s = tl.arange(0, PARTS)
    at = (t * parts + s)[:, None] * M_PAD + index[None, :]
    return tl.sum(tl.load(mixes + at, mask=(s < parts)[:, None], other=0.0), axis=0)


@triton.jit
def _enter_kernel(
    x, mixes, squares, base, scale, norm_weight, h, post, comb, D, parts, eps, norm_eps,
    ITERS: tl.constexpr, N: tl.constexpr, M_PAD: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: mixing weights, Sinkhorn, collapse, norm."""
    t = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, PARTS)
    total = tl.sum(tl.load(squares + t * parts + s, mask=s < parts, other=0.0))
    factor = tl.rsqrt(total / (N * D) + norm_eps)
    n = tl.arange(0, N)
    nn = tl.arange(0, N * N)
    m_pre = _gather_mixes(mixes, t, n, parts, M_PAD, PARTS) * factor
    m_post = _gather_mixes(mixes, t, N + n, parts, M_PAD, PARTS) * factor
    m_comb = _gather_mixes(mixes, t, 2 * N + nn, parts, M_PAD, PARTS) * factor
    pre = tl.sigmoid(m_pre * tl.load(scale) + tl.load(base + n)) + eps
    after = 2.0 * tl.sigmoid(m_post * tl.load(scale + 1) + tl.load(base + N + n))
    tl.store(post + t * N + n, after)
    logits = m_comb * tl.load(scale + 2) + tl.load(base + 2 * N + nn)
    c = tl.reshape(logits, (N, N))
    c = tl.exp(c - tl.max(c, axis=1)[:, None])
    c = c / tl.sum(c, axis=1)[:, None] + eps
    c = c / (tl.sum(c, axis=0)[None, :] + eps)
    for _ in range(ITERS - 1):
        c = c / (tl.sum(c, axis=1)[:, None] + eps)
        c = c / (tl.sum(c, axis=0)[None, :] + eps)
    tl.store(comb + t * N * N + n[:, None] * N + n[None, :], c)
    d = tl.arange(0, BLOCK)
    dtype: tl.constexpr = x.dtype.element_ty
    u = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(N):
        part = tl.load(x + t * (N * D) + k * D + d, mask=d < D, other=0.0).to(tl.float32)
        u += tl.sum(tl.where(n == k, pre, 0.0)) * part
    u = through(u, dtype)
    u *= tl.rsqrt(tl.sum(u * u) / D + norm_eps)
    u *= tl.load(norm_weight + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(h + t * D + d, through(u, dtype).to(dtype), mask=d < D)


@tuned(
    [triton.Config({"BLOCK_D": d}, num_warps=w) for d, w in ((512, 4), (1024, 4), (256, 2))],
    key=["D"],
)
@triton.jit
def _leave_kernel(x, y, post, comb, out, D, N: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    dtype: tl.constexpr = x.dtype.element_ty
    y_tile = tl.load(y + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    for k in tl.static_range(N):
        value = tl.load(post + t * N + k) * y_tile
        for j in tl.static_range(N):
            stream = tl.load(x + t * (N * D) + j * D + d, mask=d < D, other=0.0).to(tl.float32)
            value += tl.load(comb + t * (N * N) + j * N + k) * stream
        tl.store(out + t * (N * D) + k * D + d, through(value, dtype).to(dtype), mask=d < D)


def _check(x: Tensor, fn: Tensor | None, **others: Tensor) -> tuple[int, int, int]:
    T, N, D = x.shape
    check(N & (N - 1) == 0, f"streams {N}: expected a power of two")
    for name, tensor in {"x": x, "fn": fn, **others}.items():
        check(tensor is None or tensor.is_contiguous(), f"{name}: expected a contiguous tensor")
    if fn is not None:
        check(fn.shape == ((2 + N) * N, N * D), f"fn: shape {tuple(fn.shape)} for {N} x {D}")
    return T, N, D


def _enter(
    x: Tensor,
    leaving: tuple[Tensor, Tensor, Tensor] | None,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Streams (new ones when `leaving` gives y, post, comb), h, post, comb."""
    T, N, D = _check(x, fn, base=base, scale=scale, norm_weight=norm_weight)
    y, post, comb = leaving or (x, x, x)
    check_inner("hyper_enter", y, post, comb)
    M = (2 + N) * N
    m_pad = max(next_power_of_2(M), 16)
    out = empty_like_output(x, x.shape) if leaving else x
    h = empty_like_output(x, (T, D))
    new_post = empty_like_output(x, (T, N), torch.float32)
    new_comb = empty_like_output(x, (T, N, N), torch.float32)
    if T == 0:
        return out, h, new_post, new_comb
    block_t = 1 if T <= FEW_TOKENS else BLOCK_T
    blocks_t = triton.cdiv(T, block_t)
    chunks = triton.cdiv(D, 64)
    part_cols = triton.cdiv(chunks, splits_for(blocks_t, chunks)) * 64
    parts = triton.cdiv(D, part_cols)
    mixes = empty_like_output(x, (T, parts, m_pad), torch.float32)
    squares = empty_like_output(x, (T, parts), torch.float32)
    _mix_kernel[(blocks_t, parts)](
        x, y, post, comb, fn, out, mixes, squares, T, next_power_of_2(T), D, part_cols,
        LEAVE=leaving is not None, N=N, M=M, M_PAD=m_pad, BLOCK_T=block_t,
    )  # fmt: skip
    _enter_kernel[(T,)](
        out, mixes, squares, base, scale, norm_weight, h, new_post, new_comb, D, parts,
        eps, norm_eps, ITERS=iters, N=N, M_PAD=m_pad, PARTS=next_power_of_2(parts),
        BLOCK=next_power_of_2(D), num_warps=8,
    )  # fmt: skip
    return out, h, new_post, new_comb


def hyper_enter(
    x_TND: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(h [T, D], post [T, N], comb [T, N, N])`: the normalised input of a sublayer, its weights.

    Args:
        x_TND: streams, contiguous; fn `[M, N D]`, base `[M]` and scale `[3]` float32.

    Raises:
        ValueError: shapes or strides that the kernels cannot address.
    """
    return _enter(x_TND, None, fn, base, scale, norm_weight, iters, eps, norm_eps)[1:]


def hyper_leave(x_TND: Tensor, y_TD: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`x'_k = post_k y + sum_j comb[j, k] x_j`, `[T, N, D]`; all arguments contiguous."""
    T, N, D = _check(x_TND, None, y=y_TD, post=post, comb=comb)
    out = empty_like_output(x_TND, x_TND.shape)
    if T:
        _leave_kernel[lambda meta: (T, triton.cdiv(D, meta["BLOCK_D"]))](
            x_TND, y_TD, post, comb, out, D, N=N
        )
    return out


def hyper_leave_enter(
    x_TND: Tensor,
    y_TD: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    *,
    iters: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`hyper_leave` of one site, then `hyper_enter` of the next: `(x', h, post', comb')`."""
    _check(x_TND, None, y=y_TD, post=post, comb=comb)
    leaving = (y_TD, post, comb)
    return _enter(x_TND, leaving, fn, base, scale, norm_weight, iters, eps, norm_eps)
