"""config.json to spec: layer orders, what absent keys mean, tied embeddings."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from tests.spec.test_hf_config import FLASH, TRANSFORMERS_FLASH, faults, loaded, stored
from v4graph.plan.weights import inventory
from v4graph.spec.hf_config import ROTARY_FACTOR, import_config
from v4graph.spec.hf_fields import DEFAULTS
from v4graph.spec.hf_layers import HASH_LAYERS
from v4graph.spec.hf_yaml import to_yaml
from v4graph.spec.load import load_spec, load_spec_text


def test_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeepseekV4Config()
    assert {key: getattr(config, key) for key in DEFAULTS} == DEFAULTS
    assert config.partial_rotary_factor == ROTARY_FACTOR
    assert config.mlp_layer_types.count("hash_moe") == HASH_LAYERS


def test_absent_keys_have_defaults_and_are_told(tmp_path: Path) -> None:
    config = {k: v for k, v in FLASH.items() if k not in ("q_lora_rank", "hc_eps")}
    imported = import_config(config, "deepseek-v4-flash")
    assert loaded(imported, tmp_path) == load_spec("deepseek-v4-flash")
    assert any("defaults: q_lora_rank 1024, hc_eps 1e-06" in note for note in imported.notes)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 43])
def test_default_layers_are_those_of_transformers(count: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.DeepseekV4Config(num_hidden_layers=count)
    left_out = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim")
    config = {k: v for k, v in FLASH.items() if k not in left_out}
    imported = import_config({**config, "num_hidden_layers": count}, "x")
    spec = loaded(imported, tmp_path)
    assert [spec.attention[a].kind for a, _ in spec.layer_kinds] == oracle.layer_types
    assert [spec.ffn[f].kind for _, f in spec.layer_kinds] == oracle.mlp_layer_types
    assert spec.rope["compress"].dim == oracle.qk_rope_head_dim
    assert sum("transformers' default" in note for note in imported.notes) == 3


def test_nested_ropes_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    """Both take `rope_theta`; what makes YaRN a different one than V4's is refused."""
    ropes = {
        "main": {"rope_type": "default"},
        "compress": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.0},
    }
    config = {**TRANSFORMERS_FLASH, "rope_theta": 7000, "rope_parameters": ropes}
    config["num_nextn_predict_layers"] = 0
    rope = loaded(import_config(config, "x"), tmp_path).rope
    assert (rope["main"].theta, rope["compress"].theta) == (7000, 7000)
    assert rope["compress"].yarn is not None
    assert rope["compress"].yarn.original_max_position == 1048576
    del ropes["compress"]["attention_factor"]
    assert "attention_factor: absent; expected 1.0" in faults(config)
    ropes["compress"]["attention_factor"] = 1.0
    del config["partial_rotary_factor"]
    assert "partial_rotary_factor: absent; expected 64 rotated channels of 512" in faults(config)


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    imported = import_config({**FLASH, "tie_word_embeddings": True}, "x")
    spec = loaded(imported, tmp_path)
    assert spec.tie_word_embeddings
    untied = {e.name for e in inventory(load_spec("deepseek-v4-flash"))}
    assert {e.name for e in inventory(spec)} == untied - {"head.weight"}


def test_a_stored_head_overrules_tied_embeddings() -> None:
    tensors = stored(embed__weight="BF16", head__weight="BF16")
    imported = import_config({**FLASH, "tie_word_embeddings": True}, "x", tensors)
    assert "tie_word_embeddings" not in imported.data
    assert any("head.weight, which is used" in note for note in imported.notes)


@pytest.mark.parametrize("count", range(1, 7))
def test_every_subset_and_order_of_layer_kinds(count: int) -> None:
    """What an entry inherits, its kind knows: each text loads, whatever its first layer is."""
    names = TRANSFORMERS_FLASH["compress_rates"].keys() | {"sliding_attention"}
    # Which kinds there are and which is first decide the entries; the rest is the layers' list.
    orders = {
        (first, *rest, *[first] * (count - 1 - len(rest)))
        for first in names
        for size in range(min(count, 3))
        for rest in permutations(sorted(names - {first}), size)
    }
    for kinds in sorted(orders):
        config = {
            **TRANSFORMERS_FLASH,
            "num_hidden_layers": count,
            "layer_types": list(kinds),
            "mlp_layer_types": ["moe"] * count,
        }
        spec = load_spec_text(to_yaml(import_config(config, "x"), "a test"))
        assert tuple(spec.attention[a].kind for a, _ in spec.layer_kinds) == kinds
