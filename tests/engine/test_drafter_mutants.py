"""Stages of DSpark and of chained MTP layers with broken metadata: as `test_round_mutants.py`.

Checked mode, the tokens and the recompute of the drafts must tell every fault; docs/staleness.md
lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from tests.engine import test_dspark as dspark
from tests.support import chain
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
from v4graph.model.rounds import RoundOracle
from v4graph.plan.types import Mode

NEW = 16
Caught = dict[tuple[str, str], str]


@dataclass(frozen=True)
class Drafter:
    """A speculative mode on a tiny model, the stages that are broken, and who caught what."""

    stages: tuple[Mode, ...]
    engine: Callable[[int | None], LLMEngine]
    """By number of drafts: 0 for none, None for the mode's own."""
    oracle: Callable[[], RoundOracle]
    prompts: dict[str, list[int]]
    same: frozenset[tuple[Mode, str]]
    """Buffers that change nothing when they are left over; unwritten, they are told."""
    caught: Caught = field(default_factory=dict)

    def tokens(self) -> dict[str, list[int]]:
        """Greedy tokens without speculation."""
        return run(self.engine(0), self.prompts, greedy(NEW)).tokens


DRAFTERS = {
    "DSpark": Drafter(
        (Mode.DRAFT_EXTEND, Mode.DRAFT_DECODE),
        lambda k: dspark.engine(k=k, overlap=False),
        lambda: dspark.oracle(dspark.TINY),
        {name: dspark.prompts()[name] for name in ("3", "17", "33")},
        # Rows are rotated by `rope.*`, and context rows are made of features, not of tokens.
        frozenset(
            {
                *((mode, "is_valid_token") for mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_DECODE)),
                *((mode, "positions") for mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_DECODE)),
                (Mode.DRAFT_EXTEND, "input_ids"),
            }
        ),
    ),
    "Chains of MTP layers": Drafter(
        (Mode.DRAFT_CHAIN,),
        lambda k: chain.engine(3, 4 if k is None else k, overlap=False),
        lambda: chain.oracle(3),
        chain.prompts(3, 9, 26),
        frozenset({(Mode.DRAFT_CHAIN, "is_valid_token")}),
    ),
}


def buffers() -> Iterator[tuple[str, Mode, str]]:
    for name, drafter in DRAFTERS.items():
        programs = drafter.engine(None).programs.programs.values()
        for mode in drafter.stages:
            stage = next(s for p in programs for s in p.stages if s.mode is mode)
            yield from ((name, mode, b.name) for b in stage.buffer_plans if b.name != "stamp")


BUFFERS = list(buffers())
STAGES = [(name, mode) for name, drafter in DRAFTERS.items() for mode in drafter.stages]


def caught_by(drafter: Drafter, tokens: dict[str, list[int]]) -> str | None:
    try:
        session = run(drafter.engine(None), drafter.prompts, greedy(NEW))
    except (ProgramError, IntegrityError):
        return "checks"
    if session.tokens != tokens:
        return "tokens"
    return "drafts" if session.differences(drafter.oracle()) else None


def check(
    monkeypatch: pytest.MonkeyPatch, name: str, what: str, mutant: Mutant, mode: Mode
) -> None:
    def mutated(p: Preparation) -> None:
        if p.mode is mode and int(p.host["step"]) > 0:
            mutant(p)
        else:
            p.run()

    drafter = DRAFTERS[name]
    tokens = drafter.tokens()  # by an honest engine
    plant(monkeypatch, mutated)
    by = caught_by(drafter, tokens)
    drafter.caught[mode.value, what] = by or "nobody"
    assert by is not None, f"{mode}: {what} went unnoticed"


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_honest_engine_passes(name: str) -> None:
    drafter = DRAFTERS[name]
    assert caught_by(drafter, drafter.tokens()) is None


@pytest.mark.parametrize(("name", "mode", "buffer"), BUFFERS)
def test_a_buffer_that_is_not_written(
    name: str, mode: Mode, buffer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, name, f"{buffer}: not written", forgets(buffer), mode)


@pytest.mark.parametrize(
    ("name", "mode", "buffer"), [b for b in BUFFERS if b[1:] not in DRAFTERS[b[0]].same]
)
def test_a_buffer_of_the_step_before(
    name: str, mode: Mode, buffer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, name, f"{buffer}: of the step before", StaleBuffer(buffer), mode)


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
@pytest.mark.parametrize(("name", "mode"), STAGES)
def test_a_stage(name: str, mode: Mode, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, name, what, WHOLE[what](), mode)


def test_rows_of_the_full_verify_width(monkeypatch: pytest.MonkeyPatch) -> None:
    what = "rows of the full verify width"
    check(monkeypatch, "DSpark", what, all_rows, Mode.DRAFT_EXTEND)


def test_a_window_that_ends_at_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block's first row counted as part of the window, as a decoder's own row is."""

    def short(slots: torch.Tensor, p: Preparation) -> torch.Tensor:
        slots[:, 0] = -1
        return slots

    mutant = edits("window.read_slots", short)
    check(monkeypatch, "DSpark", "window: one row short", mutant, Mode.DRAFT_DECODE)


def test_streams_of_the_neighbouring_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer takes the streams of one row further, as if all layers began at the same row."""

    def neighbour(rows: torch.Tensor, p: Preparation) -> torch.Tensor:
        return rows.roll(-1)

    mutant = edits("stream_rows", neighbour)
    what = "stream_rows: of the row behind"
    check(monkeypatch, "Chains of MTP layers", what, mutant, Mode.DRAFT_CHAIN)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_table_is_written_on_request(name: str) -> None:
    """Runs last; without the variable it only checks that the committed table is there."""
    staleness_table(name, DRAFTERS[name].caught, least=20)
