"""RMS normalisation and the clamped SwiGLU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from v4graph.ops.norm import rms_norm, swiglu


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm_equals_float64(magnitude: float, weighted: bool) -> None:
    x = torch.randn(5, 48) * magnitude
    weight = 1 + 0.1 * torch.randn(48) if weighted else None
    exact = x.double().numpy()
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6)
    exact = exact * (weight.double().numpy() if weight is not None else 1)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-6).numpy(), exact, rtol=2e-6, atol=1e-7)


def test_rms_norm_keeps_the_dtype_and_rounds_once() -> None:
    x = torch.randn(4, 64).bfloat16()
    weight = torch.randn(64).bfloat16()
    once = rms_norm(x.float(), weight.float(), 1e-6).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), once)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), None, 1e-6), torch.zeros(2, 8))


def test_swiglu_clamps_the_gate_above_and_up_on_both_sides() -> None:
    gate = torch.tensor([-20.0, -20.0, 20.0, 20.0, 3.0])
    up = torch.tensor([20.0, -20.0, 20.0, -20.0, 0.5])

    def silu(g: float) -> float:
        return g / (1 + np.exp(-g))

    expected = [10 * silu(-20), -10 * silu(-20), 10 * silu(10), -10 * silu(10), 0.5 * silu(3)]
    clamped = swiglu(gate, up, 10.0).tolist()
    assert clamped == pytest.approx(expected, rel=1e-6)
    free = swiglu(gate, up, None).tolist()
    assert free[2] == pytest.approx(20 * silu(20), rel=1e-6)
    assert free[2] != pytest.approx(clamped[2], rel=1e-3)
