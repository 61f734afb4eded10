"""Engines with and without the prefix cache, and what a hit leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.support.speculation import greedy
from tests.support.tiny import Tiny
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import SamplingParams
from v4graph.model.params import random_params

TINY = Tiny(
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
    max_len=160,
)
SHAPES: dict[str, Tiny] = {
    "aligned": TINY,
    "page 12": replace(TINY, page_tokens=12),
    "page 16": replace(TINY, page_tokens=16),
    "page 4": replace(TINY, page_tokens=4),
    "window 5": replace(TINY, window=5, page_tokens=4),
    "window 21": replace(TINY, window=21, page_tokens=12),
    "csa only": replace(TINY, kinds=("csa",), window=7, page_tokens=6),
    "hca 16": replace(TINY, kinds=("swa", "hca"), hca_ratio=16, page_tokens=32),
    "windows only": replace(TINY, kinds=("swa", "swa"), window=11, page_tokens=4),
}
"""Pages that units fill, halve, cut in the middle, and fill more than once."""


@cache
def params_of(tiny: Tiny, seed: int = 5) -> dict[str, Tensor]:
    """Random weights; nothing changes them."""
    return random_params(tiny.spec(), seed)


def tiny_engine(tiny: Tiny = TINY, k: int = 0, **more: Any) -> LLMEngine:
    """An eager engine in checked mode: rows of evicted pages are NaN."""
    config: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "compile": False,
        "checked": True,
        "device": "cpu",
        "speculative": "mtp" if k else "none",
        "num_draft_tokens": k or None,
        **more,
    }
    return LLMEngine.from_params(tiny.spec(), dict(params_of(tiny)), EngineConfig(**config))


def ids(count: int, seed: int = 0, vocab: int = 64) -> list[int]:
    """Random tokens, no end of text among them."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab, (count,), generator=gen).tolist()


@dataclass(frozen=True)
class Answer:
    """What one request got."""

    tokens: list[int]
    hit_tokens: int
    rounds: int
    """Verifications."""
    accepted: int
    """Drafts that they accepted."""


def ask(
    llm: LLMEngine, prompt: Sequence[int], new: int = 10, params: SamplingParams | None = None
) -> Answer:
    """Serve one prompt alone; checks every account after every step."""
    prefix = llm.pages.prefix
    before = prefix.num_hit_tokens if prefix else 0
    rounds, accepted = llm.draft_counts.rounds, llm.draft_counts.accepted
    name = f"ask{llm.metrics['num_steps']:.0f}"
    llm.add_request(name, list(prompt), params or greedy(new))
    tokens: list[int] = []
    while llm.has_unfinished():
        for out in llm.step():
            tokens += out.token_ids
        llm.check_integrity()
    return Answer(
        tokens,
        (prefix.num_hit_tokens if prefix else 0) - before,
        llm.draft_counts.rounds - rounds,
        llm.draft_counts.accepted - accepted,
    )


def shrink(llm: LLMEngine, spare: int) -> None:
    """Leave every pool the pages of one full sequence and `spare` more."""
    for pool in llm.pages.pools.values():
        keep = min(pool.num_free, pool.group.table_width + spare)
        del pool._free[: pool.num_free - keep]
        pool.group = replace(pool.group, num_pages=keep + 1)
