"""Staleness cannot hide: every prepare stage of a round is broken on purpose, and each fault must
be told by the checks, the rows, the tokens or the recompute of the drafts.

`V4GRAPH_WRITE_SNAPSHOTS=1` writes docs/staleness.md: the mutants, and who caught them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.betrayal import K, betrayed, buffer_names, caught_by, engine
from tests.support.mutants import (
    Mutant,
    Preparation,
    Stale,
    StaleBuffer,
    edits,
    forgets,
    staleness_table,
    swapped_pages,
    swapped_slots,
)
from v4graph.engine import engine as engine_module
from v4graph.plan.lower import lower
from v4graph.plan.types import Limits, Mode, Plan
from v4graph.spec.model import ModelSpec

ROUND = (Mode.PREFILL, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND, Mode.DRAFT_DECODE)
BUFFERS = [(mode, name) for mode in ROUND for name in buffer_names(engine(K), mode)]
GROUPS = [
    (mode, name.removesuffix(".slot_mapping"))
    for mode, name in BUFFERS
    if name.endswith(".slot_mapping")
]
SAME = {(mode, "is_valid_token") for mode in ROUND} | {
    (Mode.DRAFT_DECODE, "logits_rows"),
    (Mode.DRAFT_DECODE, "positions"),
}
"""Left over they change nothing: no region of this version reads the first (unwritten, it is told);
the second is the same in every step; the third is compared with 0, where no guess ever sits."""
caught: dict[tuple[str, str], str] = {}


def check(monkeypatch: pytest.MonkeyPatch, what: str, mutant: Mutant, mode: Mode | None) -> None:
    by = betrayed(monkeypatch, mutant, mode)
    caught[mode.value if mode else "all", what] = by or "nobody"
    assert by is not None, f"{mode}: {what} went unnoticed"


def test_an_honest_engine_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert betrayed(monkeypatch, lambda p: p.run(), None) is None


# Single buffers --------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "name"), BUFFERS)
def test_a_buffer_that_is_not_written(
    mode: Mode, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, f"{name}: not written", forgets(name), mode)


@pytest.mark.parametrize(("mode", "name"), [b for b in BUFFERS if b not in SAME])
def test_a_buffer_of_the_step_before(
    mode: Mode, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, f"{name}: of the step before", StaleBuffer(name), mode)


# Whole stages --------------------------------------------------------------------------------


def skipped(p: Preparation) -> None:
    """Nothing is prepared."""


def late_table(p: Preparation) -> None:
    """Lengths as they were one token ago."""
    lengths = {
        name: (p.table[name] - 1).clamp_min(0) for name in ("num_computed_tokens", "num_tokens")
    }
    p.run(table=lengths)


WHOLE = {
    "skipped": lambda: skipped,
    "two requests swapped": lambda: swapped_slots,
    "of the step before": lambda: Stale(False),
    "of the step before, newly stamped": lambda: Stale(True),
    "lengths of one token ago": lambda: late_table,
}


@pytest.mark.parametrize("what", WHOLE)
@pytest.mark.parametrize("mode", ROUND)
def test_a_stage(mode: Mode, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, what, WHOLE[what](), mode)


@pytest.mark.parametrize(("mode", "group"), GROUPS)
def test_two_requests_pages_swapped(
    mode: Mode, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, f"{group}: pages swapped", lambda p: swapped_pages(p, group), mode)


# What went stale in the engine of the public bug --------------------------------------------------


def without_tables(p: Preparation) -> None:
    """Draft replay without the group's tables: every page the null page."""
    p.run(table={n: torch.zeros_like(t) for n, t in p.table.items() if "block_table" in n})


