"""Two Triton kernels of the trainer, as differentiable PyTorch ops with a plain CPU path.

Sinkhorn is 40 tiny dependent normalisations: as separate kernels it would be a third of a training
step. Its backward recomputes the iterates, so nothing is stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it.
    triton = None

BLOCK = 32


def sinkhorn_reference(x: Tensor, iters: int, eps: float) -> Tensor:
    """`v4graph.ops.hyper.sinkhorn`, kept here so that autograd can run through it anywhere."""
    c = x.softmax(-1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def top_rows_reference(scores: Tensor, k: int) -> Tensor:
    if scores.shape[-1] <= k:
        return torch.ones_like(scores, dtype=torch.bool)
    return scores >= scores.topk(k, dim=-1).values[..., -1:]


if triton is not None:

    @triton.jit
    def _start(x, eps):
        e = tl.exp(x - tl.max(x, 2)[:, :, None])
        p = e / tl.sum(e, 2)[:, :, None] + eps
        return p, p / (tl.sum(p, 1)[:, None, :] + eps)

    @triton.jit
    def _iterate(c, eps):
        c = c / (tl.sum(c, 2)[:, :, None] + eps)
        return c / (tl.sum(c, 1)[:, None, :] + eps)

    @triton.jit
    def _sinkhorn_kernel(
        x_ptr, y_ptr, tokens, eps, iters: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr
    ):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, N)
        at = t[:, None, None] * (N * N) + i[None, :, None] * N + i[None, None, :]
        live = (t < tokens)[:, None, None]
        x = tl.load(x_ptr + at, mask=live, other=0.0)
        _, c = _start(x, eps)
        for _ in range(iters - 1):
            c = _iterate(c, eps)
        tl.store(y_ptr + at, c, mask=live)

    @triton.jit
    def _sinkhorn_grad_kernel(
        x_ptr,
        g_ptr,
        out_ptr,
        tokens,
        eps,
        iters: tl.constexpr,
        N: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        i = tl.arange(0, N)
        at = t[:, None, None] * (N * N) + i[None, :, None] * N + i[None, None, :]
        live = (t < tokens)[:, None, None]
        x = tl.load(x_ptr + at, mask=live, other=0.0)
        g = tl.load(g_ptr + at, mask=live, other=0.0)
        for back in range(iters - 1):
            _, a = _start(x, eps)
            for _ in range(iters - 2 - back):
                a = _iterate(a, eps)
            rows = tl.sum(a, 2)[:, :, None] + eps
            b = a / rows
            cols = tl.sum(b, 1)[:, None, :] + eps
            g = g / cols - tl.sum(g * b, 1)[:, None, :] / (cols * cols)
            g = g / rows - tl.sum(g * a, 2)[:, :, None] / (rows * rows)
        p, _ = _start(x, eps)
        cols = tl.sum(p, 1)[:, None, :] + eps
        g = g / cols - tl.sum(g * p, 1)[:, None, :] / (cols * cols)
        p = p - eps
        tl.store(out_ptr + at, p * (g - tl.sum(g * p, 2)[:, :, None]), mask=live)

    @triton.jit
    def _top_rows_kernel(x_ptr, out_ptr, width, k, WIDTH: tl.constexpr):
        j = tl.arange(0, WIDTH)
        at = tl.program_id(0).to(tl.int64) * width + j
        x = tl.load(x_ptr + at, mask=j < width, other=float("-inf"))
        bits = x.to(tl.int32, bitcast=True)
        # Order-preserving map of float bits to 0 .. 2^32 - 1; the k-th largest bit by bit.
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
        kth = tl.zeros((), tl.int64)
        for step in range(32):
            candidate = kth + (tl.full((), 1, tl.int64) << (31 - step))
            count = tl.sum((key >= candidate).to(tl.int32), 0)
            kth = tl.where(count >= k, candidate, kth)
        tl.store(out_ptr + at, (key >= kth).to(tl.int8), mask=j < width)


@torch.library.custom_op("nano::sinkhorn", mutates_args=())
def _sinkhorn(x: Tensor, iters: int, eps: float) -> Tensor:
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    n = x.shape[-1]
    tokens = x.numel() // (n * n)
    _sinkhorn_kernel[(triton.cdiv(tokens, BLOCK),)](x, y, tokens, eps, iters, n, BLOCK)
    return y


@_sinkhorn.register_fake
def _(x: Tensor, iters: int, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("nano::sinkhorn_grad", mutates_args=())
def _sinkhorn_grad(x: Tensor, g: Tensor, iters: int, eps: float) -> Tensor:
    x, g = x.contiguous(), g.contiguous()
    out, n = torch.empty_like(x), x.shape[-1]
    tokens = x.numel() // (n * n)
    _sinkhorn_grad_kernel[(triton.cdiv(tokens, BLOCK),)](x, g, out, tokens, eps, iters, n, BLOCK)
    return out


@_sinkhorn_grad.register_fake
def _(x: Tensor, g: Tensor, iters: int, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.rest = inputs[1:]


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.nano.sinkhorn_grad(*ctx.saved_tensors, g, *ctx.rest), None, None


_sinkhorn.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("nano::top_rows", mutates_args=())
def _top_rows(scores: Tensor, k: int) -> Tensor:
    scores, width = scores.contiguous(), scores.shape[-1]
    out = torch.empty(scores.shape, dtype=torch.int8, device=scores.device)
    padded = triton.next_power_of_2(width)
    _top_rows_kernel[(scores.numel() // width,)](scores, out, width, k, padded)
    return out


@_top_rows.register_fake
def _(scores: Tensor, k: int) -> Tensor:
    return torch.empty(scores.shape, dtype=torch.int8, device=scores.device)


def sinkhorn(x: Tensor, iters: int, eps: float) -> Tensor:
    """Sinkhorn projection of `x [..., N, N]`, float32."""
    if x.device.type == "cuda":
        return torch.ops.nano.sinkhorn(x, iters, eps)
    return sinkhorn_reference(x, iters, eps)


def top_rows(scores: Tensor, k: int) -> Tensor:
    """Mask of the `k` largest of the last axis; ties at the edge are all taken."""
    if scores.device.type == "cuda":
        return torch.ops.nano.top_rows(scores.detach(), k) != 0
    return top_rows_reference(scores.detach(), k)
