"""Faults planted in the prepare stage: checked mode or the oracle tells every one of them.

Each mutant is a bug that some engine once had: a stage skipped, a buffer left over from the step
before or from another request, a range off by one, padding that points at a live row.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.mutants import (
    Mutant,
    Preparation,
    Stale,
    StaleBuffer,
    edits,
    forgets,
    plant,
    swapped_pages,
    swapped_slots,
)
from tests.support.runner import Runner, relative_error
from tests.support.world import BOUND, small
from v4graph.errors import ProgramError
from v4graph.plan.buffers import buffers
from v4graph.plan.types import Bucket, Limits, Mode

LIMITS = Limits(
    max_num_seqs=3,
    max_num_batched_tokens=40,
    max_model_len=128,
    decode_buckets=(3,),
    prefill_buckets=((40, 3),),
)


def play() -> str | None:
    """Prefill in chunks and decode two requests side by side; what betrays a fault, if anything."""
    world = small()
    runner = Runner(world.spec, world.params, LIMITS)
    first, second = runner.add(world.ids(45, seed=1)), runner.add(world.ids(30, seed=2))
    prompts = {first: 45, second: 30}
    script = [
        (Mode.PREFILL, [(first, 21), (second, 5)]),
        (Mode.PREFILL, [(second, 11), (first, 17)]),
        (Mode.PREFILL, [(first, 7), (second, 14)]),
        *[(Mode.DECODE, [(second, 1), (first, 1)])] * 9,
    ]
    for mode, batch in script:
        before = {r: list(r.token_ids) for r, _ in batch}
        try:
            rows = runner.step(batch, mode)
        except ProgramError as fault:
            return f"checked mode: {fault}"
        for (request, _), row in zip(batch, rows, strict=True):
            at = request.num_computed_tokens
            if row.isnan().any():
                return "NaN logits"
            error = relative_error(row, world.oracle(before[request])[at - 1])
            if error > BOUND:
                return f"logits off by {error:.2g}"
            sampled = request.token_ids[len(before[request]) :]
            expected = [int(row.argmax())] if at >= prompts[request] else []
            if sampled != expected:
                return f"tokens {sampled}, expected {expected}"
        for request, _ in batch:
            table = runner.pages.table
            known = table.token_ids[request.slot, : request.num_tokens].tolist()
            if known != request.token_ids:
                return "the table holds other tokens"
    return None


def betrayed(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> str | None:
    plant(monkeypatch, mutant)
    return play()


def test_without_a_fault_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert betrayed(monkeypatch, lambda p: p.run()) is None


# Whole stages --------------------------------------------------------------------------------


def skipped(p: Preparation) -> None:
    """Prepare does not run at all."""


def late_lengths(p: Preparation) -> None:
    """Computed lengths are those of one step ago for requests that decode."""
    decoding = p.host["query_lens"] == 1
    lengths = p.table["num_computed_tokens"].clone()
    lengths[p.host["slots"][decoding]] -= 1
    p.run(table={"num_computed_tokens": lengths.clamp_min(0)})


@pytest.mark.parametrize(
    "mutant",
    [skipped, swapped_slots, Stale(False), Stale(True), late_lengths],
    ids=["skipped", "swapped slots", "stale", "stale but stamped", "late lengths"],
)
def test_faults_of_the_whole_stage(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert betrayed(monkeypatch, mutant)


def test_a_stale_stamp_is_told_by_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    told = betrayed(monkeypatch, Stale(False))
    assert told is not None
    assert "stamp [0, 1], expected [0, 2]" in told


# Single buffers ------------------------------------------------------------------------------

_RUNNER = Runner(small().spec, small().params, LIMITS)
NAMES = [
    b.name
    for b in buffers(_RUNNER.plan, Mode.PREFILL, Bucket(40, 3))
    if b.producer == "prepare" and b.name != "stamp"
]
UNREAD = {"is_valid_token"}
"""No region reads it, so that only being unwritten can show."""


@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_that_prepare_forgets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert betrayed(monkeypatch, forgets(name))


@pytest.mark.parametrize("name", [n for n in NAMES if n not in UNREAD])
def test_a_buffer_left_over_from_the_step_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert betrayed(monkeypatch, StaleBuffer(name))


def edits_of(name: str, edit: Callable[[Tensor, Preparation], Tensor]) -> tuple[str, Mutant]:
    return name, edits(name, edit)


def _live_padding(slots: Tensor, p: Preparation) -> Tensor:
    """Padded tokens write where the first token does."""
    return torch.where(p.buf["is_valid_token"], slots, slots[0])


def _unmasked(slots: Tensor, p: Preparation) -> Tensor:
    """A window that does not end where it should: one row more, the oldest again."""
    return torch.where(slots < 0, slots.max(), slots)


EDITS = {
    "positions late": edits_of("positions", lambda t, p: t + p.buf["is_valid_token"].long()),
    "ids shifted": edits_of("input_ids", lambda t, p: t.roll(1)),
    "logits of the row before": edits_of("logits_rows", lambda t, p: (t - 1).clamp_min(0)),
    "logits rows swapped": edits_of("logits_rows", lambda t, p: t[[1, 0, 2]]),
    "everything samples": edits_of("do_sample", lambda t, p: p.host["query_lens"] > 0),
    "nothing samples": edits_of("do_sample", lambda t, p: torch.zeros_like(t)),
    "padding on a live row": edits_of("window.slot_mapping", _live_padding),
    "window unmasked": edits_of("window.read_slots", _unmasked),
    "window short of its oldest row": edits_of(
        "window.read_slots", lambda t, p: torch.cat((torch.full_like(t[:, :1], -1), t[:, 1:]), 1)
    ),
    "window short of its newest row": edits_of(
        "window.read_slots", lambda t, p: torch.cat((t[:, :-1], torch.full_like(t[:, :1], -1)), 1)
    ),
    "window of the token before": edits_of("window.read_slots", lambda t, p: t.roll(1, 0)),
    "a compressed row too many": edits_of("csa_index.num_entries", lambda t, p: t + 1),
    "a compressed row too few": edits_of(
        "csa_index.num_entries", lambda t, p: (t - 1).clamp_min(0)
    ),
    "index rows of another token": edits_of("csa_index.read_slots", lambda t, p: t.flip(0)),
    "compressed rows of another token": edits_of("hca_kv.read_slots", lambda t, p: t.flip(0)),
    "closed rows one further": edits_of(
        "csa_kv.slot_mapping", lambda t, p: torch.where(t > 0, t + 1, t)
    ),
    "closed rows dropped": edits_of("hca_kv.slot_mapping", lambda t, p: torch.zeros_like(t)),
    "no slot means slot 0 of a live page": edits_of(
        "csa_kv.slot_mapping", lambda t, p: torch.where(t == 0, t.max(), t)
    ),
    "window start off": edits_of("closing_positions.4", lambda t, p: torch.where(t >= 0, t + 1, t)),
    "state rows shifted": edits_of("csa_state.read_slots", lambda t, p: t.roll(1, 1)),
    "state of the null row": edits_of("hca_state.slot_mapping", lambda t, p: torch.zeros_like(t)),
    "rope turned back": edits_of("rope.compress.sin", lambda t, p: -t),
}


@pytest.mark.parametrize("fault", EDITS)
def test_faults_of_one_buffer(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, mutant = EDITS[fault]
    assert name in NAMES
    assert betrayed(monkeypatch, mutant)


@pytest.mark.parametrize("group", [g.name for g in _RUNNER.plan.groups])
def test_another_requests_pages_in_one_group(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Reads and writes agree on the exchange until a page comes from before it.
    calls = 0

    def later(p: Preparation) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            swapped_pages(p, group)
        else:
            p.run()

    assert betrayed(monkeypatch, later)
