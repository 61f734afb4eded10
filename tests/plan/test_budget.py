"""The memory account adds up, plans fit what is free, and draft layers count."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import ceil

import pytest
from typer.testing import CliRunner

from tests.support.tiny import Tiny
from v4graph.cli.main import app
from v4graph.cli.options import num_bytes
from v4graph.errors import PlanError
from v4graph.plan.budget import budget, fit, total, without_draft_groups
from v4graph.plan.lower import lower
from v4graph.plan.types import Limits
from v4graph.plan.weights import inventory
from v4graph.spec.load import load_spec
from v4graph.spec.model import ModelSpec

SPEC = Tiny(max_len=512).spec()
LIMITS = Limits(max_num_seqs=4, speculative="mtp", num_draft_tokens=3)


def test_lines_are_what_the_plan_allocates() -> None:
    plan = lower(SPEC, LIMITS)
    lines = budget(SPEC, plan)
    pages = {line.name: line.num_bytes for line in lines if line.part == "pages"}
    for g in plan.groups:
        mine = pages[f"{g.name}, target"] + pages.get(f"{g.name}, draft", 0)
        assert mine == g.num_pages * g.page_bytes
    assert pages["window, draft"] == plan.group("window").num_pages * (
        plan.group("window").draft_page_bytes
    )
    assert total(lines) == sum(line.num_bytes for line in lines)
    assert {line.part for line in lines} == {"weights", "pages", "table", "buffers", "work"}


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_rings_are_explained_row_by_row(k: int, overlap: bool) -> None:
    limits = Limits(
        max_num_seqs=2,
        max_num_batched_tokens=1,
        speculative="mtp",
        num_draft_tokens=k,
        overlap=overlap,
    )
    lines = {line.name: line.note for line in budget(SPEC, lower(SPEC, limits))}
    width = k + 1 + (k if overlap else 0)
    guesses = f" + {k - 1} guesses" if k > 1 else ""
    assert f"15 tokens behind a query + a step of {width}{guesses}" in lines["window, draft"]
    assert lines["csa_state, target"].endswith(f"7 tokens behind a query + a step of {width}")


def test_a_plan_fits_what_is_free() -> None:
    full = lower(SPEC, LIMITS)
    lines = budget(SPEC, full)
    everything = int(total(lines) / 0.9) + 1
    assert fit(SPEC, LIMITS, everything) == full
    history = sum(g.num_pages * g.page_bytes for g in full.groups if not g.kept_tokens)
    for share in (0.2, 0.5):
        free = everything - int(history * share)
        plan = fit(SPEC, LIMITS, free)
        assert total(budget(SPEC, plan)) <= 0.9 * free
        assert sum(g.num_pages for g in plan.groups) < sum(g.num_pages for g in full.groups)
    with pytest.raises(PlanError, match=r"alone need [\d,]+"):
        fit(SPEC, LIMITS, 1000)
    fixed = total(lines) - total(lines, "pages")
    with pytest.raises(PlanError, match="one sequence of 512 tokens"):
        fit(SPEC, LIMITS, int((fixed + 100) / 0.9) + 1)


def test_given_memory_is_taken_as_it_is_or_refused() -> None:
    pools = sum(g.num_pages * g.page_bytes for g in lower(SPEC, LIMITS).groups)
    limits = replace(LIMITS, kv_memory_bytes=pools * 9 // 10)
    plan = lower(SPEC, limits)
    lines = budget(SPEC, plan)
    enough = ceil(total(lines) / 0.9)
    assert fit(SPEC, limits, enough) == plan
    with pytest.raises(PlanError) as fault:
        fit(SPEC, limits, enough - 10)
    message = str(fault.value)
    for part in ("weights", "page pools", "request table", "static buffers", "activations"):
        assert re.search(rf"\b{part} [\d,]+", message), part
    assert f"together need {total(lines):,}" in message
    assert "kv_memory_bytes (--kv-memory)" in message
    room = re.search(r"--kv-memory\) to ([\d,]+)", message)
    assert room is not None
    less = replace(limits, kv_memory_bytes=int(room[1].replace(",", "")))
    assert total(budget(SPEC, fit(SPEC, less, enough - 10))) <= 0.9 * (enough - 10)


def test_draft_weights_count_where_they_run() -> None:
    """A mode without draft layers leaves them in the checkpoint; a short chain, its tail."""
    data = Tiny(max_len=512).data()
    data["speculative"]["mtp"]["num_layers"] = 3
    chain = ModelSpec.model_validate(data)
    size = {t.name: t.num_bytes for t in inventory(chain)}
    draft = [sum(b for n, b in size.items() if n.startswith(f"mtp.{i}.")) for i in range(3)]
    main = sum(size.values()) - sum(draft)
    for stored in (False, True):
        limits = Limits(max_num_seqs=4, stored_weights=stored)

        def weights(limits: Limits) -> int:
            return total(budget(chain, lower(chain, limits)), "weights")

        none = weights(replace(limits, speculative="none"))
        one, two, three, eight = (
            weights(replace(limits, speculative="mtp", num_draft_tokens=k)) for k in (1, 2, 3, 8)
        )
        assert none < one < two < three == eight
        if stored:
            assert [none, one - none, two - one, three - two] == [main, *draft]


def test_leaving_out_the_draft_layers_overcommits() -> None:
    """The public fault: pools sized for the target alone, draft pools allocated on top."""
    pools = sum(g.num_pages * g.page_bytes for g in lower(SPEC, LIMITS).groups)
    for memory in (0, pools * 9 // 10):
        limits = Limits(
            max_num_seqs=4, speculative="mtp", num_draft_tokens=3, kv_memory_bytes=memory
        )
        plan = lower(SPEC, limits)
        honest = sum(g.num_pages * g.page_bytes for g in plan.groups)
        blind = without_draft_groups(SPEC, plan)
        assert honest <= (memory or pools)
        assert blind.promised_bytes <= (memory or pools)
        assert blind.num_bytes > 0
        # With memory for every sequence there is nothing to gain by forgetting them.
        assert memory == 0 or blind.pool_bytes > memory
    none = lower(SPEC, Limits(max_num_seqs=4, speculative="none"))
    assert without_draft_groups(SPEC, none).num_bytes == 0


def test_the_command() -> None:
    arguments = ["explain", "budget", "v4-nano", "--num-draft-tokens", "3"]
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    data = json.loads(result.stdout)
    plan = lower(load_spec("v4-nano"), Limits(num_draft_tokens=3))
    assert data["page_bytes"] == sum(g.num_pages * g.page_bytes for g in plan.groups)
    assert data["total_bytes"] == sum(line["num_bytes"] for line in data["lines"])
    assert data["without_draft_groups"]["overcommit_bytes"] > 0
    assert data["fits"][-1] == {"num_tokens": 8192, "num_seqs": 8}
    text = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert "window, draft" in text
    assert "too many" in text
    small = CliRunner().invoke(app, [*arguments, "--free", "1MiB"])
    assert small.exit_code == 2
    assert "1,048,576 bytes are free" in small.stderr
    for free, message in (("200MB", "alone need 196,"), ("230MB", "page pools 19,")):
        given = CliRunner().invoke(app, [*arguments, "--free", free, "--kv-memory", "20MB"])
        assert (given.exit_code, given.stdout) == (2, "")
        assert message in given.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("512MiB", 2**29), ("3.5GB", 3_500_000_000), ("2 kB", 2000), ("1Ti", 2**40)],
)
def test_sizes(text: str, size: int) -> None:
    assert num_bytes("--x", text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1QB", "1e9"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(PlanError, match="--x"):
        num_bytes("--x", text)
