"""Tiny random models with several MTP layers; of six tokens, so that chance accepts many drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.support.world import SMALL
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.model.params import random_params
from v4graph.model.recompute import RecomputeModel
from v4graph.model.rounds import RoundOracle
from v4graph.spec.model import ModelSpec, MtpSpeculation

VOCAB = 6


@cache
def spec(num_layers: int, page_tokens: int = 4) -> ModelSpec:
    """The first row is masked and rotation is offset, so that both hold in every layer."""
    data = replace(SMALL, vocab=VOCAB, max_len=96, page_tokens=page_tokens).data()
    data["speculative"]["mtp"] |= {
        "num_layers": num_layers,
        "mask_position_zero": True,
        "position_offset": 1,
    }
    return ModelSpec.model_validate(data)


@cache
def params(num_layers: int) -> dict[str, Tensor]:
    """The same main model whatever the number of draft layers."""
    return random_params(spec(num_layers), 3)


def engine(num_layers: int, k: int, page_tokens: int = 4, **more: Any) -> LLMEngine:
    """Checked and eager."""
    config: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 11,
        "compile": False,
        "checked": True,
        "device": "cpu",
        "greedy_only": True,
        "speculative": "mtp" if k else "none",
        "num_draft_tokens": k or None,
        **more,
    }
    own = spec(num_layers, page_tokens)
    return LLMEngine.from_params(own, dict(params(num_layers)), EngineConfig(**config))


@cache
def oracle(num_layers: int) -> RoundOracle:
    mode = spec(num_layers).speculative["mtp"]
    assert isinstance(mode, MtpSpeculation)
    return RoundOracle(RecomputeModel(spec(num_layers), params(num_layers)), mode)


def prompts(*lengths: int) -> dict[str, list[int]]:
    """One random prompt of each length, by name."""
    gen = torch.Generator().manual_seed(1)
    return {str(n): torch.randint(2, VOCAB, (n,), generator=gen).tolist() for n in lengths}
