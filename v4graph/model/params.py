"""Run-time parameters: checkpoint tensors by official name, routed experts stacked.

A model's parameters are one flat mapping. Names are the checkpoint's (`layers.3.attn.wq_a.weight`)
except that a layer's routed experts are two tensors, `ffn.experts.w13 [E, 2I, D]` (gate over up)
and `ffn.experts.w2 [E, D, I]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from v4graph.plan.weights import TensorEntry, inventory
from v4graph.spec.model import HashMoe, ModelSpec

_EXPERT = re.compile(r"^(?P<ffn>.+\.experts)\.(?P<index>\d+)\.(?P<part>w[123])\.weight$")


@dataclass(frozen=True)
class ExpertPlace:
    """Where an expert's matrix lies: part `half` of `halves` of the rows of `key[expert]`."""

    key: str
    expert: int
    half: int
    halves: int


def expert_place(name: str) -> ExpertPlace | None:
    """The place of a routed expert's matrix in the stacked pair; None for any other tensor."""
    m = _EXPERT.match(name)
    if m is None:
        return None
    key, half, halves = {"w1": ("w13", 0, 2), "w3": ("w13", 1, 2), "w2": ("w2", 0, 1)}[m["part"]]
    return ExpertPlace(f"{m['ffn']}.{key}", int(m["index"]), half, halves)


def logical_entries(spec: ModelSpec) -> list[TensorEntry]:
    """The checkpoint's tensors without scales, with unpacked shapes: what decoding yields."""
    out = []
    for e in inventory(spec):
        if e.name.endswith(".scale"):
            continue
        shape = (e.shape[0], e.shape[1] * 2) if e.dtype == "I8" else e.shape
        out.append(TensorEntry(e.name, e.dtype, shape))
    return out


def stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Turn per-expert matrices into the stacked run-time pair; other tensors pass through."""
    out: dict[str, Tensor] = {}
    parts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        m = _EXPERT.match(name)
        if m is None:
            out[name] = tensor
        else:
            by_part = parts.setdefault(m["ffn"], {"w1": {}, "w2": {}, "w3": {}})
            by_part[m["part"]][int(m["index"])] = tensor
    for prefix, by_part in parts.items():
        experts = range(len(by_part["w1"]))
        out[f"{prefix}.w13"] = torch.stack(
            [torch.cat((by_part["w1"][e], by_part["w3"][e])) for e in experts]
        )
        out[f"{prefix}.w2"] = torch.stack([by_part["w2"][e] for e in experts])
    return out


def unstack_experts(params: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The inverse of `stack_experts`: (official name, tensor) pairs."""
    for name, tensor in params.items():
        if name.endswith(".experts.w13"):
            prefix, half = name.removesuffix(".w13"), tensor.shape[1] // 2
            for e in range(tensor.shape[0]):
                yield f"{prefix}.{e}.w1.weight", tensor[e, :half]
                yield f"{prefix}.{e}.w3.weight", tensor[e, half:]
        elif name.endswith(".experts.w2"):
            for e in range(tensor.shape[0]):
                yield f"{name.removesuffix('.w2')}.{e}.w2.weight", tensor[e]
        else:
            yield name, tensor


def random_params(
    spec: ModelSpec,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    entries: Iterable[TensorEntry] | None = None,
) -> dict[str, Tensor]:
    """Random parameters with active gradients everywhere: norms near 1, matrices ~ 1/sqrt(fan-in),
    hash tables uniform over the experts."""
    gen = torch.Generator().manual_seed(seed)
    experts = {f.experts for f in spec.ffn.values() if isinstance(f, HashMoe)}
    tensors: dict[str, Tensor] = {}
    for e in logical_entries(spec) if entries is None else entries:
        if e.dtype == "I64":
            table = torch.rand(e.shape[0], max(experts), generator=gen).argsort(-1)
            tensors[e.name] = table[:, : e.shape[1]].contiguous()
            continue
        x = torch.randn(e.shape, generator=gen)
        if e.name.endswith("norm.weight"):
            x = 1 + 0.1 * x
        elif e.name.endswith("_scale"):
            x = 1 + 0.2 * x
        elif len(e.shape) == 2 and not e.name.endswith((".ape", "embed.weight")):
            x = x * e.shape[1] ** -0.5
        keep = e.dtype == "F32"
        tensors[e.name] = x if keep else x.to(dtype)
    return stack_experts(tensors)
