"""Faults planted in the prepare stage: checked mode or the oracle tells every one of them.

Each mutant is a bug that some engine once had: a stage skipped, a buffer left over from the step
before or from another request, a range off by one, padding that points at a live row.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.runner import Runner, relative_error
from tests.support.world import BOUND, small
from v4graph.errors import ProgramError
from v4graph.plan.buffers import buffers
from v4graph.plan.types import Bucket, Limits, Mode
from v4graph.program import step as step_module
from v4graph.program.prepare import prepare

Tensors = dict[str, Tensor]
Mutant = Callable[..., None]
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
    monkeypatch.setattr(step_module, "prepare", mutant)
    return play()


def test_without_a_fault_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert betrayed(monkeypatch, lambda *args: prepare(*args)) is None


# Whole stages --------------------------------------------------------------------------------


def skipped(plan: object, bucket: Bucket, table: Tensors, freqs: Tensors, buf: Tensors) -> None:
    """Prepare does not run at all."""


def swapped_slots(
    plan: object, bucket: Bucket, table: Tensors, freqs: Tensors, buf: Tensors
) -> None:
    """The two requests' rows of the table are exchanged, their token counts are not."""
    buf["slots"][:2] = buf["slots"][:2].flip(0)
    prepare(plan, bucket, table, freqs, buf)  # type: ignore[arg-type]


class Stale:
    """The buffers of the previous step are used again; with `stamped`, under a new stamp."""

    def __init__(self, stamped: bool) -> None:
        self.stamped, self.old = stamped, {}

    def __call__(
        self, plan: object, bucket: Bucket, table: Tensors, freqs: Tensors, buf: Tensors
    ) -> None:
        prepare(plan, bucket, table, freqs, buf)  # type: ignore[arg-type]
        mine = {k: v.clone() for k, v in buf.items() if k not in ("slots", "query_lens")}
        for name, values in self.old.get(bucket, {}).items():
            if name != "step_stamp" and not (self.stamped and name == "stamp"):
                buf[name].copy_(values)
        self.old[bucket] = mine


def late_lengths(
    plan: object, bucket: Bucket, table: Tensors, freqs: Tensors, buf: Tensors
) -> None:
    """Computed lengths are those of one step ago for requests that decode."""
    old = dict(table)
    decoding = buf["query_lens"] == 1
    lengths = table["num_computed_tokens"].clone()
    lengths[buf["slots"][decoding]] -= 1
    prepare(plan, bucket, old | {"num_computed_tokens": lengths.clamp_min(0)}, freqs, buf)  # type: ignore[arg-type]


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
UNREAD = {"token_to_req", "is_valid_token", "csa_kv.num_entries", "hca_kv.num_entries"}
"""No region reads these, so that only being unwritten can show."""


@pytest.mark.parametrize("name", NAMES)
def test_a_buffer_that_prepare_forgets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(plan: object, bucket: Bucket, table: Tensors, freqs: Tensors, buf: Tensors) -> None:
        poison = buf[name].clone()
        prepare(plan, bucket, table, freqs, buf)  # type: ignore[arg-type]
        buf[name].copy_(poison)

    assert betrayed(monkeypatch, mutant)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in UNREAD])
def test_a_buffer_left_over_from_the_step_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old: dict[Bucket, Tensor] = {}

    def mutant(plan: object, bucket: Bucket, table: Tensors, freqs: Tensors, buf: Tensors) -> None:
        prepare(plan, bucket, table, freqs, buf)  # type: ignore[arg-type]
        mine = buf[name].clone()
        buf[name].copy_(old.get(bucket, mine))
        old[bucket] = mine

    assert betrayed(monkeypatch, mutant)


def change(name: str, edit: Callable[[Tensor, Tensors], Tensor]) -> tuple[str, Mutant]:
    def mutant(plan: object, bucket: Bucket, table: Tensors, freqs: Tensors, buf: Tensors) -> None:
        prepare(plan, bucket, table, freqs, buf)  # type: ignore[arg-type]
        buf[name].copy_(edit(buf[name].clone(), buf))

    return name, mutant


