"""Planting faults in the prepare stages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from v4graph.plan.types import Bucket, Mode, Plan
from v4graph.program import stage as stage_module
from v4graph.program.prepare import prepare

Tensors = dict[str, Tensor]
TABLES = Path(__file__).parents[2] / "docs" / "staleness.md"


@dataclass
class Preparation:
    """One call of `prepare`, for a mutant to run as it is, changed, or not at all."""

    plan: Plan
    mode: Mode
    bucket: Bucket
    table: Tensors
    freqs: Tensors
    host: Tensors
    buf: Tensors
    layer: int = 0

    def run(self, *, table: Tensors | None = None, host: Tensors | None = None) -> None:
        """The real stage, on other inputs where given."""
        prepare(
            self.plan,
            self.mode,
            self.bucket,
            {**self.table, **(table or {})},
            self.freqs,
            {**self.host, **(host or {})},
            self.buf,
            self.layer,
        )


Mutant = Callable[[Preparation], None]


def plant(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Every stage built from here on prepares through `mutant`."""

    def mutated(*args: Any) -> None:
        mutant(Preparation(*args))

    monkeypatch.setattr(stage_module, "prepare", mutated)


class Stale:
    """The buffers of the previous step are used again; with `stamped`, under a new stamp."""

    def __init__(self, stamped: bool) -> None:
        self.stamped = stamped
        self.old: dict[tuple[Mode, Bucket], Tensors] = {}

    def __call__(self, p: Preparation) -> None:
        p.run()
        mine = {k: v.clone() for k, v in p.buf.items()}
        for name, values in self.old.get((p.mode, p.bucket), {}).items():
            if not (self.stamped and name == "stamp"):
                p.buf[name].copy_(values)
        self.old[p.mode, p.bucket] = mine


class StaleBuffer:
    """One buffer keeps what the previous step of its mode and bucket wrote."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.old: dict[tuple[Mode, Bucket], Tensor] = {}

    def __call__(self, p: Preparation) -> None:
        p.run()
        if self.name in p.buf:
            mine = p.buf[self.name].clone()
            p.buf[self.name].copy_(self.old.get((p.mode, p.bucket), mine))
            self.old[p.mode, p.bucket] = mine


def forgets(name: str) -> Mutant:
    """The stage leaves one buffer as it was."""

    def mutant(p: Preparation) -> None:
        before = p.buf[name].clone() if name in p.buf else None
        p.run()
        if before is not None:
            p.buf[name].copy_(before)

    return mutant


def edits(name: str, edit: Callable[[Tensor, Preparation], Tensor]) -> Mutant:
    """One buffer is changed after the stage."""

    def mutant(p: Preparation) -> None:
        p.run()
        if name in p.buf:
            p.buf[name].copy_(edit(p.buf[name].clone(), p))

    return mutant


def swapped_slots(p: Preparation) -> None:
    """The first two requests' rows of the table are exchanged, their token counts are not."""
    slots = p.host["slots"].clone()
    slots[:2] = slots[:2].flip(0)
    p.run(host={"slots": slots})


def swapped_pages(p: Preparation, group: str) -> None:
    """The first two requests' pages of one group are exchanged."""
    key = f"block_table.{group}"
    wrong, live = p.table[key].clone(), p.host["slots"][:2]
    wrong[live] = wrong[live.flip(0)]
    p.run(table={key: wrong})


def staleness_table(section: str, caught: Mapping[tuple[str, str], str], least: int) -> None:
    """Check a section of docs/staleness.md; with `V4GRAPH_WRITE_SNAPSHOTS=1` write it first.

    Args:
        caught: who caught each (mode, mutant). least: fewest mutants that the section must list.
    """
    text = TABLES.read_text(encoding="utf-8")
    found = re.search(rf"(?ms)^## {section}\n.*?(?=^## |\Z)", text)
    assert found is not None
    if os.environ.get("V4GRAPH_WRITE_SNAPSHOTS"):
        head = found[0].partition("| mode |")[0].rstrip()
        lines = [f"| {mode} | {what} | {by} |" for (mode, what), by in sorted(caught.items())]
        new = "\n".join([head, "", "| mode | mutant | caught by |", "|---|---|---|", *lines])
        text = text.replace(found[0], new + "\n\n").rstrip() + "\n"
        TABLES.write_text(text, encoding="utf-8")
        found = re.search(rf"(?ms)^## {section}\n.*?(?=^## |\Z)", text)
        assert found is not None
    assert found[0].count("\n| ") > least
    assert "| nobody |" not in found[0]
