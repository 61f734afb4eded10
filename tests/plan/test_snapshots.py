"""Plans and accounts of the shipped specs, as files: a change of one shows in a review.

`V4GRAPH_WRITE_SNAPSHOTS=1 pytest tests/plan/test_snapshots.py` writes them anew.
"""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from v4graph.plan.cache import cache_account
from v4graph.plan.lower import lower
from v4graph.plan.types import Limits
from v4graph.plan.weight_totals import weight_totals
from v4graph.spec.load import load_spec, shipped_specs
from v4graph.spec.model import ModelSpec

SNAPSHOTS = Path(__file__).parent / "snapshots"
WRITE = "V4GRAPH_WRITE_SNAPSHOTS"


def _compare(name: str, value: Any) -> None:
    text = json.dumps(value, indent=1, sort_keys=True) + "\n"
    path = SNAPSHOTS / f"{name}.json"
    if os.environ.get(WRITE):
        SNAPSHOTS.mkdir(exist_ok=True)
        path.write_text(text)
        return
    old = path.read_text() if path.is_file() else ""
    if text != old:
        lines = difflib.unified_diff(
            old.splitlines(), text.splitlines(), path.name, "now", lineterm="", n=2
        )
        pytest.fail(f"{path.name} differs; if that is meant, set {WRITE}=1\n" + "\n".join(lines))


def _account(spec: ModelSpec, num_draft_tokens: int) -> dict[str, Any]:
    account = cache_account(spec, spec.max_position_embeddings, num_draft_tokens=num_draft_tokens)
    totals = {
        "bytes_per_token": account.bytes_per_token,
        "kv_bytes": account.kv_bytes,
        "sequence_bytes": account.sequence_bytes,
        "sequence_page_bytes": account.sequence_page_bytes,
    }
    return {**asdict(account), "totals": totals}


def test_plan_of_v4_nano() -> None:
    _compare("v4-nano.plan", lower(load_spec("v4-nano"), Limits()).to_json())


@pytest.mark.parametrize("name", shipped_specs())
def test_account(name: str) -> None:
    spec = load_spec(name)
    value = {
        "weights": asdict(weight_totals(spec)),
        "cache": _account(spec, 0),
        "cache, 3 drafts a round": _account(spec, 3),
    }
    _compare(f"{name}.account", value)


def test_no_snapshot_is_left_over() -> None:
    known = {f"{name}.account.json" for name in shipped_specs()} | {"v4-nano.plan.json"}
    assert {p.name for p in SNAPSHOTS.glob("*.json")} == known
