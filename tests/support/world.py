"""A very small model with its oracle, for tests that run many steps."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tests.support.runner import Runner
from tests.support.tiny import Tiny
from v4graph.engine.request import Request
from v4graph.model.params import random_params
from v4graph.model.recompute import RecomputeModel
from v4graph.plan.types import GroupPlan, Limits
from v4graph.program.stage import ModelState
from v4graph.spec.model import ModelSpec

BOUND = 1e-4
SMALL = Tiny(
    kinds=("csa", "hca"),
    window=8,
    topk=4,
    head_dim=16,
    rope_dim=8,
    index_heads=16,
    index_dim=16,
    hash_layers=1,
    hidden=32,
    experts=4,
    vocab=64,
    page_tokens=8,
    max_len=2048,
)


class World:
    """A spec, its parameters and the uncached oracle."""

    def __init__(self, tiny: Tiny = SMALL, seed: int = 0) -> None:
        self.tiny, self.spec = tiny, tiny.spec()
        self.params = random_params(self.spec, seed)
        self.model = RecomputeModel(self.spec, self.params)

    def oracle(self, ids: list[int]) -> Tensor:
        """Logits `[len(ids), V]` of an uncached forward."""
        with torch.no_grad():
            return self.model.forward(torch.tensor([ids])).logits[0]

    def ids(self, count: int, seed: int = 0) -> list[int]:
        """Random tokens, no end of text among them."""
        gen = torch.Generator().manual_seed(seed)
        return torch.randint(2, self.spec.vocab_size, (count,), generator=gen).tolist()

    def runner(self, seqs: int = 4, tokens: int = 64, max_len: int = 256) -> Runner:
        """Eager programs in checked mode."""
        limits = Limits(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=max_len)
        return Runner(self.spec, self.params, limits)


@cache
def small() -> World:
    """The shared world; nothing in it is changed by a test."""
    return World()


def pools_of(spec: ModelSpec, state: ModelState) -> dict[tuple[int, str], tuple[GroupPlan, Tensor]]:
    """Every page pool by (layer, cache role), with its group."""
    return {
        (layer.index, role): (state.plan.group(name), pool)
        for block, layer, role, name, pool in state.all_pools()
        if block == "layers"
    }


def owned_rows(group: GroupPlan, requests: list[Request]) -> set[int]:
    """Rows of the group's pools that belong to the requests, by the page manager's own map."""
    pages = [p for r in requests for p in r.pages.get(group.name, {}).values()]
    return {p * group.page_rows + i for p in pages for i in range(group.page_rows)}


def changed_rows(before: Tensor, after: Tensor) -> set[int]:
    """Rows whose bits differ."""
    bits = {4: torch.int32, 2: torch.int16}[before.element_size()]
    differs = (before.view(bits) != after.view(bits)).any(-1)
    return set(differs.nonzero().flatten().tolist())
