"""A spec's config.json: equal to the published files, read back to the same model, or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.spec.test_hf_config import FLASH, PRO
from tests.support.tiny import SHAPES, Tiny
from v4graph.errors import SpecError
from v4graph.plan.weights import inventory
from v4graph.spec.hf_config import import_config
from v4graph.spec.hf_export import official_config
from v4graph.spec.hf_yaml import to_yaml
from v4graph.spec.load import load_spec, load_spec_text
from v4graph.spec.model import DsparkSpeculation, ModelSpec
from v4graph.spec.shorten import first_layers


def again(spec: ModelSpec) -> ModelSpec:
    """The spec that `v4graph import` makes of the config alone."""
    config = official_config(spec)
    assert config.missing == ()
    return load_spec_text(to_yaml(import_config(config.values, spec.name), "a test"))


@pytest.mark.parametrize(("name", "published"), [("flash", FLASH), ("pro", PRO)])
def test_the_published_files(name: str, published: dict[str, Any]) -> None:
    config = official_config(load_spec(f"deepseek-v4-{name}"))
    assert config.missing == ()
    rest = {key: published[key] for key in published.keys() - config.values.keys()}
    assert rest == {"transformers_version": "4.57.1"}
    assert config.values == {key: published[key] for key in config.values}


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek-v4-flash", "deepseek-v4-pro", "flash-slice8"),
        *("deepseek-v4-flash-dspark", "deepseek-v4-pro-dspark"),
    ],
)
def test_shipped_specs_come_back_whole(name: str) -> None:
    spec = load_spec(name)
    got = again(spec)
    assert got.layer_kinds == spec.layer_kinds
    assert list(got.speculative) == list(spec.speculative)
    for key in ("residual", "rope", "attention", "ffn", "weights", "norm_eps", "eos_token_id"):
        assert getattr(got, key) == getattr(spec, key), key


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_small_models_come_back(shape: str) -> None:
    spec = SHAPES[shape].spec()
    got = again(spec)
    assert [e.name for e in inventory(got)] == [e.name for e in inventory(spec)]
    assert [e.shape for e in inventory(got)] == [e.shape for e in inventory(spec)]
    assert official_config(got) == official_config(spec)
    kinds = [spec.attention[a].kind for a, _ in spec.layer_kinds]
    assert [got.attention[a].kind for a, _ in got.layer_kinds] == kinds


def changed(*path: str, to: Any, tiny: Tiny | None = None) -> ModelSpec:
    data = (tiny or Tiny(hash_layers=2)).data()
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return ModelSpec.model_validate(data)


CANNOT: dict[str, tuple[ModelSpec, str]] = {
    "residual": (changed("residual", to={"kind": "plain"}), "residual of kind plain"),
    "dense": (changed("ffn", "hash", to={"kind": "dense", "intermediate": 32}), "kind dense"),
    "ranks": (changed("attention", "hca", "q_lora_rank", to=8), "q_lora_rank differs"),
    "heads": (changed("attention", "csa", "heads", to=8), "heads differs between layers: 4, 8"),
    "experts": (changed("ffn", "hash", "experts", to=4), "ffn experts differs"),
    "yarn": (
        changed("rope", "main", "yarn", to={"factor": 4, "original_max_position": 64}),
        "YaRN in window-only layers",
    ),
    "rope dim": (changed("rope", "main", "dim", to=8), "rope dim differs"),
    "mask": (changed("speculative", "mtp", "mask_position_zero", to=True), "mask_position_zero"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(CANNOT))
def test_what_has_no_key_is_told(case: str) -> None:
    spec, message = CANNOT[case]
    missing = official_config(spec).missing
    assert len(missing) == 1
    assert message in missing[0]


def test_one_ratio_for_both_kinds_is_told_in_layer_types() -> None:
    config = official_config(Tiny(csa_ratio=8, hca_ratio=8).spec())
    sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
    assert config.missing == ()
    assert "compress_ratios" not in config.values
    assert config.values["layer_types"] == ["sliding_attention", sparse, heavy, sparse]
    assert config.values["compress_rates"] == {sparse: 8, heavy: 8}


def test_late_hash_layers_are_told_in_mlp_layer_types() -> None:
    layers = [
        {"attention": "csa", "ffn": "routed"},
        {"attention": "hca", "ffn": "hash"},
        {"attention": "swa", "ffn": "routed"},
    ]
    config = official_config(changed("layers", to=layers))
    assert config.missing == ()
    assert "num_hash_layers" not in config.values
    assert config.values["mlp_layer_types"] == ["moe", "hash_moe", "moe"]


def test_scales_keep_the_published_word() -> None:
    """The published base checkpoints say ue8m0 and store F32: readers must look at the tensors."""
    flash = load_spec("deepseek-v4-flash")
    base = flash.model_copy(
        update={
            "weights": flash.weights.model_copy(update={"experts": "fp8_block", "scale": "f32"})
        }
    )
    config = official_config(base).values
    assert config["quantization_config"]["scale_fmt"] == "ue8m0"
    assert config["expert_dtype"] == "fp8"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_first_layers(count: int) -> None:
    spec = load_spec("deepseek-v4-flash")
    short = first_layers(spec, count)
    assert short.layer_kinds == spec.layer_kinds[:count]
    names = {e.name: e for e in inventory(spec)}
    for entry in inventory(short):
        assert names[entry.name] == entry
    assert any(e.name.startswith("mtp.0") for e in inventory(short))
    # Nothing unused is left: a text of it would load.
    assert again(short).layer_kinds == short.layer_kinds


def test_first_layers_keep_the_last_as_targets() -> None:
    short = first_layers(load_spec("deepseek-v4-flash-dspark"), 4)
    mode = short.speculative["dspark"]
    assert isinstance(mode, DsparkSpeculation)
    assert mode.target_layer_ids == [1, 2, 3]
    with pytest.raises(SpecError, match=r"2 layers; expected at least 3 for target_layer_ids"):
        first_layers(load_spec("deepseek-v4-flash-dspark"), 2)


def test_first_layers_equal_the_shipped_slice() -> None:
    spec = first_layers(load_spec("deepseek-v4-flash"), 8)
    assert inventory(spec) == inventory(load_spec("flash-slice8"))


@pytest.mark.parametrize("count", [0, -1, 5])
def test_other_numbers_of_layers_are_refused(count: int) -> None:
    with pytest.raises(SpecError, match=rf"{count} layers; expected 1 to 4"):
        first_layers(replace(Tiny(), vocab=40).spec(), count)
