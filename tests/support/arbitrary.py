"""Arbitrary tiny checkpoints, written by transformers: any layer order, odd sizes."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from tests.support.hf import load
from tests.support.runner import Runner, relative_error, top2_gap
from v4graph.cli.import_checkpoint import import_checkpoint
from v4graph.model.loader import load_params
from v4graph.model.recompute import RecomputeModel
from v4graph.plan.types import Limits, Mode
from v4graph.spec.load import load_spec_text
from v4graph.spec.model import ModelSpec

SWA = "sliding_attention"
CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
BOUND = 1e-4
NUM_DECODED = 24


def config_values(seed: int, **fixed: Any) -> dict[str, Any]:
    """Arguments of a `DeepseekV4Config`, drawn from `seed`; `fixed` replaces what was drawn."""
    r = Random(seed)
    pool = r.choice([(SWA, CSA, HCA), (SWA, CSA, HCA), (CSA, HCA), (CSA,), (HCA,), (SWA, HCA)])
    kinds = r.choices(pool, k=r.randint(1, 6))
    heads = r.choice((1, 2, 3, 4))
    head_dim = r.choice((16, 24, 32))
    topk = r.choice((1, 3, 8, 512))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    return {
        "vocab_size": r.choice((33, 64)),
        "hidden_size": r.choice((24, 32)),
        "moe_intermediate_size": 16,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "mlp_layer_types": r.choices(("hash_moe", "moe"), k=len(kinds)),
        "compress_rates": {CSA: r.choice((2, 3, 4, 8)), HCA: r.choice((2, 4, 7, 16))},
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "partial_rotary_factor": r.choice((0.25, 0.5, 1.0)),
        "q_lora_rank": r.choice((5, 16)),
        "o_groups": r.choice([g for g in (1, heads) if heads % g == 0]),
        "o_lora_rank": r.choice((3, 8)),
        # Rows that no head likes score 0 alike, and whom a tie chooses is not defined: many heads
        # where there is a choice to make.
        "index_n_heads": 24 if topk < 512 else r.choice((1, 2)),
        "index_head_dim": r.choice((32, 48)),
        "index_topk": topk,
        "sliding_window": r.choice((1, 3, 16)),
        "n_routed_experts": r.choice((1, 4)),
        "num_experts_per_tok": 1,
        "hc_mult": r.choice((1, 2, 4)),
        "max_position_embeddings": 256,
        "rope_parameters": r.choice((yarn, {"rope_type": "default"})),
    } | fixed


def write(values: dict[str, Any], directory: Path, seed: int) -> DeepseekV4ForCausalLM:
    """Save a model of random weights, float32; returns it as transformers would load it."""
    torch.manual_seed(seed)
    config = DeepseekV4Config(**values)
    config._attn_implementation = "eager"
    model = DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():  # a table from tokens to experts
                tensor.random_(config.n_routed_experts)
            elif name.endswith(("norm.weight", "scale")):
                tensor.normal_(1, 0.1)
            elif "embed" in name:
                tensor.normal_()
            else:
                tensor.normal_(0, tensor.shape[-1] ** -0.5)
    model.save_pretrained(directory, save_original_format=True)
    return model


@dataclass
class Imported:
    """A checkpoint beside its import."""

    oracle: DeepseekV4ForCausalLM
    spec: ModelSpec
    params: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        values: dict[str, Any],
        directory: Path,
        seed: int = 0,
        left_out: Collection[str] = (),
    ) -> Imported:
        """Write a random checkpoint, import and load it.

        `left_out` are keys that config.json does not have: transformers then reads it again.
        """
        oracle = write(values, directory, seed)
        if left_out:
            path = directory / "config.json"
            config = json.loads(path.read_text())
            path.write_text(json.dumps({k: v for k, v in config.items() if k not in left_out}))
            oracle = load(directory)
        spec = load_spec_text(import_checkpoint(directory, "tiny")[0])
        return cls(oracle, spec, load_params(spec, directory, torch.float32))

    def check_greedy(self, seed: int = 0) -> None:
        """The engine's greedy tokens, and logits of engine and recompute, are the oracle's."""
        r = Random(seed)
        length = r.randint(1, 40)
        prompt = [r.randrange(2, self.spec.vocab_size) for _ in range(length)]
        limits = Limits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=128)
        runner = Runner(self.spec, self.params, limits)
        request = runner.add(prompt)
        rows = [runner.step([(request, length)])[0].clone()]
        while len(rows) < NUM_DECODED:
            rows.append(runner.step([(request, 1)], Mode.DECODE)[0].clone())
        ids = torch.tensor([request.token_ids[:-1]])
        with torch.no_grad():
            oracle = self.oracle(ids).logits[0]
            recomputed = RecomputeModel(self.spec, self.params).forward(ids).logits[0]
        assert relative_error(recomputed, oracle) <= BOUND
        assert len(oracle) == length - 1 + NUM_DECODED
        chosen = request.token_ids[length:]
        for i, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            expected = oracle[length - 1 + i]
            assert relative_error(row, expected) <= BOUND, f"token {i}"
            same = token == int(expected.argmax())
            assert same or top2_gap(expected) < BOUND, f"token {i} differs"
