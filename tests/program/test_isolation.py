"""A step touches what belongs to its requests, and nothing that does not reaches its logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.runner import Runner, relative_error
from tests.support.world import BOUND, SMALL, World, changed_rows, owned_rows, pools_of, small
from v4graph.engine.request import Request
from v4graph.plan.types import Limits, Mode


class Watch:
    """All pools as they are now, and the rows that the next step of some requests may change."""

    def __init__(self, world: World, runner: Runner, batch: list[tuple[Request, int]]) -> None:
        for request, count in batch:  # checked mode poisons new pages: no write of the step
            runner.pages.allocate(request, runner.pages.missing(request, count))
        self._pools = pools_of(world.spec, runner.programs.state)
        self._before = {key: pool.clone() for key, (_, pool) in self._pools.items()}
        # Taken before the step: it frees what becomes unreadable.
        self._own = {
            key: owned_rows(group, [r for r, _ in batch]) | set(range(group.page_rows))
            for key, (group, _) in self._pools.items()
        }

    def check(self) -> None:
        """No other row has changed by a bit."""
        for key, (_, pool) in self._pools.items():
            changed = changed_rows(self._before[key], pool) - self._own[key]
            assert not changed, f"{key}: rows {sorted(changed)}"


def test_a_step_writes_to_the_pages_of_its_requests_only() -> None:
    """Padding goes to the null page: no other request's row changes by a bit."""
    world = small()
    runner = world.runner(seqs=4, tokens=64)
    bystander = runner.add(world.ids(61, seed=1))
    runner.step([(bystander, 61)])
    first, second = runner.add(world.ids(20, seed=2)), runner.add(world.ids(33, seed=3))
    for batch in ([(first, 7)], [(first, 13), (second, 20)], [(second, 13)]):
        watch = Watch(world, runner, batch)
        runner.step(batch)
        watch.check()
    for batch in ([(first, 1)], [(second, 1), (first, 1)], [(second, 1)]):
        watch = Watch(world, runner, batch)
        runner.step(batch, Mode.DECODE)
        watch.check()


