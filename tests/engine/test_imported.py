"""Checkpoints that transformers wrote, of any layer order: imported, run, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.arbitrary import CSA, HCA, SWA, Imported, config_values
from v4graph.plan.lower import lower
from v4graph.plan.types import Limits
from v4graph.plan.weight_totals import weight_totals
from v4graph.plan.weights import inventory
from v4graph.program.build import build_state
from v4graph.spec.hf_config import import_config
from v4graph.spec.hf_export import official_config
from v4graph.spec.hf_yaml import to_yaml
from v4graph.spec.load import load_spec_text
from v4graph.spec.safetensors_header import read_checkpoint

ODD: dict[str, dict[str, Any]] = {
    "one head": {"num_attention_heads": 1, "o_groups": 1},
    "one group": {"num_attention_heads": 4, "o_groups": 1},
    "every row": {"index_topk": 512, "index_n_heads": 1},
    "ratio 2": {"compress_rates": {CSA: 2, HCA: 2}},
    "csa then hca": {"layer_types": [CSA, HCA, CSA]},
    "hca then csa": {"layer_types": [HCA, CSA, HCA]},
    "csa only": {"layer_types": [CSA] * 3},
    "hca only": {"layer_types": [HCA] * 3},
    "sliding last": {"layer_types": [HCA, CSA, SWA]},
    "late hash": {"mlp_layer_types": ["moe", "hash_moe", "moe"]},
    "hash only": {"mlp_layer_types": ["hash_moe"] * 3},
}
BASE = {
    "num_hidden_layers": 3,
    "layer_types": [CSA, HCA, SWA],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
}


DEFAULTED = {
    *("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "rope_theta"),
    *("compress_rope_theta", "partial_rotary_factor", "hc_mult", "hc_eps", "hc_sinkhorn_iters"),
    *("rms_norm_eps", "swiglu_limit", "scoring_func", "routed_scaling_factor", "index_topk"),
    *("sliding_window", "n_shared_experts", "bos_token_id", "eos_token_id", "norm_topk_prob"),
    "tie_word_embeddings",
}


def check(values: dict[str, Any], directory: Path, seed: int) -> None:
    imported = Imported.of(values, directory, seed)
    imported.check_greedy(seed)
    spec = imported.spec
    assert [spec.attention[a].kind for a, _ in spec.layer_kinds] == values["layer_types"]
    exported = official_config(spec)
    assert exported.missing == ()
    again = load_spec_text(to_yaml(import_config(exported.values, "again"), "a test"))
    assert inventory(again) == inventory(spec)
    for key in ("rope", "tie_word_embeddings", "cache_groups", "attention", "ffn", "layers"):
        assert getattr(again, key) == getattr(spec, key), key


@pytest.mark.parametrize("seed", range(20))
def test_random_checkpoints(seed: int, tmp_path: Path) -> None:
    check(config_values(seed), tmp_path, seed)


@pytest.mark.parametrize("case", sorted(ODD))
def test_odd_sizes(case: str, tmp_path: Path) -> None:
    check(config_values(1, **{**BASE, **ODD[case]}), tmp_path, 1)


@pytest.mark.parametrize("count", [1, 5])
def test_keys_that_config_lacks(count: int, tmp_path: Path) -> None:
    """transformers fills them in when it loads the checkpoint, and so does the import."""
    values = config_values(2, num_hidden_layers=count, head_dim=32)
    values = {k: v for k, v in values.items() if k not in DEFAULTED}
    imported = Imported.of(values, tmp_path, left_out=DEFAULTED)
    imported.check_greedy()
    names = [a for a, _ in imported.spec.layer_kinds]
    assert names == ["hca", "hca", "hca", "csa", "hca"][:count]


@pytest.mark.parametrize("seed", range(3))
def test_tied_embeddings(seed: int, tmp_path: Path) -> None:
    check(config_values(seed, tie_word_embeddings=True), tmp_path, seed)
    assert "head.weight" not in read_checkpoint(tmp_path).tensors


def test_tied_embeddings_are_on_the_device_once(tmp_path: Path) -> None:
    imported = Imported.of(config_values(1, tie_word_embeddings=True), tmp_path)
    assert "head.weight" not in imported.params
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=128)
    plan = lower(imported.spec, limits)
    state = build_state(imported.spec, plan, imported.params, torch.device("cpu"), checked=True)
    assert state.top["head.weight"].data_ptr() == state.top["embed.weight"].data_ptr()
    stored = sum(t.numel() for t in imported.params.values() if t.is_floating_point())
    assert weight_totals(imported.spec).total.num_params == stored
