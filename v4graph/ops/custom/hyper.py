"""Operators of hyper-connections: `hyper_enter`, `hyper_leave` and both at once."""

from __future__ import annotations

from torch import Tensor

from v4graph.ops.custom.library import register
from v4graph.ops.hyper import hyper_post, hyper_pre
from v4graph.ops.norm import rms_norm


def _hyper_enter(
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
    u, post, comb = hyper_pre(x_TND, fn, base, scale, iters=iters, eps=eps, norm_eps=norm_eps)
    return rms_norm(u, norm_weight, norm_eps), post.contiguous(), comb.contiguous()


def _hyper_leave_enter(
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
    x = hyper_post(x_TND, y_TD, post, comb)
    out = _hyper_enter(x, fn, base, scale, norm_weight, iters=iters, eps=eps, norm_eps=norm_eps)
    return (x, *out)


def _fake_enter(x: Tensor, *args: Tensor, **kwargs: float) -> tuple[Tensor, Tensor, Tensor]:
    T, N, D = x.shape
    weights = args[0]  # fn, float32
    return x.new_empty((T, D)), weights.new_empty((T, N)), weights.new_empty((T, N, N))


def _fake_leave_enter(
    x: Tensor, y: Tensor, post: Tensor, comb: Tensor, *args: Tensor, **kwargs: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (x.new_empty(x.shape), *_fake_enter(x, *args, **kwargs))


_WEIGHTS = "Tensor fn, Tensor base, Tensor scale, Tensor norm_weight"
_NUMBERS = "*, int iters, float eps, float norm_eps"

hyper_enter = register(
    f"hyper_enter(Tensor x, {_WEIGHTS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor)",
    reference=_hyper_enter,
    fake=_fake_enter,
    kernel=("hyper", "hyper_enter"),
)
"""`hyper_pre` and the norm: `(h [T, D], post [T, N], comb [T, N, N])` of `x [T, N, D]`."""

hyper_leave = register(
    "hyper_leave(Tensor x, Tensor y, Tensor post, Tensor comb) -> Tensor",
    reference=hyper_post,
    fake=lambda x, y, post, comb: x.new_empty(x.shape),
    kernel=("hyper", "hyper_leave"),
)
"""`hyper_post`: the sublayer's output `y [T, D]` back on the streams, `[T, N, D]`."""

hyper_leave_enter = register(
    f"hyper_leave_enter(Tensor x, Tensor y, Tensor post, Tensor comb, {_WEIGHTS}, {_NUMBERS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_hyper_leave_enter,
    fake=_fake_leave_enter,
    kernel=("hyper", "hyper_leave_enter"),
)
"""`hyper_leave` of one sublayer and `hyper_enter` of the next one: `(x', h, post', comb')`."""
