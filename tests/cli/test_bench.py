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
from v4graph.engine.engine import LLMEngine
from v4graph.engine.rounds import DraftCounts
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
        assert r["near_ties"] == []
        assert r["recompute"] == {name: r[name] for name in r["recompute"]}
        assert {"rounds", "tokens_per_round", "draft_acceptance"} <= r["recompute"].keys()
    variants, last = data["variants"], data["results"][-1]
    assert [v["token_shift"] for v in variants] == [1, 1, 1, 0]
    assert {(v["num_draft_tokens"], v["rounds"]) for v in variants} == {(2, last["rounds"])}
    assert variants[0]["accepted_drafts"] == last["accepted_drafts"]
    assert variants[3]["accepted_drafts"] < last["accepted_drafts"] / 2


def test_the_tables_put_engine_and_recompute_side_by_side() -> None:
    args = ["v4-nano", "--num-draft-tokens", "1,3", *QUICK[:-1]]
    result = CliRunner().invoke(app, ["bench", "acceptance", *args], catch_exceptions=False)
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in result.stdout.splitlines()]
    counted = [row for row in rows if len(row) > 4 and row[1] in ("engine", "recompute")]
    assert [row[0] for row in counted] == ["1", "", "3", ""]
    for engine, recompute in zip(counted[::2], counted[1::2], strict=True):
        assert engine[2:7] == recompute[2:7]
        assert engine[11] == "0"
    assert "recompute at k = 3 under other conventions" in result.stdout
    (stated,) = (row for row in rows if row and "(the spec's)" in row[0])
    assert stated[1:] == counted[3][2:5]


def test_prompt_lookup() -> None:
    data = acceptance("v4-nano", "--speculative", "ngram", "--num-draft-tokens", "2,8")
    for r in data["results"]:
        assert r["differences"] == []
        assert 0 < r["drafts"] < r["rounds"] * r["num_draft_tokens"]
        assert r["recompute"] == {name: r[name] for name in r["recompute"]}
    assert "variants" not in data


def test_the_recompute_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that reports other drafts than it should changes nothing in the recompute's row."""

    def lost(self: DraftCounts, num_drafts: int, num_accepted: int) -> None:
        add(self, num_drafts, 0)

    honest = acceptance("v4-nano", "--num-draft-tokens", "2", "--no-variants")["results"][0]
    add, check = DraftCounts.add, LLMEngine._count_round

    def count_round(self: LLMEngine, *args: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(DraftCounts, "add", lost)
            check(self, *args)

    monkeypatch.setattr(LLMEngine, "_count_round", count_round)
    r = acceptance("v4-nano", "--num-draft-tokens", "2", "--no-variants")["results"][0]
    assert r["accepted_drafts"] == 0 < honest["accepted_drafts"]
    assert r["recompute"] == honest["recompute"]


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
        (["--speculative", "none"], "'none' of kind mtp, dspark or ngram"),
        (["--speculative", "eagle"], "'eagle' of kind mtp, dspark or ngram"),
        (["--num-draft-tokens", "1,x"], "expected numbers of 1 to 8 like 1,2,3"),
        (["--num-draft-tokens", "1,9"], "expected numbers of 1 to 8 like 1,2,3; got 9"),
        (["--num-draft-tokens", "0"], "expected numbers of 1 to 8 like 1,2,3; got 0"),
        (["--num-draft-tokens", "3,-1"], "expected numbers of 1 to 8 like 1,2,3; got -1"),
        (["--text", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--text", "."], "--text .: a directory; expected a text file"),
        (["--text", "/dev/null"], "--text /dev/null: not a regular file"),
    ],
)
def test_what_cannot_be_measured(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before any weights are read."""
    monkeypatch.setattr("v4graph.model.loader.load_params", None)
    result = CliRunner().invoke(app, ["bench", "acceptance", "v4-nano", *args, *QUICK])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"plain text \xff\xfe", "not UTF-8 (byte 0xff at offset 11)"),
        (b"", "too short for 3 prompts"),
    ],
)
def test_texts_that_give_no_prompts(content: bytes, message: str, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(content)
    args = ["bench", "acceptance", "v4-nano", "--text", str(text), *QUICK]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert message in result.output


def test_a_number_that_a_block_cannot_draft(tmp_path: Path) -> None:
    tiny = replace(SHAPES["sliding"], dspark=(2, 3), vocab=nano.spec().vocab_size)
    spec = tmp_path / "tiny.yaml"
    spec.write_text(tiny.spec().model_dump_json())
    args = [str(spec), "--weights", str(tmp_path), "--num-draft-tokens", "1,4"]
    result = CliRunner().invoke(app, ["bench", "acceptance", *args, *QUICK])
    assert result.exit_code == 2
    assert "num_draft_tokens 4: expected at most 3" in result.output
