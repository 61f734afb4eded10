"""DSpark's two stages with broken metadata: as `test_round_mutants.py`, whose table has them too.

Checked mode, the tokens and the recompute of the drafts must tell every fault.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.engine.test_dspark import TINY, engine, oracle, plain, prompts
from tests.support.mutants import (
    Mutant,
    Preparation,
    Stale,
    StaleBuffer,
    edits,
    forgets,
    plant,
    staleness_table,
    swapped_pages,
    swapped_slots,
)
from tests.support.speculation import greedy, run
from v4graph.engine.engine import LLMEngine
from v4graph.engine.pools import IntegrityError
from v4graph.errors import ProgramError
from v4graph.plan.types import Mode

NAMES, NEW = ("3", "17", "33"), 16
STAGES = (Mode.DRAFT_EXTEND, Mode.DRAFT_DECODE)
caught: dict[tuple[str, str], str] = {}


def small() -> LLMEngine:
    return engine(overlap=False)


def buffers() -> Iterator[tuple[Mode, str]]:
    programs = small().programs.programs.values()
    for mode in STAGES:
        stage = next(s for p in programs for s in p.stages if s.mode is mode)
        yield from ((mode, b.name) for b in stage.buffer_plans if b.name != "stamp")


BUFFERS = list(buffers())
SAME = {
    *((mode, "is_valid_token") for mode in STAGES),
    (Mode.DRAFT_EXTEND, "input_ids"),
    (Mode.DRAFT_EXTEND, "positions"),
    (Mode.DRAFT_DECODE, "positions"),
}
"""No region of these stages reads them, so that what is left over changes nothing; unwritten, it is
told. Rows are rotated by `rope.*`, and context rows are made of features, not of tokens."""


def caught_by(llm: LLMEngine) -> str | None:
    try:
        session = run(llm, {name: prompts()[name] for name in NAMES}, greedy(NEW))
    except (ProgramError, IntegrityError):
        return "checks"
    if any(tokens != plain(TINY)[name][:NEW] for name, tokens in session.tokens.items()):
        return "tokens"
    return "drafts" if session.differences(oracle(TINY)) else None


def check(monkeypatch: pytest.MonkeyPatch, what: str, mutant: Mutant, mode: Mode) -> None:
    def mutated(p: Preparation) -> None:
        if p.mode is mode and int(p.host["step"]) > 0:
            mutant(p)
        else:
            p.run()

    plain(TINY)  # by an honest engine
    plant(monkeypatch, mutated)
    by = caught_by(small())
    caught[f"dspark {mode.value}", what] = by or "nobody"
    assert by is not None, f"{mode}: {what} went unnoticed"


def test_an_honest_engine_passes() -> None:
    assert caught_by(small()) is None


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


def skipped(p: Preparation) -> None:
    """Nothing is prepared."""


def late_table(p: Preparation) -> None:
    """Lengths as they were one token ago."""
    names = ("num_computed_tokens", "num_tokens")
    p.run(table={name: (p.table[name] - 1).clamp_min(0) for name in names})


def without_tables(p: Preparation) -> None:
    """Every page is the null page."""
    p.run(table={n: torch.zeros_like(t) for n, t in p.table.items() if "block_table" in n})


def all_rows(p: Preparation) -> None:
    """Context rows of rejected drafts are written too, and count as committed."""
    slots = p.host["slots"]
    wide = p.table["num_committed"].clone()
    wide[slots] = p.host["query_lens"]
    p.run(table={"num_committed": wide})


WHOLE = {
    "skipped": lambda: skipped,
    "two requests swapped": lambda: swapped_slots,
    "of the step before": lambda: Stale(False),
    "of the step before, newly stamped": lambda: Stale(True),
    "lengths of one token ago": lambda: late_table,
    "without group tables": lambda: without_tables,
    "window: pages swapped": lambda: lambda p: swapped_pages(p, "window"),
}


@pytest.mark.parametrize("what", WHOLE)
@pytest.mark.parametrize("mode", STAGES)
def test_a_stage(mode: Mode, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, what, WHOLE[what](), mode)


def test_rows_of_the_full_verify_width(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, "rows of the full verify width", all_rows, Mode.DRAFT_EXTEND)


def test_a_window_that_ends_at_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's first row counted as part of the window, as a decoder's own row is."""

    def short(slots: torch.Tensor, p: Preparation) -> torch.Tensor:
        slots[:, 0] = -1
        return slots

    mutant = edits("window.read_slots", short)
    check(monkeypatch, "window: one row short", mutant, Mode.DRAFT_DECODE)


def test_the_table_is_written_on_request() -> None:
    """Runs last; without the variable it only checks that the committed table is there."""
    staleness_table("DSpark", caught, least=25)
