"""`v4graph explain plan`, `modes` and `program`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.support.tiny import Tiny
from v4graph.cli import explain_plan
from v4graph.cli.main import app
from v4graph.plan.buffers import buffers
from v4graph.plan.lower import lower
from v4graph.plan.types import Limits
from v4graph.spec.load import load_spec
from v4graph.words import counted

runner = CliRunner()
ONE_LAYER = Tiny(kinds=("swa",), window=8, hash_layers=0, hidden=32, max_len=64, residual="plain")


def run(*arguments: str) -> str:
    result = runner.invoke(app, ["explain", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def data_of(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json"))


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    data = ONE_LAYER.data()
    # Few operators: one layer, dense, without streams, compiles in seconds.
    data |= {"ffn": {"routed": {"kind": "dense", "intermediate": 32}}, "speculative": {}}
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def test_plan_shows_layers_groups_buckets_and_memory() -> None:
    output = run("plan", "v4-nano")
    plan = lower(load_spec("v4-nano"), Limits())
    for g in plan.groups:
        (line,) = [x for x in output.splitlines() if x.startswith(f"│ {g.name} ")]
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert cells == [
            g.name,
            g.kind,
            "f32",
            str(len(g.layers)),
            str(len(g.draft_layers)),
            str(g.row_dim),
            str(g.ratio),
            str(g.page_tokens),
            str(g.page_rows),
            str(g.kept_tokens) if g.kept_tokens else "all",
            str(g.table_width),
            f"{g.num_pages:,}",
            f"{g.num_pages * g.page_bytes:,}",
        ]
    for text in ("32x8, 256x8", "1x1, 8x8", "21,913,072", "8,192", "request table", "routed"):
        assert text in output


def test_plan_json_is_the_plan_with_bytes() -> None:
    data = data_of("plan", "v4-nano")
    plan = lower(load_spec("v4-nano"), Limits())
    for shown, g in zip(data["groups"], plan.groups, strict=True):
        assert shown.pop("page_bytes") == g.page_bytes
        assert shown.pop("num_bytes") == g.num_pages * g.page_bytes
    assert data == json.loads(json.dumps(plan.to_json()))


def test_limits_reach_the_plan() -> None:
    options = ("--max-num-seqs", "3", "--max-num-batched-tokens", "40", "--max-model-len", "100")
    data = data_of("plan", "v4-nano", *options, "--dtype", "bfloat16")
    assert data["max_model_len"] == 100
    assert data["limits"]["dtype"] == "bfloat16"
    assert [b["num_reqs"] for b in data["modes"][1]["buckets"]] == [1, 3]
    assert data["modes"][0]["buckets"][-1] == {
        "num_tokens": 40,
        "num_reqs": 3,
        "tokens_per_req": 0,
    }
    formats = {g["kind"]: g["row_format"] for g in data["groups"]}
    assert formats["sliding_window"] == formats["compressed"] == "bf16"
    assert formats["compressor_state"] == "f32"


def test_modes_list_every_buffer() -> None:
    output = run("modes", "v4-nano")
    plan = lower(load_spec("v4-nano"), Limits())
    lines = output.splitlines()
    for mode in plan.modes:
        for bucket in mode.buckets:
            tokens = counted(bucket.num_tokens, "token")
            title = f"{mode.mode.value}: {tokens}, {counted(bucket.num_reqs, 'request')}"
            start = next(i for i, line in enumerate(lines) if title in line) + 4
            for i, b in enumerate(buffers(plan, mode.mode, bucket)):
                cells = [cell.strip() for cell in lines[start + i].strip("│").split("│")]
                shape = "x".join(map(str, b.shape))
                assert cells == [b.name, b.dtype, shape, b.producer, f"{b.num_bytes:,}"]


def test_modes_json() -> None:
    prefill, decode, idle = data_of("modes", "v4-nano", "--speculative", "none")["modes"]
    assert (idle["mode"], idle["layers"], idle["reads"]) == ("idle", "none", [])
    assert (prefill["mode"], prefill["tokens_per_request"]) == ("prefill", 0)
    assert (decode["mode"], decode["tokens_per_request"]) == ("decode", 1)
    assert set(decode["reads"]) == set(decode["writes"]) == set(load_spec("v4-nano").cache_groups)
    eight = decode["buckets"][1]
    by_name = {b["name"]: b for b in eight["buffers"]}
    assert by_name["window.read_slots"] == {
        "name": "window.read_slots",
        "dtype": "int64",
        "shape": [8, 64],
        "producer": "prepare",
        "group": "window",
        "num_bytes": 4096,
    }
    assert {n for n, b in by_name.items() if b["producer"] == "host"} == {
        "slots",
        "query_lens",
        "step",
    }
    assert eight["num_bytes"] == sum(b["num_bytes"] for b in eight["buffers"])


def test_packed_rows_are_counted_in_whole_pages() -> None:
    """64 rows of 584 bytes, padded to a multiple of 576; 64 index rows of 132."""
    groups = {g["name"]: g for g in data_of("plan", "deepseek-v4-flash")["groups"]}
    assert groups["csa_kv"]["row_format"] == "fp8_ds"
    assert groups["csa_kv"]["layer_page_bytes"] == groups["window"]["layer_page_bytes"] == 37_440
    assert groups["csa_index"]["row_format"] == "fp8"
    assert groups["csa_index"]["layer_page_bytes"] == 64 * 132
    assert groups["hca_kv"]["layer_page_bytes"] == 1_728


def test_a_program_needs_weights() -> None:
    result = runner.invoke(app, ["explain", "program", "deepseek-v4-flash"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: deepseek-v4-flash: no checkpoint directory")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-model-len", "9000"), "max_model_len 9000: expected 1..8192"),
        (("--max-num-seqs", "0"), "--max-num-seqs"),
        (("--dtype", "float16"), "--dtype"),
    ],
)
def test_limits_out_of_range(options: tuple[str, ...], message: str) -> None:
    result = runner.invoke(app, ["explain", "plan", "v4-nano", *options])
    assert result.exit_code == 2
    assert message in result.stderr


def test_program_makes_up_no_large_weights(
    tiny_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_plan, "MAX_RANDOM_BYTES", 1000)
    result = runner.invoke(app, ["explain", "program", str(tiny_file)])
    assert result.exit_code == 2
    assert "tiny: no checkpoint directory" in result.stderr
    assert "bytes of weights are too many to make up (at most 1,000)" in result.stderr


def test_program_prefers_the_checkpoint_beside_the_spec(tiny_file: Path) -> None:
    tiny_file.with_suffix("").mkdir()
    result = runner.invoke(app, ["explain", "program", str(tiny_file)])
    assert result.exit_code == 2
    assert "safetensors" in result.stderr


def test_program_compiles_and_reports(tiny_file: Path) -> None:
    limits = ("--max-num-seqs", "1", "--max-num-batched-tokens", "8")
    data = data_of("program", str(tiny_file), *limits)
    assert (data["spec"], data["weights"], data["recompilations"]) == ("tiny", "random", 0)
    # prepare, embed, two regions a sublayer, head, settle.
    calls = {"greedy": 8, "sample": 8}
    sizes = (("prefill", 8, 0, calls), ("decode", 1, 1, calls), ("idle", 1, 1, {}))
    for found, (mode, tokens, width, count) in zip(data["programs"], sizes, strict=True):
        bucket = {"num_tokens": tokens, "num_reqs": 1, "tokens_per_req": width}
        assert found == {
            "mode": mode,
            **bucket,
            "stages": [{"mode": mode, **bucket, "repeat": 1}],
            "calls_per_step": count,
        }
    names = ["prepare", "embed", "head", "enter", "attention.swa", "ffn.routed"]
    names += ["greedy", "sample"]
    regions = [f"{p}.{n}" for p in ("prefill[8x1]", "decode[1x1]") for n in names]
    assert [r["name"] for r in data["regions"]] == [*regions, "idle[1x1].prepare"]
    for region in data["regions"]:
        assert (region["compilations"], region["graph_breaks"]) == (1, 0), region
        assert region["num_ops"] > 0
        assert region["seconds"] > 0


def test_program_tables() -> None:
    regions = [
        {"name": f"decode[1x1].{n}", "compilations": 1, "num_ops": 1500, "seconds": 0.25}
        for n in ("prepare", "head")
    ]
    data = {
        "spec": "tiny",
        "weights": "random",
        "regions": [{**r, "graph_breaks": 0} for r in regions],
        "programs": [
            {
                "mode": "decode",
                "num_tokens": 1,
                "num_reqs": 1,
                "calls_per_step": {"greedy": 9, "sample": 10},
            },
            {"mode": "idle", "num_tokens": 1, "num_reqs": 1, "calls_per_step": {}},
        ],
        "recompilations": 0,
    }
    table = explain_plan._region_table(data)
    assert list(table.columns[1].cells) == ["1", "1", "2"]
    assert list(table.columns[2].cells) == ["1,500", "1,500", "3,000"]
    assert list(table.columns[3].cells) == ["0.25", "0.25", "0.50"]
    table = explain_plan._program_table(data)
    rows = list(zip(*(c.cells for c in table.columns), strict=True))
    assert rows == [("decode", "1", "1", "9", "10"), ("idle", "1", "1", "-", "-")]
    assert "recompilations after warm-up: 0" in str(table.caption)


def test_plan_and_modes_import_no_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom v4graph.cli.main import app\n"
        "for command in ('plan', 'modes'):\n"
        "    assert CliRunner().invoke(app, ['explain', command, 'v4-nano']).exit_code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
