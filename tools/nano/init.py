"""Initial parameters and hash tables of a trainable spec."""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.model.params import logical_entries, stack_experts
from v4graph.spec.model import HashMoe, ModelSpec


def hash_table(counts: Tensor, experts: int, gen: torch.Generator) -> Tensor:
    """Two distinct experts for every token id, `[V, 2]`.

    Tokens are dealt by falling frequency, every run of `experts` tokens covering all experts, so
    both ids and text spread evenly.
    """
    order = counts.argsort(descending=True, stable=True)
    table = torch.empty(len(counts), 2, dtype=torch.int64)
    for start in range(0, len(counts), experts):
        tokens = order[start : start + experts]
        first = torch.randperm(experts, generator=gen)
        # A rotation of the same deal: never the same expert twice, and again one token each.
        turn = int(torch.randint(1, experts, (), generator=gen))
        table[tokens, 0] = first[: len(tokens)]
        table[tokens, 1] = (first[: len(tokens)] + turn) % experts
    return table


def initial_params(spec: ModelSpec, counts: Tensor, seed: int) -> dict[str, Tensor]:
    """Float32 parameters: matrices near 1/sqrt(fan-in), output matrices smaller, mixing near the
    identity with each sublayer reading mostly one stream."""
    gen = torch.Generator().manual_seed(seed)
    hashed = [f for f in spec.ffn.values() if isinstance(f, HashMoe)]
    streams = spec.residual.streams
    out: dict[str, Tensor] = {}
    site = 0
    for e in logical_entries(spec):
        shape, name = e.shape, e.name
        if e.dtype == "I64":
            x = hash_table(counts, hashed[0].experts, gen)
        elif name.endswith("norm.weight"):
            x = torch.ones(shape)
        elif name.endswith(("attn_sink", "ape", "gate.bias")):
            x = torch.zeros(shape)
        elif name.endswith(("hc_attn_base", "hc_ffn_base")):
            x = _mixing_base(streams, site)
            site += 1
        elif name.endswith("hc_head_base"):
            x = torch.full(shape, -1.1)
        elif name.endswith("_scale"):
            x = torch.full(shape, 0.1)
        elif name in ("embed.weight", "head.weight"):
            x = torch.randn(shape, generator=gen) * (0.3 if name[0] == "e" else 0.02)
        else:
            x = torch.randn(shape, generator=gen) * shape[-1] ** -0.5
            if name.endswith(("wo_b.weight", "w2.weight")):
                x *= 0.3
        out[name] = x
    return stack_experts(out)


def _mixing_base(n: int, site: int) -> Tensor:
    pre = torch.full((n,), -1.7)
    pre[site % n] = 0.8
    post = torch.full((n,), 0.0)
    post[(site + 1) % n] = 0.6
    return torch.cat((pre, post, 3.0 * torch.eye(n).flatten()))
