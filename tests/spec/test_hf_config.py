"""config.json to spec: the published files give the shipped specs, faults name key and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from v4graph.errors import SpecError
from v4graph.spec.hf_config import ImportedSpec, import_config
from v4graph.spec.hf_yaml import to_yaml
from v4graph.spec.load import load_spec
from v4graph.spec.model import MtpSpeculation
from v4graph.spec.safetensors_header import StoredCheckpoint, StoredTensor

# The root config.json of deepseek-ai/DeepSeek-V4-Flash and -Pro on huggingface.co.
COMMON: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 129280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "num_key_value_heads": 1,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 1048576,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "expert_dtype": "fp4",
}
FLASH = {
    **COMMON,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "routed_scaling_factor": 1.5,
    "index_topk": 512,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
}
PRO = {
    **COMMON,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "routed_scaling_factor": 2.5,
    "index_topk": 1024,
    "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
}
TRANSFORMERS_FLASH = {
    **{k: v for k, v in FLASH.items() if k not in ("compress_ratios", "num_hash_layers")},
    "layer_types": (
        ["sliding_attention"] * 2
        + ["compressed_sparse_attention", "heavily_compressed_attention"] * 20
        + ["compressed_sparse_attention"]
    ),
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "partial_rotary_factor": 0.125,
    "rope_scaling": None,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 160000.0,
            "partial_rotary_factor": 0.125,
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
            "attention_factor": 1.0,
        },
    },
    "mlp_bias": False,
}
NAMES = {"flash": (FLASH, "deepseek-v4-flash"), "pro": (PRO, "deepseek-v4-pro")}


def stored(**dtypes: str) -> StoredCheckpoint:
    """A checkpoint of the named tensors (`__` for a dot), all of shape [1]."""
    names = {key.replace("__", "."): dtype for key, dtype in dtypes.items()}
    return StoredCheckpoint(
        {n: StoredTensor(d, (1,), "a.safetensors") for n, d in names.items()}, ()
    )


def loaded(imported: ImportedSpec, tmp_path: Path) -> Any:
    path = tmp_path / "imported.yaml"
    path.write_text(to_yaml(imported, "a test"), encoding="utf-8")
    return load_spec(str(path))


def faults(config: dict[str, Any], **arguments: Any) -> str:
    with pytest.raises(SpecError) as caught:
        import_config(config, "x", **arguments)
    return str(caught.value)


@pytest.mark.parametrize("which", NAMES)
def test_published_config_gives_the_shipped_spec(which: str, tmp_path: Path) -> None:
    config, name = NAMES[which]
    assert loaded(import_config(config, name), tmp_path) == load_spec(name)


def test_transformers_form_gives_the_shipped_main_model(tmp_path: Path) -> None:
    imported = import_config(TRANSFORMERS_FLASH, "deepseek-v4-flash")
    spec = loaded(imported, tmp_path)
    shipped = load_spec("deepseek-v4-flash")
    assert spec.model_copy(update={"speculative": shipped.speculative}) == shipped
    # transformers keeps num_nextn_predict_layers, but saves no draft layer.
    assert list(spec.speculative) == ["none"]
    assert any("transformers does not save it" in note for note in imported.notes)


def test_yaml_is_tidy_and_says_where_values_come_from() -> None:
    text = to_yaml(import_config(FLASH, "DeepSeek V4 Flash"), "somewhere")
    assert "name: deepseek-v4-flash\n" in text
    assert "# hc_mult, hc_sinkhorn_iters, hc_eps\n" in text
    assert "eps: 1.0e-6" in text
    assert "routed: {like: hash, kind: moe}" in text
    assert "- {attention: [hca, csa], ffn: routed, count: 20}" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attention_bias", True, "expected false"),
        ("mlp_bias", True, "expected false"),
        ("tie_word_embeddings", 1, "expected false or true"),
        ("hidden_act", "gelu", 'expected "silu"'),
        ("num_key_value_heads", 8, "expected 1"),
        ("n_shared_experts", 2, "expected 0 or 1"),
        ("scoring_func", "tanh", '"sqrtsoftplus" or "sigmoid" or "softmax"'),
        ("hidden_size", "4096", "an integer of at least 1"),
        ("hidden_size", True, "an integer of at least 1"),
        ("hidden_size", None, "an integer of at least 1"),
        ("rms_norm_eps", -1.0, "a positive number"),
        ("num_hash_layers", -1, "an integer of at least 0"),
        ("compress_ratios", "none", "a list of integers"),
        ("compress_ratios", [0, 0] + [4, 128] * 20, "43 entries"),
        ("compress_ratios", [0, 0] + [4, 8] * 20 + [128], "found also 8, 128"),
        ("compress_ratios", [4] * 43 + [4], "past num_hidden_layers"),
        ("eos_token_id", [1, "x"], "a token id"),
        ("rope_scaling", {"type": "linear", "factor": 2}, '"default" or "yarn"'),
        ("rope_scaling", {**COMMON["rope_scaling"], "mscale": 1.0}, "expected no such key"),
        ("rope_scaling", {**COMMON["rope_scaling"], "attention_factor": 1.277}, "expected 1.0"),
        ("rope_theta", float("inf"), "a positive number"),
        ("qk_rope_head_dim", 63, "an even number"),
        ("partial_rotary_factor", "half", "a positive number"),
        ("partial_rotary_factor", 0.5, "qk_rope_head_dim / head_dim = 64/512"),
        ("mlp_layer_types", [["moe"]] * 43, "entries among hash_moe, moe"),
        ("layer_types", {"0": "sliding_attention"}, "a list of 43 entries"),
        ("num_nextn_predict_layers", "one", "an integer of at least 0"),
        ("expert_dtype", "int4", '"fp4" or "fp8"'),
        ("quantization_config", {"quant_method": "gptq"}, '"fp8"'),
        ("compress_ratio", [4], "did you mean 'compress_ratios'?"),
        ("engram_layer_ids", [1], "expected no such key"),
    ],
)
def test_a_fault_names_key_value_and_expectation(key: str, value: Any, expected: str) -> None:
    message = faults({**FLASH, key: value})
    assert key in message
    assert expected in message


def test_block_size_of_another_version_is_refused() -> None:
    block = {**COMMON["quantization_config"], "weight_block_size": [32, 32]}
    message = faults({**FLASH, "quantization_config": block})
    assert "quantization_config: weight_block_size: [32, 32]; expected [128, 128]" in message


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v41", "llama", None])
def test_another_architecture_is_one_clear_fault(model_type: str | None) -> None:
    message = faults({**FLASH, "model_type": model_type, "strange": 1})
    assert message.count("\n") == 0
    assert 'expected "deepseek_v4"' in message


def test_all_faults_are_reported_at_once() -> None:
    message = faults({**FLASH, "attention_bias": True, "hc_mult": 0, "mystery": 1})
    assert len(message.splitlines()) == 3


def test_a_key_can_be_vouched_for() -> None:
    assert import_config({**FLASH, "mystery": 1}, "x", ignored=["mystery"]).data["name"] == "x"


@pytest.mark.parametrize("extra", [[], [0], [1], [0, 0, 0]])
def test_ratio_list_may_or_may_not_cover_draft_layers(extra: list[int]) -> None:
    ratios = FLASH["compress_ratios"][:43] + extra
    data = import_config({**FLASH, "compress_ratios": ratios}, "x").data
    assert data["layers"] == import_config(FLASH, "x").data["layers"]


def test_ratio_one_means_window_only() -> None:
    ratios = [1, 0, *FLASH["compress_ratios"][2:]]
    assert import_config({**FLASH, "compress_ratios": ratios}, "deepseek-v4-flash").data == (
        import_config(FLASH, "deepseek-v4-flash").data
    )


def test_both_layer_lists_must_agree() -> None:
    config = {**TRANSFORMERS_FLASH, "compress_ratios": PRO["compress_ratios"]}
    assert "layer_types" in faults(config)
    for wrong in (2, "3"):
        assert "num_hash_layers" in faults({**TRANSFORMERS_FLASH, "num_hash_layers": wrong})
    assert import_config({**TRANSFORMERS_FLASH, "num_hash_layers": 3}, "x")


def test_layer_types_of_wrong_length() -> None:
    config = {**TRANSFORMERS_FLASH, "layer_types": TRANSFORMERS_FLASH["layer_types"][:-1]}
    assert "a list of 43 entries" in faults(config)


def test_groups_of_absent_layer_kinds_are_left_out(tmp_path: Path) -> None:
    config = {**FLASH, "compress_ratios": [128] * 43, "num_nextn_predict_layers": 0}
    spec = loaded(import_config(config, "x"), tmp_path)
    assert set(spec.attention) == {"hca"}
    assert set(spec.cache_groups) == {"window", "hca_kv", "hca_state"}
    assert list(spec.speculative) == ["none"]


def test_other_ratios_give_pages_of_whole_rows() -> None:
    config = {**FLASH, "compress_ratios": [4, 96] + [4] * 41}
    groups = import_config(config, "x").data["cache_groups"]
    assert groups["hca_kv"]["page_tokens"] == 288


def test_absent_expert_dtype_is_read_from_the_tensors() -> None:
    config = {k: v for k, v in FLASH.items() if k != "expert_dtype"}
    told = import_config(config, "x")
    assert told.data["weights"]["experts"] == "fp4"
    assert any("expert_dtype is absent" in note for note in told.notes)
    found = import_config(config, "x", stored(layers__0__ffn__experts__0__w1__weight="F8_E4M3"))
    assert found.data["weights"]["experts"] == "fp8_block"
    assert not any("expert_dtype is absent" in note for note in found.notes)


def test_tensor_dtypes_overrule_the_config() -> None:
    # As in the published base checkpoints: FP8 experts, and F32 scales beside `ue8m0`.
    tensors = stored(
        embed__weight="BF16",
        layers__0__attn__wq_a__weight="F8_E4M3",
        layers__0__attn__wq_a__scale="F32",
        layers__0__ffn__experts__0__w1__weight="F8_E4M3",
    )
    imported = import_config({**FLASH, "expert_dtype": "fp8"}, "x", tensors)
    weights = imported.data["weights"]
    assert (weights["experts"], weights["scale"]) == ("fp8_block", "f32")
    assert any("weights.scale is f32" in note for note in imported.notes)


def test_unknown_tensor_dtype_is_a_fault() -> None:
    message = faults(FLASH, stored=stored(layers__0__attn__wq_a__weight="F16"))
    assert "layers.0.attn.wq_a.weight: dtype F16; expected one of F32, BF16, F8_E4M3" in message


def test_mtp_is_what_the_files_hold(tmp_path: Path) -> None:
    with_mtp = stored(embed__weight="BF16", mtp__0__e_proj__weight="F8_E4M3")
    mode = loaded(import_config(FLASH, "x", with_mtp), tmp_path).speculative["mtp"]
    assert isinstance(mode, MtpSpeculation)
    assert (mode.num_layers, mode.num_draft_tokens) == (1, 3)
    without = import_config(FLASH, "x", stored(embed__weight="BF16"))
    assert list(without.data["speculative"]) == ["none"]
    assert any("no file holds mtp.0.e_proj" in note for note in without.notes)


DSPARK = {
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_noise_token_id": 128799,
    "compress_ratios": [*FLASH["compress_ratios"][:43], 0, 0, 0],
}


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {
            "embed__weight": "BF16",
            "mtp__0__main_proj__weight": "F8_E4M3",
            "mtp__1__attn__wkv__weight": "F8_E4M3",
            "mtp__2__markov_head__markov_w1__weight": "BF16",
        },
    ],
)
def test_dspark_by_the_keys_or_the_tensors(tensors: dict[str, str], tmp_path: Path) -> None:
    """`num_nextn_predict_layers` is 1 in these files, and says nothing about their drafter."""
    imported = import_config({**FLASH, **DSPARK}, "x", stored(**tensors))
    spec = loaded(imported, tmp_path)
    assert list(spec.speculative) == ["none", "dspark"]
    shipped = load_spec("deepseek-v4-flash-dspark")
    assert spec.speculative["dspark"] == shipped.speculative["dspark"]


def test_dspark_keys_without_their_tensors() -> None:
    imported = import_config({**FLASH, **DSPARK}, "x", stored(embed__weight="BF16"))
    assert list(imported.data["speculative"]) == ["none"]
    assert any("no file holds mtp.0.main_proj" in note for note in imported.notes)


def test_dspark_tensors_need_their_keys() -> None:
    message = faults(FLASH, stored=stored(mtp__0__main_proj__weight="F8_E4M3"))
    for key in ("block_size", "markov_rank", "target_layer_ids", "noise_token_id"):
        assert f"dspark_{key}: absent" in message


def test_unquantised_config_takes_its_torch_dtype() -> None:
    config = {k: v for k, v in FLASH.items() if k not in ("quantization_config", "expert_dtype")}
    imported = import_config({**config, "torch_dtype": "float32"}, "x")
    assert imported.data["weights"]["linear"] == imported.data["weights"]["other"] == "f32"
    assert imported.data["cache_groups"]["csa_kv"]["row"] == {"dim": 512}
    assert "torch_dtype" in faults({**config, "torch_dtype": "float16"})


def test_no_swiglu_limit_means_no_clamp() -> None:
    for value in (0, None):
        ffn = import_config({**FLASH, "swiglu_limit": value}, "x").data["ffn"]
        assert "clamp" not in ffn["hash"]
