"""Hyper-connections against a float64 account of them, written with loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from v4graph.ops.hyper import hyper_head, hyper_post, hyper_pre, sinkhorn

EPS = NORM_EPS = 1e-6
ITERS, STREAMS, HIDDEN = 20, 4, 24


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def exact_sinkhorn(logits: np.ndarray, iters: int = ITERS) -> np.ndarray:
    """Softmax over each row plus eps; then columns, then rows and columns in turn."""
    c = np.exp(logits - logits.max(-1, keepdims=True))
    c = c / c.sum(-1, keepdims=True) + EPS
    c = c / (c.sum(-2, keepdims=True) + EPS)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdims=True) + EPS)
        c = c / (c.sum(-2, keepdims=True) + EPS)
    return c


class Site:
    """Random weights of one hyper-connection and some streams."""

    def __init__(self, magnitude: float = 1.0, asymmetric: float = 1.0) -> None:
        n = STREAMS
        self.x = torch.randn(3, n, HIDDEN) * magnitude
        self.y = torch.randn(3, HIDDEN) * magnitude
        self.fn = torch.randn((2 + n) * n, n * HIDDEN) * (n * HIDDEN) ** -0.5
        self.base = torch.randn((2 + n) * n) * asymmetric
        self.scale = 1 + 0.2 * torch.randn(3)

    def pre(self) -> tuple[Tensor, Tensor, Tensor]:
        return hyper_pre(
            self.x, self.fn, self.base, self.scale, iters=ITERS, eps=EPS, norm_eps=NORM_EPS
        )

    def exact(self, transposed: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The sublayer input and the streams after it, float64."""
        n, x, y = STREAMS, self.x.double().numpy(), self.y.double().numpy()
        fn, base, scale = (t.double().numpy() for t in (self.fn, self.base, self.scale))
        u, out = np.zeros(y.shape), np.zeros(x.shape)
        for t in range(len(x)):
            flat = x[t].reshape(-1)
            mixes = fn @ (flat / np.sqrt((flat**2).mean() + NORM_EPS))
            pre = sigmoid(mixes[:n] * scale[0] + base[:n]) + EPS
            post = 2 * sigmoid(mixes[n : 2 * n] * scale[1] + base[n : 2 * n])
            logits = (mixes[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)
            comb = exact_sinkhorn(logits)
            if transposed:
                comb = comb.T
            u[t] = sum(pre[j] * x[t, j] for j in range(n))
            for k in range(n):
                out[t, k] = post[k] * y[t] + sum(comb[j, k] * x[t, j] for j in range(n))
        return u, out


def error(ours: Tensor, exact: np.ndarray) -> float:
    return float(np.abs(ours.double().numpy() - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize("magnitude", [1.0, 1e2, 1e4])
def test_streams_equal_float64(magnitude: float) -> None:
    """A15, A16: strongly asymmetric mixing, streams as large as a deep model's."""
    site = Site(magnitude, asymmetric=4.0)
    u, post, comb = site.pre()
    exact_u, exact_out = site.exact()
    assert error(u, exact_u) < 2e-6
    assert error(hyper_post(site.x, site.y, post, comb), exact_out) < 5e-6


def test_transposed_mixing_is_another_model() -> None:
    site = Site(asymmetric=4.0)
    _, post, comb = site.pre()
    out = hyper_post(site.x, site.y, post, comb)
    assert error(out, site.exact(transposed=True)[1]) > 0.05
    wrong = hyper_post(site.x, site.y, post, comb.transpose(-1, -2))
    assert error(wrong, site.exact(transposed=True)[1]) < 5e-6


@pytest.mark.parametrize("spread", [1.0, 5.0, 30.0])
def test_sinkhorn_equals_float64(spread: float) -> None:
    logits = torch.randn(7, STREAMS, STREAMS) * spread
    exact = exact_sinkhorn(logits.double().numpy())
    np.testing.assert_allclose(sinkhorn(logits, ITERS, EPS).numpy(), exact, rtol=2e-4, atol=2e-6)


def test_sinkhorn_is_doubly_stochastic() -> None:
    comb = sinkhorn(torch.randn(50, STREAMS, STREAMS), ITERS, EPS)
    # Columns come last, so they are exact up to eps; rows converge.
    torch.testing.assert_close(comb.sum(-2), torch.ones(50, STREAMS), atol=1e-5, rtol=0)
    torch.testing.assert_close(comb.sum(-1), torch.ones(50, STREAMS), atol=1e-3, rtol=0)
    assert (comb > 0).all()


def test_one_iteration_normalises_columns_only() -> None:
    logits = torch.randn(STREAMS, STREAMS) * 3
    comb = sinkhorn(logits, 1, EPS)
    np.testing.assert_allclose(comb.numpy(), exact_sinkhorn(logits.double().numpy(), 1), rtol=1e-5)
    assert not torch.allclose(comb.sum(-1), torch.ones(STREAMS), atol=1e-2)


@pytest.mark.parametrize("magnitude", [1.0, 1e4])
def test_the_same_input_gives_the_same_bits(magnitude: float) -> None:
    """A12: no atomics, no run-to-run noise."""
    site = Site(magnitude)
    first = site.pre()
    streams = hyper_post(site.x, site.y, *first[1:])
    for _ in range(20):
        again = site.pre()
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert torch.equal(hyper_post(site.x, site.y, *again[1:]), streams)


@pytest.mark.parametrize("magnitude", [1.0, 1e2, 1e4])
def test_bfloat16_streams_stay_close(magnitude: float) -> None:
    site = Site(magnitude)
    site.x, site.y = site.x.bfloat16(), site.y.bfloat16()
    u, post, comb = site.pre()
    assert u.dtype is torch.bfloat16
    assert post.dtype is comb.dtype is torch.float32
    exact_u, exact_out = site.exact()
    assert error(u, exact_u) < 1e-2
    assert error(hyper_post(site.x, site.y, post, comb), exact_out) < 1e-2


def test_head_equals_float64() -> None:
    n = STREAMS
    x = torch.randn(5, n, HIDDEN) * 30
    fn, base, scale = torch.randn(n, n * HIDDEN) * 0.1, torch.randn(n), torch.tensor([1.3])
    flat = x.double().flatten(1).numpy()
    flat = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + NORM_EPS)
    pre = sigmoid(flat @ fn.double().numpy().T * 1.3 + base.double().numpy()) + EPS
    exact = np.einsum("tn,tnd->td", pre, x.double().numpy())
    assert error(hyper_head(x, fn, base, scale, eps=EPS, norm_eps=NORM_EPS), exact) < 2e-6
