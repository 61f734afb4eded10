"""Every buffer of a step against a derivation in plain Python from requests and their pages."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.support.runner import Runner
from tests.support.world import World, small
from v4graph.engine.request import Request
from v4graph.errors import ProgramError
from v4graph.model.rope import inverse_frequencies
from v4graph.ops.rope import cos_sin
from v4graph.plan.types import GroupPlan, Mode
from v4graph.program.prepare import MODE_NUMBERS
from v4graph.program.step import StepProgram

Batch = list[tuple[Request, int]]


def row_of(g: GroupPlan, request: Request, position: int) -> int:
    """The row for a position by the request's own map: no block table, no ring."""
    page = request.pages[g.name][position // g.page_tokens]
    return page * g.page_rows + position % g.page_tokens // g.ratio


def expected_buffers(world: World, runner: Runner, program: StepProgram, batch: Batch) -> dict:
    """Every integer and bool buffer that the batch must lead to, as nested lists."""
    T, R = program.bucket.num_tokens, program.bucket.num_reqs
    tokens = [(i, r, r.num_computed_tokens + j) for i, (r, n) in enumerate(batch) for j in range(n)]
    pad = T - len(tokens)
    ends = [sum(n for _, n in batch[: i + 1]) for i in range(len(batch))]
    behind = (
        range(len(batch), R) if program.bucket.tokens_per_req else [ends[-1]] * (R - len(batch))
    )
    padding = [min(row, T - 1) for row in behind]
    due = [r.num_computed_tokens + n == r.num_tokens for r, n in batch]
    out = {
        "positions": [p for _, _, p in tokens] + [0] * pad,
        "input_ids": [r.token_ids[p] for _, r, p in tokens] + [0] * pad,
        "is_valid_token": [True] * len(tokens) + [False] * pad,
        "logits_rows": [e - 1 for e in ends] + padding,
        "do_sample": due + [False] * (R - len(batch)),
    }
    for g in runner.plan.groups:
        closed = [(r, p) for _, r, p in tokens if (p + 1) % g.closes_every == 0]
        name = f"{g.name}.slot_mapping"
        if g.kind == "compressed":
            lists = [
                [row_of(g, r, e * g.ratio) for e in range((p + 1) // g.ratio)] for _, r, p in tokens
            ]
            out[name] = [row_of(g, r, p) for r, p in closed]
            if g.name in runner.plan.index_groups:
                out[f"{g.name}.num_entries"] = [len(rows) for rows in lists] + [0] * pad
            padded = [rows + [-1] * (g.max_entries - len(rows)) for rows in lists]
            out[f"{g.name}.read_slots"] = padded + [[-1] * g.max_entries] * pad
            out[f"closing_positions.{g.ratio}"] = [p for _, p in closed]
            continue
        out[name] = [row_of(g, r, p) for _, r, p in tokens] + [0] * pad
        readers = [(r, p) for _, r, p in tokens] if g.kind == "sliding_window" else closed
        lists = [
            [row_of(g, r, q) if q >= 0 else -1 for q in range(p - g.span + 1, p + 1)]
            for r, p in readers
        ]
        out[f"{g.name}.read_slots"] = lists
    return out


def compare(program: StepProgram, expected: dict) -> None:
    """Lists that depend on closings are shorter than their buffers: the rest is padding."""
    for name, values in expected.items():
        got = program.buf[name].tolist()
        assert got[: len(values)] == values, name
        filler = {"slot_mapping": 0, "read_slots": -1}.get(name.rsplit(".", 1)[-1], -1)
        for rest in got[len(values) :]:
            assert set(rest if isinstance(rest, list) else [rest]) <= {filler}, name


def run_and_compare(world: World, runner: Runner, batch: Batch, mode: Mode) -> None:
    # Pages are taken first, as the runner would: the expectation reads the requests' map.
    for request, count in batch:
        runner.pages.allocate(request, runner.pages.missing(request, count))
    counts = [n for _, n in batch]
    program = runner.programs.dispatch(mode, sum(counts), len(counts))
    expected = expected_buffers(world, runner, program, batch)
    runner.step(batch, mode)
    compare(program, expected)


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed: int) -> None:
    """Chunks, decodes, joins and leaves for long enough to wrap every ring several times."""
    world, choose = small(), random.Random(seed)
    runner = world.runner(seqs=4, tokens=40, max_len=200)
    live: list[Request] = []
    for turn in range(60):
        if len(live) < 4 and choose.random() < 0.5:
            live.append(runner.add(world.ids(choose.randint(1, 120), seed=seed * 1000 + turn)))
        prefill = [r for r in live if r.num_tokens - r.num_computed_tokens > 1]
        if prefill and choose.random() < 0.6:
            batch, budget = [], 40
            for r in live:  # decoding requests ride along
                count = min(r.num_tokens - r.num_computed_tokens, choose.randint(1, 17), budget)
                if count:
                    batch.append((r, count))
                    budget -= count
            run_and_compare(world, runner, batch, Mode.PREFILL)
        else:
            batch = [(r, 1) for r in live]
            choose.shuffle(batch)
            if batch:
                run_and_compare(world, runner, batch, Mode.DECODE)
        for r in [r for r in live if r.num_computed_tokens > 150 or choose.random() < 0.03]:
            runner.drop(r)
            live.remove(r)


def test_rope_factors_follow_the_positions() -> None:
    world = small()
    runner = world.runner()
    request = runner.add(world.ids(50))
    runner.step([(request, 30)])
    runner.step([(request, 20)])
    program = runner.programs.dispatch(Mode.PREFILL, 20, 1)
    for name, rope in world.spec.rope.items():
        if f"rope.{name}.cos" not in program.buf:
            continue
        cos, sin = cos_sin(program.buf["positions"], inverse_frequencies(rope))
        assert torch.equal(program.buf[f"rope.{name}.cos"], cos)
        assert torch.equal(program.buf[f"rope.{name}.sin"], sin)
    assert program.buf["positions"][:20].tolist() == list(range(30, 50))


@pytest.mark.parametrize("mode", [Mode.PREFILL, Mode.DECODE])
def test_nothing_survives_from_before(mode: Mode) -> None:
    """Whatever a program's buffers held, the same step leaves the same bits in all of them."""
    world, seen = small(), []
    for garbage in (0, 1, -(2**40), 2**40):
        runner = world.runner()
        requests = [runner.add(world.ids(n, seed=n)) for n in (9, 17)]
        if mode is Mode.DECODE:
            runner.step([(r, r.num_tokens) for r in requests])
        counts = [r.num_tokens - r.num_computed_tokens for r in requests]
        program = runner.programs.dispatch(mode, sum(counts), 2)
        program.checked = False  # else the program itself would poison them
        for b in program.stages[0].buffer_plans:
            if b.producer == "prepare":
                program.buf[b.name].fill_(bool(garbage) if b.dtype == "bool" else garbage)
        runner.step(list(zip(requests, counts, strict=True)), mode)
        seen.append({name: t.clone() for name, t in program.buf.items()})
    for other in seen[1:]:
        for name, tensor in seen[0].items():
            if name not in ("step", "stamp"):
                assert torch.equal(tensor, other[name]), name


def test_the_stamp_says_mode_and_step() -> None:
    world = small()
    runner = world.runner()
    request = runner.add(world.ids(20))
    for mode, count in ((Mode.PREFILL, 20), (Mode.DECODE, 1), (Mode.DECODE, 1)):
        runner.step([(request, count)], mode)
        program = runner.programs.dispatch(mode, count, 1)
        assert program.buf["stamp"].tolist() == [MODE_NUMBERS[mode], runner._step]
    assert len(set(MODE_NUMBERS.values())) == len(Mode)


def test_buffers_keep_their_addresses() -> None:
    world = small()
    runner = world.runner()
    request = runner.add(world.ids(60))
    program = runner.programs.dispatch(Mode.PREFILL, 20, 1)
    before = {name: t.data_ptr() for name, t in program.buf.items()}
    for _ in range(3):
        runner.step([(request, 20)])
    assert {name: t.data_ptr() for name, t in program.buf.items()} == before
    program.stages[0].buf["positions"] = program.buf["positions"].clone()
    other = runner.add(world.ids(20))
    with pytest.raises(ProgramError, match="buffer positions has moved"):
        runner.step([(other, 20)])


def test_buffers_are_those_of_the_plan() -> None:
    runner = small().runner()
    for program in runner.programs.programs.values():
        for b in program.stages[0].buffer_plans:
            tensor = program.buf[b.name]
            assert tuple(tensor.shape) == b.shape
            assert tensor.dtype is getattr(torch, b.dtype)
            assert tensor.numel() * tensor.element_size() == b.num_bytes
            assert math.prod(b.shape) > 0


def test_batches_beyond_a_program_are_refused() -> None:
    runner = small().runner(seqs=2, tokens=16)
    with pytest.raises(ProgramError, match="no prefill program holds 17 tokens"):
        runner.programs.dispatch(Mode.PREFILL, 17, 1)
    with pytest.raises(ProgramError, match="no decode program holds 3 tokens in 3 requests"):
        runner.programs.dispatch(Mode.DECODE, 3, 3)
    program = runner.programs.dispatch(Mode.PREFILL, 16, 2)
    for slots, counts in (([1, 2, 1], [1, 1, 1]), ([1], [17]), ([1, 2], [3])):
        with pytest.raises(ProgramError, match="was given"):
            program.run(slots, counts, 1, False)
