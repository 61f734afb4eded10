"""Hyper-connection kernels against the float64 maths and the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.kernel_error import assert_as_exact
from v4graph.ops.custom import hyper as ops
from v4graph_kernels import load

NUMBERS = {"iters": 20, "eps": 1e-6, "norm_eps": 1e-6}


class Site:
    """Streams and the weights of two sites, float32 or as `dtype` where a model would cast."""

    def __init__(
        self, tokens: int, hidden: int, dtype: torch.dtype, streams: int = 4, spread: float = 1.0
    ) -> None:
        n = streams
        self.x = torch.randn(tokens, n, hidden).to(dtype)
        self.y = torch.randn(tokens, hidden).to(dtype)
        self.fn = torch.randn((2 + n) * n, n * hidden) * (n * hidden) ** -0.5 * spread
        self.base = torch.randn((2 + n) * n)
        self.scale = 1 + 0.2 * torch.randn(3)
        self.norm = (1 + 0.1 * torch.randn(hidden)).to(dtype)
        self.post = 2 * torch.rand(tokens, n)
        self.comb = torch.rand(tokens, n, n)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self.fn, self.base, self.scale, self.norm

    @property
    def leaving(self) -> tuple[Tensor, ...]:
        return self.x, self.y, self.post, self.comb

    def exact_enter(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Straight from the equations, in float64."""
        n, eps = x.shape[1], NUMBERS["eps"]
        x = x.double()
        flat = x.flatten(1)
        flat = flat * (flat.square().mean(1, keepdim=True) + NUMBERS["norm_eps"]).rsqrt()
        mixes = flat @ self.fn.double().T
        scale, base = self.scale.double(), self.base.double()
        pre = (mixes[:, :n] * scale[0] + base[:n]).sigmoid() + eps
        post = 2 * (mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n]).sigmoid()
        c = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(1, (n, n)).softmax(2) + eps
        c = c / (c.sum(1, keepdim=True) + eps)
        for _ in range(NUMBERS["iters"] - 1):
            c = c / (c.sum(2, keepdim=True) + eps)
            c = c / (c.sum(1, keepdim=True) + eps)
        u = torch.einsum("tn,tnd->td", pre, x)
        h = u * (u.square().mean(1, keepdim=True) + NUMBERS["norm_eps"]).rsqrt()
        return h * self.norm.double(), post, c

    def exact_leave(self) -> Tensor:
        mixed = torch.einsum("tjk,tjd->tkd", self.comb.double(), self.x.double())
        return self.post.double()[..., None] * self.y.double()[:, None] + mixed


def run(device: str, name: str, *args: Tensor, **numbers: float) -> tuple[Tensor, ...]:
    out = getattr(load("hyper"), name)(*(a.to(device) for a in args), **numbers)
    return tuple(o.cpu() for o in (out if isinstance(out, tuple) else (out,)))


SHAPES = [(1, 64), (5, 96), (17, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_enter(device: str, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    site = Site(tokens, hidden, dtype)
    got = run(device, "hyper_enter", site.x, *site.weights, **NUMBERS)
    reference = ops.hyper_enter(site.x, *site.weights, **NUMBERS)
    for a, b, c in zip(got, reference, site.exact_enter(site.x), strict=True):
        assert_as_exact(a, b, c, factor=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_leave(device: str, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    site = Site(tokens, hidden, dtype)
    (got,) = run(device, "hyper_leave", *site.leaving)
    assert_as_exact(got, ops.hyper_leave(*site.leaving), site.exact_leave())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_leave_and_enter(device: str, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    site = Site(tokens, hidden, dtype)
    got = run(device, "hyper_leave_enter", *site.leaving, *site.weights, **NUMBERS)
    reference = ops.hyper_leave_enter(*site.leaving, *site.weights, **NUMBERS)
    # What follows is judged on the streams as the kernel rounded them.
    exact = (site.exact_leave(), *site.exact_enter(got[0]))
    for a, b, c in zip(got, reference, exact, strict=True):
        assert_as_exact(a, b, c, factor=3.0)


@pytest.mark.parametrize("streams", [1, 2])
def test_other_numbers_of_streams(device: str, streams: int) -> None:
    site = Site(3, 48, torch.float32, streams)
    got = run(device, "hyper_leave_enter", *site.leaving, *site.weights, **NUMBERS)
    reference = ops.hyper_leave_enter(*site.leaving, *site.weights, **NUMBERS)
    exact = (site.exact_leave(), *site.exact_enter(got[0]))
    for a, b, c in zip(got, reference, exact, strict=True):
        assert_as_exact(a, b, c, factor=3.0)


def test_strongly_asymmetric_mixing(device: str) -> None:
    site = Site(4, 64, torch.float32, spread=20.0)
    got = run(device, "hyper_enter", site.x, *site.weights, **NUMBERS)
    reference = ops.hyper_enter(site.x, *site.weights, **NUMBERS)
    for a, b, c in zip(got, reference, site.exact_enter(site.x), strict=True):
        assert_as_exact(a, b, c, factor=4.0)


def test_tokens_do_not_see_each_other(device: str) -> None:
    """A NaN in one token, padding for instance, leaves the others' bits alone."""
    site = Site(5, 64, torch.float32)
    args = [*site.leaving, *site.weights]
    clean = run(device, "hyper_leave_enter", *args, **NUMBERS)
    site.x[2], site.y[4] = float("nan"), float("inf")
    dirty = run(device, "hyper_leave_enter", *args, **NUMBERS)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[[0, 1, 3]], b[[0, 1, 3]])
        assert not b[2].isfinite().all()


def test_strided_streams_are_refused(device: str) -> None:
    site = Site(3, 64, torch.float32)
    x = site.x.transpose(0, 1).contiguous().transpose(0, 1).to(device)
    with pytest.raises(ValueError, match="x: expected a contiguous tensor"):
        load("hyper").hyper_enter(x, *(w.to(device) for w in site.weights), **NUMBERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_registered_soundly(dtype: torch.dtype) -> None:
    site = Site(3, 64, dtype)
    torch.library.opcheck(ops.hyper_enter, (site.x, *site.weights), NUMBERS)
    torch.library.opcheck(ops.hyper_leave, site.leaving)
    torch.library.opcheck(ops.hyper_leave_enter, (*site.leaving, *site.weights), NUMBERS)
