"""`v4graph explain`: tables for a person, JSON with raw integers for a program."""

from __future__ import annotations

import json
import time

import pytest
import yaml
from typer.testing import CliRunner

from v4graph.cli.explain import app
from v4graph.plan.weights import inventory
from v4graph.spec.load import load_spec
from v4graph.spec.model import ModelSpec

runner = CliRunner()


def run(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_weights_lists_every_tensor_and_the_totals() -> None:
    output = run("weights", "v4-nano")
    lines = output.splitlines()
    names = [line.split()[0] for line in lines[1:536]]
    assert names == [e.name for e in inventory(load_spec("v4-nano"))]
    assert "embed.weight" in lines[1]
    assert "4096x256" in lines[1]
    assert "2,097,152" in lines[1]
    assert "21,913,072" in output


def test_weights_summary_has_totals_only() -> None:
    output = run("weights", "deepseek-v4-flash", "--summary")
    for figure in ("69,187", "159,609,485,896", "1,575", "3,593,787,756", "34,167"):
        assert figure in output
    assert "embed.weight" not in output


def test_weights_json_has_raw_integers() -> None:
    data = json.loads(run("weights", "v4-nano", "--json"))
    assert data["spec"] == "v4-nano"
    assert data["totals"]["total"]["num_tensors"] == 535 == len(data["tensors"])
    assert data["totals"]["total"]["num_bytes"] == sum(t["num_bytes"] for t in data["tensors"])
    assert data["totals"]["total"]["by_dtype"]["I64"] == {"num_tensors": 2, "num_bytes": 131_072}
    assert data["tensors"][0] == {
        "name": "embed.weight",
        "dtype": "BF16",
        "shape": [4096, 256],
        "num_bytes": 2_097_152,
        "part": "main",
    }
    assert {t["part"] for t in data["tensors"] if t["name"].startswith("mtp.")} == {"draft"}


def test_weights_json_summary() -> None:
    data = json.loads(run("weights", "deepseek-v4-pro", "--json", "--summary"))
    assert data["totals"]["total"]["num_bytes"] == 864_704_792_696
    assert "tensors" not in data


def test_the_longest_listing_is_quick() -> None:
    start = time.process_time()
    output = run("weights", "deepseek-v4-pro")
    assert time.process_time() - start < 10  # about 2 s of processor time; a shared machine is slow
    assert len(output.splitlines()) > 145_116


def test_cache_of_the_longest_sequence_by_default() -> None:
    output = run("cache", "deepseek-v4-pro")
    for figure in ("1,048,576", "37,440", "5,511.44", "5.39", "fp8_ds"):
        assert figure in output


def test_cache_json() -> None:
    data = json.loads(run("cache", "deepseek-v4-flash", "--json", "--rows", "bf16"))
    assert data["tokens"] == 1_048_576
    assert data["totals"]["bytes_per_token"] == 6880
    assert data["totals"]["history_bytes"] == 6880 * 1_048_576
    window = data["groups"][0]
    assert (window["name"], window["row_bytes"], window["main_layers"]) == ("window", 1024, 43)


def test_cache_options() -> None:
    data = json.loads(
        run(
            "cache",
            "v4-nano",
            "--json",
            "--tokens",
            "96",
            "--dtype",
            "float32",
            "--draft-tokens",
            "3",
        )
    )
    groups = {g["name"]: g for g in data["groups"]}
    assert data["dtype_bytes"] == 4
    assert groups["window"]["row_bytes"] == 256
    assert groups["window"]["kept_tokens"] == 67
    assert groups["window"]["draft_layers"] == 1
    assert groups["csa_kv"]["rows"] == 24


def test_cache_summary() -> None:
    assert "csa_kv" not in run("cache", "v4-nano", "--summary")
    assert "groups" not in json.loads(run("cache", "v4-nano", "--summary", "--json"))


@pytest.mark.parametrize(
    "arguments",
    [("cache", "v4-nano", "--rows", "fp4"), ("cache", "v4-nano", "--tokens", "-1"), ("weights",)],
)
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    assert runner.invoke(app, list(arguments)).exit_code == 2


@pytest.mark.parametrize("name", ["v4-nano", "deepseek-v4-flash", "deepseek-v4-pro"])
def test_spec_prints_yaml_that_is_the_same_spec(name: str) -> None:
    output = run("spec", name)
    assert ModelSpec.model_validate(yaml.safe_load(output)) == load_spec(name)
    assert "like" not in yaml.safe_load(output)["attention"]["csa"]


def test_spec_begins_with_the_layers() -> None:
    head = run("spec", "deepseek-v4-flash").splitlines()[0]
    assert head == "# 43 layers: 2 swa+hash, 1 csa+hash, 20 hca+routed, 20 csa+routed"


def test_spec_json() -> None:
    data = json.loads(run("spec", "v4-nano", "--json"))
    assert ModelSpec.model_validate(data) == load_spec("v4-nano")
