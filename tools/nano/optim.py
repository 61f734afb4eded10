"""Muon for hidden matrices, AdamW for the rest, and the bias rule that balances experts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

# Matrices whose output feeds a softmax or a gate, or that are tables, learn with AdamW.
_ADAM = ("embed", "head", "gate.", "wgate", "weights_proj", "hc_", "ape", "sink", "norm")


def is_muon(name: str, p: Tensor) -> bool:
    """Whether a parameter is a hidden matrix (or a stack of them)."""
    return p.dim() >= 2 and not any(part in name for part in _ADAM)


def trained(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters with gradients: all but hash tables and the balancing biases."""
    fixed = ("gate.tid2eid", "gate.bias")
    return {k: v for k, v in params.items() if not k.endswith(fixed)}


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrices of `g [.., m, n]`."""
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        b = -4.7750 * a + 2.0315 * (a @ a)
        x = 3.4445 * x + b @ x
    return (x.mT if tall else x).to(g.dtype)


class Muon:
    """Momentum, orthogonalised; matrices of one shape are updated together.

    The update is scaled to AdamW's usual size (0.2 RMS), so one learning rate fits both.
    """

    def __init__(self, params: Mapping[str, Tensor], groups: int, decay: float) -> None:
        self.decay = decay
        self.momenta = {k: torch.zeros_like(v) for k, v in params.items()}
        self.by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for name, p in params.items():
            for part, m in zip(
                _matrices(name, p, groups), _matrices(name, self.momenta[name], groups), strict=True
            ):
                self.by_shape[tuple(part.shape[-2:])].append((part, m))
        self.params, self.groups = params, groups

    @torch.no_grad()
    def step(self, lr: float, momentum: float = 0.95) -> None:
        """One update from `.grad`."""
        names, ms = list(self.params), self.momenta
        grads = [self.params[n].grad for n in names]
        torch._foreach_lerp_([ms[n] for n in names], grads, 1 - momentum)
        nesterov = torch._foreach_lerp(grads, [ms[n] for n in names], momentum)
        parts: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for name, g in zip(names, nesterov, strict=True):
            for part in _matrices(name, g, self.groups):
                parts[tuple(part.shape[-2:])].append(part)
        for shape, updates in parts.items():
            sizes = [u.shape[0] for u in updates]
            update = orthogonalise(torch.cat(updates)) * (0.2 * max(shape) ** 0.5)
            targets = [p for p, _ in self.by_shape[shape]]
            torch._foreach_mul_(targets, 1 - lr * self.decay)
            torch._foreach_add_(targets, list(update.split(sizes)), alpha=-lr)


def _matrices(name: str, p: Tensor, groups: int) -> Iterable[Tensor]:
    """Views `[n, rows, columns]` of the matrices that a parameter holds."""
    p = p.detach()
    if name.endswith("experts.w13"):
        gate, up = p.chunk(2, dim=1)
        return (gate, up)
    if name.endswith("wo_a.weight"):
        return (p.unflatten(0, (groups, -1)),)
    return (p if p.dim() == 3 else p[None],)


class Optimiser:
    """Both optimisers behind one learning rate."""

    def __init__(self, params: Mapping[str, Tensor], groups: int) -> None:
        names = trained(params)
        self.names = names
        self.muon = Muon({k: v for k, v in names.items() if is_muon(k, v)}, groups, decay=0.1)
        rest = {k: v for k, v in names.items() if not is_muon(k, v)}
        table_names = ("embed.weight", "head.weight")
        tables = [rest.pop(k) for k in table_names]
        mixing = [v for k, v in rest.items() if "hc_" in k]
        other = [v for k, v in rest.items() if "hc_" not in k]
        fused = tables[0].is_cuda
        self.scales = (1.0, 0.3, 0.7)
        self.adam = torch.optim.AdamW(
            [
                {"params": tables, "weight_decay": 0.02},
                {"params": mixing, "weight_decay": 0.0},
                {"params": other, "weight_decay": 0.0},
            ],
            lr=1e-3,
            betas=(0.9, 0.97),
            eps=1e-10,
            fused=fused,
        )

    def step(self, lr: float, clip: float) -> Tensor:
        """Clip, update, clear; returns the gradient norm before clipping."""
        parameters = list(self.names.values())
        norm = torch.nn.utils.clip_grad_norm_(parameters, clip, foreach=True)
        self.muon.step(lr)
        for group, scale in zip(self.adam.param_groups, self.scales, strict=True):
            group["lr"] = lr * scale
        self.adam.step()
        for p in parameters:
            p.grad = None
        return norm

    def state_dict(self) -> dict[str, object]:
        return {"momenta": self.muon.momenta, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        for name, value in state["momenta"].items():
            self.muon.momenta[name].copy_(value)
        self.adam.load_state_dict(state["adam"])


def balance(bias: Tensor, load: Tensor, rate: float) -> None:
    """Raise the bias of underloaded experts, lower that of overloaded ones (DeepSeek-V3 2.1.2)."""
    load = load.float()
    bias.add_((load.mean() - load).sign(), alpha=rate).sub_(bias.mean())