def _live_padding(slots: Tensor, buf: Tensors) -> Tensor:
    """Padded tokens write where the first token does."""
    return torch.where(buf["is_valid_token"], slots, slots[0])


def _unmasked(slots: Tensor, buf: Tensors) -> Tensor:
    """A window that does not end where it should: one row more, the oldest again."""
    return torch.where(slots < 0, slots.max(), slots)


EDITS = {
    "positions late": change("positions", lambda t, b: t + b["is_valid_token"].long()),
    "ids shifted": change("input_ids", lambda t, b: t.roll(1)),
    "logits of the row before": change("logits_rows", lambda t, b: (t - 1).clamp_min(0)),
    "logits rows swapped": change("logits_rows", lambda t, b: t[[1, 0, 2]]),
    "everything samples": change("do_sample", lambda t, b: b["query_lens"] > 0),
    "nothing samples": change("do_sample", lambda t, b: torch.zeros_like(t)),
    "padding on a live row": change("window.slot_mapping", _live_padding),
    "window unmasked": change("window.read_slots", _unmasked),
    "window short of its oldest row": change(
        "window.read_slots", lambda t, b: torch.cat((torch.full_like(t[:, :1], -1), t[:, 1:]), 1)
    ),
    "window short of its newest row": change(
        "window.read_slots", lambda t, b: torch.cat((t[:, :-1], torch.full_like(t[:, :1], -1)), 1)
    ),
    "window of the token before": change("window.read_slots", lambda t, b: t.roll(1, 0)),
    "a compressed row too many": change("csa_index.num_entries", lambda t, b: t + 1),
    "a compressed row too few": change("csa_index.num_entries", lambda t, b: (t - 1).clamp_min(0)),
    "index rows of another token": change("csa_index.read_slots", lambda t, b: t.flip(0)),
    "compressed rows of another token": change("hca_kv.read_slots", lambda t, b: t.flip(0)),
    "closed rows one further": change(
        "csa_kv.slot_mapping", lambda t, b: torch.where(t > 0, t + 1, t)
    ),
    "closed rows dropped": change("hca_kv.slot_mapping", lambda t, b: torch.zeros_like(t)),
    "no slot means slot 0 of a live page": change(
        "csa_kv.slot_mapping", lambda t, b: torch.where(t == 0, t.max(), t)
    ),
    "window start off": change("closing_positions.4", lambda t, b: torch.where(t >= 0, t + 1, t)),
    "state rows shifted": change("csa_state.read_slots", lambda t, b: t.roll(1, 1)),
    "state of the null row": change("hca_state.slot_mapping", lambda t, b: torch.zeros_like(t)),
    "rope turned back": change("rope.compress.sin", lambda t, b: -t),
}


@pytest.mark.parametrize("fault", EDITS)
def test_faults_of_one_buffer(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, mutant = EDITS[fault]
    assert name in NAMES
    assert betrayed(monkeypatch, mutant)


@pytest.mark.parametrize("group", [g.name for g in _RUNNER.plan.groups])
def test_another_requests_pages_in_one_group(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(plan: object, bucket: Bucket, table: Tensors, freqs: Tensors, buf: Tensors) -> None:
        key = f"block_table.{group}"
        wrong = table[key].clone()
        live = buf["slots"][:2]
        wrong[live] = wrong[live.flip(0)]
        prepare(plan, bucket, table | {key: wrong}, freqs, buf)  # type: ignore[arg-type]

    # Reads and writes agree on the exchange until a page comes from before it.
    calls = 0

    def later(*args: object) -> None:
        nonlocal calls
        calls += 1
        (mutant if calls == 3 else prepare)(*args)  # type: ignore[operator]

    assert betrayed(monkeypatch, later)