class LeftFromPrefill:
    """A buffer keeps the first rows of what the last prefill wrote."""

    def __init__(self, name: str) -> None:
        self.name, self.left = name, None

    def __call__(self, p: Preparation) -> None:
        p.run()
        mine = p.buf.get(self.name)
        if mine is None:
            return
        # The draft layer's stage over a prompt has the prompt's token count.
        if p.mode is Mode.PREFILL or (p.mode is Mode.DRAFT_EXTEND and not p.bucket.tokens_per_req):
            self.left = mine.clone()
        elif self.left is not None and p.mode in (Mode.TARGET_VERIFY, Mode.DRAFT_DECODE):
            rows = min(len(mine), len(self.left))
            mine[:rows] = self.left[:rows]


def full_width(p: Preparation) -> None:
    """Draft-extend over all rows of the verification, accepted or not."""
    slots = p.host["slots"]
    wide = p.table["num_committed"].clone()
    wide[slots] = torch.where(p.host["query_lens"] > 0, K + 1, 0)
    p.run(table={"num_committed": wide})


def one_slot(slots: Tensor, p: Preparation) -> Tensor:
    """A slot mapping of one row a request: its other rows go where the first goes."""
    width = p.bucket.tokens_per_req or 1
    return slots.unflatten(0, (-1, width))[:, :1].expand(-1, width).flatten()


def live_padding(slots: Tensor, p: Preparation) -> Tensor:
    """Padded rows write to the first request's row."""
    return torch.where(p.buf["is_valid_token"], slots, slots[0])


def unmasked(slots: Tensor, p: Preparation) -> Tensor:
    """Invalid rows are read as row 0."""
    return slots.clamp_min(0)


PUBLIC: dict[str, tuple[Mutant, Mode | None]] = {
    "draft-extend without group tables": (without_tables, Mode.DRAFT_EXTEND),
    "draft-decode without group tables": (without_tables, Mode.DRAFT_DECODE),
    "draft-decode slots left from prefill": (LeftFromPrefill("window.slot_mapping"), None),
    "draft-decode window left from prefill": (LeftFromPrefill("window.read_slots"), None),
    "indexer lengths left from prefill": (LeftFromPrefill("csa_index.num_entries"), None),
    "draft lengths of the full verify width": (full_width, Mode.DRAFT_EXTEND),
    "verify slots of one row a request": (
        edits("window.slot_mapping", one_slot),
        Mode.TARGET_VERIFY,
    ),
    "draft-extend slots of one row a request": (
        edits("window.slot_mapping", one_slot),
        Mode.DRAFT_EXTEND,
    ),
    "verify padding onto a live row": (
        edits("window.slot_mapping", live_padding),
        Mode.TARGET_VERIFY,
    ),
    "draft-decode padding onto a live row": (
        edits("window.slot_mapping", live_padding),
        Mode.DRAFT_DECODE,
    ),
    "verify window unmasked": (edits("window.read_slots", unmasked), Mode.TARGET_VERIFY),
    "draft-decode window unmasked": (edits("window.read_slots", unmasked), Mode.DRAFT_DECODE),
}


@pytest.mark.parametrize("what", PUBLIC)
def test_faults_of_the_public_bug(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, what, *PUBLIC[what])


def test_page_tables_without_draft_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses behind the last page are lost: their rows go to the null page."""

    def short(spec: ModelSpec, limits: Limits) -> Plan:
        plan = lower(spec, limits)
        return replace(plan, groups=tuple(replace(g, draft_ahead=0) for g in plan.groups))

    monkeypatch.setattr(engine_module, "lower", short)
    by = caught_by(engine(K), every=1)
    caught["all", "page tables without draft look-ahead"] = by or "nobody"
    assert by is not None


def test_warming_up_between_rounds_changes_nothing() -> None:
    """Warm-up writes the metadata that later rounds read: they must write it again."""
    llm = engine(K)
    step = llm.step

    def disturbed() -> list[object]:
        for program in llm.programs.programs.values():
            program.warm_up()
        return list(step())

    llm.step = disturbed  # type: ignore[method-assign,assignment]
    assert caught_by(llm) is None


def test_the_table_is_written_on_request() -> None:
    """Runs last; without the variable it only checks that the committed table is there."""
    staleness_table("MTP", caught, least=150)
