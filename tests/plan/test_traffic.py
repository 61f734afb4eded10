"""The floor of a round: what it must read, counted from the plan."""

from __future__ import annotations

import pytest

from v4graph.plan.lower import lower
from v4graph.plan.traffic import experts_touched, round_traffic
from v4graph.plan.types import Limits, Plan
from v4graph.plan.weights import main_inventory
from v4graph.spec.load import load_spec
from v4graph.spec.model import ModelSpec

BATCHES = (1, 8, 32, 64, 128)


def planned(name: str, k: int = 0) -> tuple[ModelSpec, Plan]:
    spec = load_spec(name)
    limits = Limits(
        max_num_seqs=128,
        max_model_len=2048,
        decode_buckets=BATCHES,
        speculative="mtp" if k else "none",
        num_draft_tokens=k,
    )
    return spec, lower(spec, limits)


def parts(name: str, batch: int, context: int, k: int = 0) -> dict[str, int]:
    spec, plan = planned(name, k)
    return {line.part: line.num_bytes for line in round_traffic(spec, plan, batch, context)}


def test_experts_touched() -> None:
    assert experts_touched(256, 6, 1) == pytest.approx(6)
    assert experts_touched(256, 6, 128) == pytest.approx(243.7, abs=0.01)
    assert experts_touched(4, 4, 1) == 4


@pytest.mark.parametrize(
    ("name", "ms"),
    [
        ("flash-slice8", (0.69, 1.65, 3.97, 5.59, 6.71)),
        ("flash-slice24", (1.58, 4.48, 11.45, 16.29, 19.66)),
    ],
)
def test_floors_of_the_slices(name: str, ms: tuple[float, ...]) -> None:
    """Milliseconds at 4.245 TB/s and 1,024 tokens of context, as worked out elsewhere."""
    for batch, expected in zip(BATCHES, ms, strict=True):
        size = sum(parts(name, batch, 1024).values())
        assert size / 4.245e9 == pytest.approx(expected, abs=0.006)


def test_a_batch_that_touches_everything_reads_the_main_model() -> None:
    """All of it but the embedding, hash tables and what is read per request."""
    spec, _ = planned("flash-slice8")
    stored = sum(
        e.num_bytes for e in main_inventory(spec) if e.dtype != "I64" and e.name != "embed.weight"
    )
    found = parts("flash-slice8", 128, 1024)
    read = sum(size for part, size in found.items() if not part.startswith(("rows", "embed")))
    top = sum(e.num_bytes for e in main_inventory(spec) if e.name.startswith(("hc_head", "norm")))
    untouched = 1 - experts_touched(256, 6, 128) / 256
    experts = sum(e.num_bytes for e in main_inventory(spec) if ".ffn.experts." in e.name)
    assert read == pytest.approx(stored - top - untouched * experts, rel=1e-9)


def test_rows_are_counted_once_a_request_and_no_further_than_they_reach() -> None:
    short, long = parts("flash-slice8", 2, 100), parts("flash-slice8", 2, 100_000)
    row = 37_440 // 64
    assert short["rows.window"] == 2 * 8 * 100 * row
    assert long["rows.window"] == 2 * 8 * 128 * row
    assert short["rows.csa_kv"] == 2 * 3 * 25 * row
    assert long["rows.csa_kv"] == 2 * 3 * 512 * row
    assert long["rows.csa_index"] == 2 * 3 * 25_000 * 132


def test_draft_layers_are_read_once_a_stage() -> None:
    one, three = parts("flash-slice8", 1, 100, 1), parts("flash-slice8", 1, 100, 3)
    assert three["mtp.head"] == 3 * one["mtp.head"] == 3 * one["head"]
    assert three["mtp.attention.swa"] == 3 * one["mtp.attention.swa"]
    assert three["attention.swa"] == one["attention.swa"]
