"""`v4graph bench acceptance`: on v4-nano, on a DSpark checkpoint, and on what it cannot measure."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import nano
from tests.support.tiny import SHAPES
from v4graph.cli.main import app
from v4graph.spec.load import spec_path

QUICK = ["--num-prompts", "3", "--max-tokens", "8", "--no-compile", "--device", "cpu", "--json"]


def acceptance(*args: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["bench", "acceptance", *args, *QUICK], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_v4_nano() -> None:
    data = acceptance("v4-nano", "--num-draft-tokens", "1,2")
    assert [r["num_draft_tokens"] for r in data["results"]] == [1, 2]
    for r in data["results"]:
        assert r["differences"] == []
        assert r["compared_tokens"] >= 3 * 8
        assert 1 < r["tokens_per_round"] <= 1 + r["num_draft_tokens"]
        expected = 1 - 1 / r["tokens_per_round"]
        assert r["approximate_rate"] == pytest.approx(expected, abs=1e-3)
    assert [v["token_shift"] for v in data["variants"]] == [1, 1, 1, 0]


def test_a_dspark_checkpoint(tmp_path: Path) -> None:
    tiny = replace(SHAPES["sliding"], dspark=(2, 3), vocab=nano.spec().vocab_size)
    spec, weights = tmp_path / "tiny.yaml", tmp_path / "weights"
    spec.write_text(tiny.spec().model_dump_json())  # JSON is YAML
    made = CliRunner().invoke(app, ["make-random", str(spec), "-o", str(weights)])
    assert made.exit_code == 0, made.output
    source = spec_path("v4-nano").with_suffix("")
    shutil.copy(source / "tokenizer.json", weights / "tokenizer.json")
    text = ["--text", str(source / "heldout.txt")]
    where = [str(spec), "--weights", str(weights), *text]
    data = acceptance(*where, "--num-draft-tokens", "2,3")
    for r in data["results"]:
        assert r["differences"] == []
        assert r["compared_tokens"] > 3 * 8
    assert "variants" not in data


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--speculative", "ngram"], "'ngram' of kind mtp or dspark"),
        (["--num-draft-tokens", "1,x"], "expected numbers like 1,2,3"),
        (["--num-draft-tokens", "9"], "num_draft_tokens 9: expected 1..8"),
        (["--text", "nowhere.txt"], "no such file"),
    ],
)
def test_what_cannot_be_measured(args: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "acceptance", "v4-nano", *args, *QUICK])
    assert result.exit_code == 2
    assert message in result.output
