"""Rotary factors against a numpy formula, and the rotation itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from v4graph.model.rope import inverse_frequencies
from v4graph.ops.rope import cos_sin, rotate
from v4graph.spec.model import Rope, Yarn

POSITIONS = (0, 127, 128, 1000, 65535, 65536, 200000)
MAIN = Rope(theta=10000, dim=64)
COMPRESS = Rope(
    theta=160000, dim=64, yarn=Yarn(factor=16, original_max_position=65536, beta_fast=32)
)


def numpy_frequencies(rope: Rope) -> np.ndarray:
    """YaRN paper, section 3.2, in float64: one line a step."""
    i = np.arange(rope.dim // 2)
    freqs = rope.theta ** (-2.0 * i / rope.dim)
    if rope.yarn is None:
        return freqs
    y = rope.yarn

    def dim_of(turns: float) -> float:
        wavelength = y.original_max_position / turns
        return rope.dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = math.floor(dim_of(y.beta_fast)), math.ceil(dim_of(y.beta_slow))
    low, high = max(low, 0), min(high, rope.dim - 1)
    interpolated = np.clip((i - low) / (high - low), 0, 1)
    return freqs * (1 - interpolated) + freqs / y.factor * interpolated


@pytest.mark.parametrize("rope", [MAIN, COMPRESS, Rope(theta=160000, dim=64)])
def test_frequencies(rope: Rope) -> None:
    ours = inverse_frequencies(rope)
    assert ours.dtype is torch.float32
    np.testing.assert_allclose(ours.numpy(), numpy_frequencies(rope), rtol=3e-7)


def test_yarn_changes_slow_pairs_only() -> None:
    plain = numpy_frequencies(Rope(theta=160000, dim=64))
    ratio = plain / inverse_frequencies(COMPRESS).double().numpy()
    np.testing.assert_allclose(ratio[:8], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[-7:], 16, rtol=1e-6)
    assert np.all(np.diff(ratio) > -1e-5)


@pytest.mark.parametrize(("theta", "dim"), [(10000, 64), (10000, 16), (160000, 64), (500000, 8)])
def test_frequencies_without_yarn_are_bit_exact(theta: float, dim: int) -> None:
    """A2: interpolation left on shows in no evaluation, only here."""
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    expected = 1.0 / theta**exponents
    assert torch.equal(inverse_frequencies(Rope(theta=theta, dim=dim)), expected)


@pytest.mark.parametrize("rope", [MAIN, COMPRESS])
def test_cos_sin_at_far_positions(rope: Rope) -> None:
    freqs = inverse_frequencies(rope)
    cos, sin = cos_sin(torch.tensor(POSITIONS), freqs)
    assert cos.dtype is sin.dtype is torch.float32
    # The angle is rounded once, to float32: that is part of the model.
    angles = np.float32(np.array(POSITIONS)[:, None]) * freqs.numpy()
    np.testing.assert_allclose(cos.numpy(), np.cos(angles.astype(np.float64)), atol=2e-7)
    np.testing.assert_allclose(sin.numpy(), np.sin(angles.astype(np.float64)), atol=2e-7)
    exact = np.array(POSITIONS, dtype=np.float64)[:, None] * numpy_frequencies(rope)
    bound = 4e-7 * exact + 2e-7
    assert np.all(np.abs(cos.numpy() - np.cos(exact)) <= bound)
    assert np.all(np.abs(sin.numpy() - np.sin(exact)) <= bound)


def test_rotation_turns_adjacent_pairs_of_the_last_channels() -> None:
    x = torch.arange(1.0, 9.0)[None]
    angle = torch.tensor([[0.3, 1.1]])
    y = rotate(x, angle.cos(), angle.sin())[0]
    assert torch.equal(y[:4], x[0, :4])
    for pair, turn in ((4, 0.3), (6, 1.1)):
        z = complex(x[0, pair], x[0, pair + 1]) * complex(math.cos(turn), math.sin(turn))
        assert y[pair].item() == pytest.approx(z.real, rel=1e-6)
        assert y[pair + 1].item() == pytest.approx(z.imag, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inverse_rotation_restores(dtype: torch.dtype) -> None:
    """A4: a pure rotation is undone by the inverse."""
    x = torch.randn(len(POSITIONS), 3, 96).to(dtype)
    cos, sin = cos_sin(torch.tensor(POSITIONS), inverse_frequencies(COMPRESS))
    turned = rotate(x, cos[:, None], sin[:, None])
    assert turned.dtype is dtype
    assert not torch.allclose(turned[1:], x[1:], atol=1e-2)
    assert torch.equal(turned[0], x[0])
    back = rotate(turned, cos[:, None], -sin[:, None])
    torch.testing.assert_close(back, x, atol=1e-5 if dtype is torch.float32 else 5e-2, rtol=1e-2)


def test_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 64)
    freqs = inverse_frequencies(MAIN)

    def score(at: int, seen: int) -> float:
        a = rotate(q, *cos_sin(torch.tensor([at]), freqs))
        b = rotate(k, *cos_sin(torch.tensor([seen]), freqs))
        return float(a @ b.T)

    assert score(5, 2) == pytest.approx(score(1005, 1002), abs=1e-3)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-2)
