"""`v4graph make-random`, and what the other commands make of its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from tests.support.tiny import Tiny
from v4graph.cli.main import app
from v4graph.model.loader import load_params, load_quantised
from v4graph.model.recompute import RecomputeModel
from v4graph.plan.weights import inventory
from v4graph.spec.hf_export import official_config
from v4graph.spec.load import load_spec
from v4graph.spec.model import ModelSpec
from v4graph.spec.safetensors_header import read_checkpoint

# 160 wide: FP8 blocks at the edge are partial ones.
TINY = Tiny(kinds=("swa", "csa", "hca"), hidden=160, heads=6, experts=8, vocab=120)
QUANTISED = {"linear": "fp8_block", "experts": "fp4", "other": "bf16"}


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    return write_spec(tmp_path / "small.yaml", {})


def write_spec(path: Path, changes: dict[str, Any]) -> Path:
    spec = ModelSpec.model_validate(TINY.data() | {"weights": QUANTISED} | changes)
    path.write_text(spec.model_dump_json())  # JSON is YAML
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def make(spec_file: Path, directory: Path, *options: object) -> Result:
    result = run("make-random", spec_file, "-o", directory, *options)
    assert result.exit_code == 0, result.output
    return result


def test_import_gives_the_same_model(spec_file: Path, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    result = make(spec_file, directory, "--shard-size", "300kB")
    spec = load_spec(spec_file)
    total = sum(e.num_bytes for e in inventory(spec))
    assert f"{len(inventory(spec)):,} tensors, {total:,} bytes" in result.stdout
    assert "no tokenizer files" in result.stderr
    imported = run("import", directory, "-o", tmp_path / "again.yaml")
    assert imported.exit_code == 0, imported.output
    assert "note" not in imported.stderr
    again = load_spec(tmp_path / "again.yaml")
    assert inventory(again) == inventory(spec)
    assert official_config(again) == official_config(spec)


def test_first_layers(spec_file: Path, tmp_path: Path) -> None:
    make(spec_file, tmp_path / "out", "--layers", 2)
    assert run("import", tmp_path / "out", "-o", tmp_path / "two.yaml").exit_code == 0
    kinds = [kind for kind, _ in load_spec(tmp_path / "two.yaml").layer_kinds]
    assert kinds == ["swa", "csa"]


@pytest.mark.parametrize("mode", ["none", "mtp"])
def test_generate_equals_a_recompute(mode: str, spec_file: Path, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    make(spec_file, directory, "--seed", 3)
    spec = load_spec(spec_file)
    prompt = [7 * i % 118 + 2 for i in range(37)]
    result = run(
        *("generate", spec_file, "--weights", directory, "--no-compile", "--ignore-eos", "--json"),
        *("--prompt-ids", ",".join(map(str, prompt)), "--max-tokens", 12, "--logprobs", 5),
        *("--speculative", mode, "--device", "cpu"),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    tokens = report["token_ids"]
    assert len(tokens) == 12

    kept = load_quantised(spec, directory, torch.float32)
    params = {k: v if isinstance(v, torch.Tensor) else v.dequantise() for k, v in kept.items()}
    with torch.no_grad():
        logits = RecomputeModel(spec, params).forward(torch.tensor([prompt + tokens])).logits[0]
    told = torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1]
    assert told.argmax(-1).tolist() == tokens
    for row, token, entry in zip(told, tokens, report["logprobs"], strict=True):
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        top = [row[item["token_id"]] for item in entry["top"]]
        torch.testing.assert_close(torch.stack(top), row.topk(5).values, atol=1e-4, rtol=0)


def test_the_same_again_and_another(spec_file: Path, tmp_path: Path) -> None:
    one, two, three = (tmp_path / n for n in ("one", "two", "three"))
    make(spec_file, one, "--seed", 1)
    make(spec_file, two, "--seed", 1, "--shard-size", "200kB", "--device", "cpu")
    make(spec_file, three, "--seed", 1, "--scale", 2)
    spec = load_spec(spec_file)
    a, b, c = (load_params(spec, d, torch.float32) for d in (one, two, three))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert torch.equal(a["layers.0.attn.wq_a.weight"] * 2, c["layers.0.attn.wq_a.weight"])
    assert torch.equal(a["norm.weight"], c["norm.weight"])


def test_force(spec_file: Path, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    make(spec_file, directory, "--shard-size", "100kB")
    result = run("make-random", spec_file, "-o", directory)
    assert result.exit_code == 2
    assert "not empty" in result.stderr
    make(spec_file, directory, "--force")
    assert len(list(directory.glob("*.safetensors"))) == 1
    assert read_checkpoint(directory).missing_files == ()


def test_a_spec_without_an_official_config(tmp_path: Path) -> None:
    path = write_spec(tmp_path / "plain.yaml", {"residual": {"kind": "plain"}})
    result = make(path, tmp_path / "out")
    assert "no config.json: it has no key for residual of kind plain" in result.stderr
    assert not (tmp_path / "out" / "config.json").exists()
    assert load_params(load_spec(path), tmp_path / "out", torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shard-size", "5 litres"), "--shard-size '5 litres': expected a size"),
        (("--layers", "9"), "9 layers; expected 1 to 3"),
        (("--scale", "0"), "--scale 0.0: expected"),
        (("--scale", "nan"), "--scale nan: expected"),
        (("--device", "abacus"), "device 'abacus': expected"),
    ],
)
def test_wrong_options(
    options: tuple[str, ...], message: str, spec_file: Path, tmp_path: Path
) -> None:
    result = run("make-random", spec_file, "-o", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_whole_model_does_not_fit(tmp_path: Path) -> None:
    """Told before a byte is written: Pro takes 865 GB; the file system's own figure decides."""
    import shutil

    if shutil.disk_usage(tmp_path).free > 870e9:
        pytest.skip("it would fit here")
    result = run("make-random", "deepseek-v4-pro", "-o", tmp_path / "pro")
    assert result.exit_code == 2
    assert "GB are needed and" in result.stderr
    assert not (tmp_path / "pro").exists()
