"""Checkpoints that transformers wrote, of any layer order: imported, run, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.arbitrary import CSA, HCA, SWA, Imported, config_values
from v4graph.plan.weights import inventory
from v4graph.spec.hf_config import import_config
from v4graph.spec.hf_export import official_config
from v4graph.spec.hf_yaml import to_yaml
from v4graph.spec.load import load_spec_text

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


def check(values: dict[str, Any], directory: Path, seed: int) -> None:
    imported = Imported.of(values, directory, seed)
    imported.check_greedy(seed)
    spec = imported.spec
    assert [spec.attention[a].kind for a, _ in spec.layer_kinds] == values["layer_types"]
    exported = official_config(spec)
    assert exported.missing == ()
    again = load_spec_text(to_yaml(import_config(exported.values, "again"), "a test"))
    assert inventory(again) == inventory(spec)
    for key in ("rope", "cache_groups", "attention", "ffn", "layers"):
        assert getattr(again, key) == getattr(spec, key), key


@pytest.mark.parametrize("seed", range(20))
def test_random_checkpoints(seed: int, tmp_path: Path) -> None:
    check(config_values(seed), tmp_path, seed)


@pytest.mark.parametrize("case", sorted(ODD))
def test_odd_sizes(case: str, tmp_path: Path) -> None:
    check(config_values(1, **{**BASE, **ODD[case]}), tmp_path, 1)
