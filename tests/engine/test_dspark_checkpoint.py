"""A DSpark checkpoint in the official names: imported, loaded and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.cli.test_import_checkpoint import CONFIG
from tests.support.speculation import greedy, run
from v4graph.cli.import_checkpoint import import_checkpoint
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.model.params import random_params, unstack_experts
from v4graph.plan.weights import draft_inventory
from v4graph.spec.hf_config import import_config
from v4graph.spec.hf_yaml import to_yaml
from v4graph.spec.load import load_spec_text

DSPARK = {
    "dspark_block_size": 3,
    "dspark_markov_rank": 8,
    "dspark_target_layer_ids": [1, 3],
    "dspark_noise_token_id": 127,
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = {**CONFIG, **DSPARK, "torch_dtype": "float32"}
    spec = load_spec_text(to_yaml(import_config(config, "tiny"), "a test"))
    tensors = dict(unstack_experts(random_params(spec, 2)))
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_import_runs(checkpoint: Path) -> None:
    """`num_nextn_predict_layers` is 1 and three layers are there, as in the published files."""
    text, _ = import_checkpoint(checkpoint)
    spec = load_spec_text(text)
    assert len({t.name.split(".")[1] for t in draft_inventory(spec)}) == 3
    tokens = {}
    for mode in ("none", "dspark"):
        config = EngineConfig(
            max_num_seqs=2, max_model_len=64, compile=False, device="cpu", speculative=mode
        )
        llm = LLMEngine.from_spec(spec, checkpoint, config)
        tokens[mode] = run(llm, {"a": [3, 4, 5], "b": list(range(2, 20))}, greedy(12)).tokens
        assert llm.metrics["draft_tokens"] > 0 or mode == "none"
    assert tokens["dspark"] == tokens["none"]
