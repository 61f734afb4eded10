"""v4-nano for tests: its spec, its weights in float32, prompts cut from its held-out text."""

from __future__ import annotations

import re
from functools import cache

import torch
from torch import Tensor

from v4graph.model.loader import load_params
from v4graph.model.recompute import RecomputeModel
from v4graph.spec.load import load_spec, spec_path
from v4graph.spec.model import ModelSpec, MtpSpeculation
from v4graph.text.tokenizer import Tokenizer


@cache
def spec() -> ModelSpec:
    """The shipped spec."""
    return load_spec("v4-nano")


@cache
def params() -> dict[str, Tensor]:
    """The shipped weights; nothing changes them."""
    return load_params(spec(), spec_path("v4-nano").with_suffix(""), torch.float32, None)


@cache
def oracle() -> RecomputeModel:
    """The uncached model."""
    return RecomputeModel(spec(), params())


def mtp() -> MtpSpeculation:
    """Its draft layer's entry."""
    mode = spec().speculative["mtp"]
    assert isinstance(mode, MtpSpeculation)
    return mode


@cache
def held_out() -> tuple[int, ...]:
    """Tokens of the held-out text, without the headers between documents."""
    folder = spec_path("v4-nano").with_suffix("")
    text = re.sub(
        r"^=== .+ ===\n", "", (folder / "heldout.txt").read_text("utf-8"), flags=re.MULTILINE
    )
    return tuple(Tokenizer.from_directory(folder, spec().bos_token_id).encode(text[:60_000]))


def prompts(*lengths: int) -> list[list[int]]:
    """Prompts of these lengths from different places of the text."""
    ids, step = held_out(), len(held_out()) // (len(lengths) + 1)
    return [list(ids[i * step : i * step + n]) for i, n in enumerate(lengths)]