def test_tokens_that_close_no_window_leave_compressed_rows_alone() -> None:
    """B1: three tokens after a boundary, neither CSA nor HCA nor index rows change by a bit."""
    world = small()
    runner = world.runner()
    owner = runner.add(world.ids(64, seed=1))  # owns the first pages of every group
    request = runner.add(world.ids(16, seed=2))
    runner.step([(owner, 64)])
    runner.step([(request, 16)])
    found = pools_of(world.spec, runner.programs.state)
    compressed = {k: p for k, (g, p) in found.items() if g.kind == "compressed"}
    assert {role for _, role in compressed} == {"compressed", "index"}
    for position in range(16, 24):
        before = {k: p.clone() for k, p in compressed.items()}
        runner.step([(request, 1)], Mode.DECODE)
        for key, pool in compressed.items():
            group, _ = found[key]
            closes = (position + 1) % group.ratio == 0
            changed = {r for r in changed_rows(before[key], pool) if r >= group.page_rows}
            page = request.pages[group.name][position // group.page_tokens]
            own = page * group.page_rows + position % group.page_tokens // group.ratio
            assert changed == ({own} if closes else set()), (position, key)


class Garbage:
    """Everything that belongs to padding, filled with the worst that fits."""

    def __init__(self, runner: Runner, value: float, integer: int) -> None:
        state = runner.programs.state
        for pools, layer in zip(state.pools, state.plan.layers, strict=True):
            caches = dict(state.spec.attention[layer.attention].caches)
            for role, pool in pools.items():
                pool[: state.plan.group(caches[role]).page_rows] = value
        state.table.token_ids[0] = integer
        for name in ("num_tokens", "top_k", "seed"):
            state.table.scalars[name][0] = integer
        for program in runner.programs.programs.values():
            for b in program.stages[0].buffer_plans:
                program.buf[b.name].fill_(bool(integer) if b.dtype == "bool" else integer)


@pytest.mark.parametrize("random", [False, True])
def test_real_rows_do_not_depend_on_what_padding_holds(random: bool) -> None:
    """D5: ids of 2^31 - 1, NaN rows, poisoned buffers; logits and tokens stay bitwise equal."""
    world, seen = small(), []
    for value, integer in ((0.0, 0), (float("nan"), 2**31 - 1), (1e30, -1), (-1e30, 7)):
        runner = world.runner(seqs=4, tokens=64)
        requests = [runner.add(world.ids(n, seed=n)) for n in (5, 18, 3)]
        out = []
        for mode, counts in (
            (Mode.PREFILL, [5, 11, 3]),
            (Mode.PREFILL, [1, 7, 1]),
            *[(Mode.DECODE, [1, 1, 1])] * 5,
        ):
            Garbage(runner, value, integer)
            batch = list(zip(requests, counts, strict=True))
            for request, count in batch:
                runner.pages.allocate(request, runner.pages.missing(request, count))
            program = runner.programs.dispatch(mode, sum(counts), len(counts))
            result = program.run([r.slot for r in requests], counts, 1, random)
            assert (result.tokens[3:] == -1).all()
            out.append((result.tokens[:3].clone(), result.logits[:3].clone()))
            for (request, count), tokens in zip(batch, result.tokens.tolist(), strict=False):
                request.num_computed_tokens += count
                request.token_ids += [t for t in tokens if t >= 0]
        assert all(logits.isfinite().all() for _, logits in out)
        seen.append(out)
    for other in seen[1:]:
        for (tokens, logits), (tokens_too, logits_too) in zip(seen[0], other, strict=True):
            assert torch.equal(tokens, tokens_too)
            assert torch.equal(logits, logits_too)


@pytest.mark.parametrize("mode", [Mode.PREFILL, Mode.DECODE])
def test_a_step_of_nothing_but_padding(mode: Mode) -> None:
    """D6: every length 0; the table and all pages but the null page stay as they are."""
    world = small()
    runner = world.runner()
    request = runner.add(world.ids(30))
    runner.step([(request, 30)])
    table = {k: v.clone() for k, v in runner.pages.table.tensors().items()}
    watch = Watch(world, runner, [])
    program = runner.programs.dispatch(mode, 1, 1)
    result = program.run([], [], 9, True)
    assert (result.tokens == -1).all()
    watch.check()
    for name, values in runner.pages.table.tensors().items():
        assert torch.equal(values, table[name]), name


def test_a_request_that_contributes_no_token() -> None:
    """C28: it samples nothing and changes nothing, wherever in the batch it stands."""
    world = small()
    for place in range(3):
        runner = world.runner()
        idle, busy, other = (runner.add(world.ids(n, seed=n)) for n in (21, 12, 9))
        runner.step([(idle, 21)])
        counts = [12, 9]
        requests = [busy, other]
        requests.insert(place, idle)
        counts.insert(place, 0)
        watch = Watch(world, runner, [(busy, 12), (other, 9)])
        program = runner.programs.dispatch(Mode.PREFILL, 21, 3)
        result = program.run([r.slot for r in requests], counts, 2, False)
        assert result.tokens[place] == -1
        watch.check()
        table = runner.pages.table.scalars
        assert (table["num_tokens"][idle.slot], table["num_computed_tokens"][idle.slot]) == (22, 21)
        for row, request in enumerate(requests):
            if request is not idle:
                expected = world.oracle(request.token_ids)[-1]
                assert relative_error(result.logits[row], expected) < BOUND


def test_five_lengths_in_one_step_equal_their_solo_runs() -> None:
    """B14, D1: prefill of 5, 130 and 1,000 tokens beside two decoding rows."""
    world = small()
    lengths = {"five": 5, "mid": 130, "long": 1000, "young": 9, "old": 300}
    ids = {name: world.ids(n, seed=n) for name, n in lengths.items()}
    runner = world.runner(seqs=5, tokens=1200, max_len=1100)
    requests = {name: runner.add(tokens) for name, tokens in ids.items()}
    runner.step([(requests["young"], 9), (requests["old"], 300)])
    batch = [
        (requests["young"], 1),
        (requests["five"], 5),
        (requests["long"], 1000),
        (requests["old"], 1),
        (requests["mid"], 130),
    ]
    computed = {r.request_id: r.token_ids[: r.num_computed_tokens + n] for r, n in batch}
    logits = runner.step(batch)
    alone = world.runner(seqs=1, tokens=1200, max_len=1100)
    for (request, _), row in zip(batch, logits, strict=True):
        tokens = computed[request.request_id]
        solo = alone.add(tokens)
        assert relative_error(row, alone.step([(solo, len(tokens))])[0]) < 1e-5
        alone.drop(solo)
        assert relative_error(row, world.oracle(tokens)[-1]) < BOUND


@pytest.mark.parametrize("page_tokens", [8, 16])
@pytest.mark.parametrize("max_len", [47, 48, 49, 64])
def test_every_length_up_to_the_longest(max_len: int, page_tokens: int) -> None:
    """D4: window and page edges, the last column of every table, and the very last position."""
    world = World(replace(SMALL, page_tokens=page_tokens))
    runner = world.runner(seqs=1, tokens=16, max_len=max_len)
    request = runner.add(world.ids(max_len))
    steps = [16, 7] + [1] * (max_len - 23)
    oracle = world.oracle(request.token_ids)
    for count in steps:
        mode = Mode.DECODE if count == 1 else Mode.PREFILL
        row = runner.step([(request, count)], mode)[0]
        at = request.num_computed_tokens
        assert relative_error(row, oracle[at - 1]) < BOUND, at
    assert request.num_computed_tokens == max_len
    for g in runner.plan.groups:
        if not g.kept_tokens:
            assert len(request.pages[g.name]) == g.table_width


@pytest.mark.parametrize("chunk", [2, 5, 13])
def test_rings_wrap_many_times_while_pages_change_hands(chunk: int) -> None:
    """Two requests and a passer-by share tight pools for more than three turns of every ring."""
    world = small()
    length = 400
    runner = world.runner(seqs=3, tokens=2 * chunk + 8, max_len=length + 1)
    pair = [runner.add(world.ids(length, seed=s)) for s in (1, 2)]
    oracles = [world.oracle(r.token_ids) for r in pair]
    given: dict[str, set[int]] = {g.name: set() for g in runner.plan.groups}
    start = 0
    while pair[0].num_computed_tokens + chunk <= length - chunk:
        batch = [(r, chunk) for r in pair]
        visitor = None
        if start % 3 == 0:  # takes pages between and gives them back dirty
            visitor = runner.add(world.ids(8, seed=start))
            batch.insert(1, (visitor, 8))
        rows = runner.step(batch)
        for (request, _), row in zip(batch, rows, strict=True):
            if request in pair:
                oracle = oracles[pair.index(request)]
                assert relative_error(row, oracle[request.num_computed_tokens - 1]) < BOUND
                for name, held in request.pages.items():
                    given[name] |= set(held.values())
        if visitor is not None:
            runner.drop(visitor)
        start += 1
    runner.pages.check_integrity(pair)
    sliding = [g for g in runner.plan.groups if g.kept_tokens]
    assert all(length > 3 * g.table_width * g.page_tokens for g in sliding)
    # Pages came back: far fewer were used than blocks passed by.
    assert all(len(given[g.name]) < length / g.page_tokens for g in sliding)


def test_one_token_prompts_fill_a_program() -> None:
    """As many requests as tokens; the first tokens see nothing but themselves."""
    world = small()
    limits = Limits(max_num_seqs=6, max_num_batched_tokens=6, max_model_len=32)
    runner = Runner(world.spec, world.params, limits)
    requests = [runner.add([token]) for token in range(2, 8)]
    rows = runner.step([(r, 1) for r in requests])
    for request, row in zip(requests, rows, strict=True):
        assert relative_error(row, world.oracle(request.token_ids[:1])[0]) < BOUND
    rows = runner.step([(r, 1) for r in reversed(requests)], Mode.DECODE)
    for request, row in zip(reversed(requests), rows, strict=True):
        assert relative_error(row, world.oracle(request.token_ids[:2])[1]) < BOUND


def test_every_program_gives_the_same_logits() -> None:
    """The same request through small and large programs of both modes."""
    world = small()
    limits = Limits(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        decode_buckets=(1, 2, 4),
        prefill_buckets=((16, 1), (24, 3), (64, 4)),
    )
    runner = Runner(world.spec, world.params, limits)
    ids = world.ids(14)
    oracle = world.oracle(ids)
    for bucket in runner.plan.mode(Mode.PREFILL).buckets:
        request = runner.add(ids)
        runner.pages.allocate(request, runner.pages.missing(request, 14))
        program = runner.programs.programs[Mode.PREFILL, bucket]
        row = program.run([request.slot], [14], 1, False).logits[0]
        assert relative_error(row, oracle[13]) < BOUND
        request.num_computed_tokens = 14
        runner.drop(request)
    for bucket in runner.plan.mode(Mode.DECODE).buckets:
        request = runner.add(ids)
        runner.step([(request, 13)])
        runner.pages.allocate(request, runner.pages.missing(request, 1))
        program = runner.programs.programs[Mode.DECODE, bucket]
        row = program.run([request.slot], [1], 1, False).logits[0]
        assert relative_error(row, oracle[13]) < BOUND
        runner.drop(request)
