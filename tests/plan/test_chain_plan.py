"""Plans of several MTP layers: the stages of a round, their sizes, what is kept and carried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.chain import spec
from v4graph.errors import PlanError
from v4graph.plan.cache import cache_account
from v4graph.plan.lower import lower
from v4graph.plan.types import Bucket, Limits, Mode, Plan
from v4graph.plan.verify import verify_plan

EXPECTED = {
    1: [(Mode.DRAFT_EXTEND, 0, 0, 1)],
    2: [(Mode.DRAFT_EXTEND, 0, 0, 1), (Mode.DRAFT_CHAIN, 1, 1, 1)],
    3: [(Mode.DRAFT_EXTEND, 0, 0, 1), (Mode.DRAFT_CHAIN, 1, 1, 1), (Mode.DRAFT_CHAIN, 2, 2, 1)],
}
"""(mode, layer, rows of a request beyond the round's, repetitions) of three layers, by drafts."""


def plan(num_layers: int, k: int) -> Plan:
    limits = Limits(
        max_num_seqs=3, max_num_batched_tokens=16, speculative="mtp", num_draft_tokens=k
    )
    return lower(spec(num_layers), limits)


@pytest.mark.parametrize("k", range(1, 9))
def test_stages_of_a_round(k: int) -> None:
    own = plan(3, k)
    for mode, bucket in own.rounds():
        if mode is Mode.IDLE:
            continue
        stages = own.stages(mode, bucket)
        assert (stages[0].mode, stages[0].bucket) == (mode, bucket)
        chained = EXPECTED[min(k, 3)]
        for stage, (name, layer, more, repeat) in zip(stages[1:], chained, strict=False):
            width = bucket.tokens_per_req + more if bucket.tokens_per_req else 0
            sizes = Bucket(bucket.num_tokens + more * bucket.num_reqs, bucket.num_reqs, width)
            assert (stage.mode, stage.layer, stage.repeat) == (name, layer, repeat)
            assert stage.bucket == sizes
        rest = stages[1 + len(chained) :]
        single = Bucket(bucket.num_reqs, bucket.num_reqs, 1)
        expected = [(Mode.DRAFT_DECODE, 2, k - 3, single)] if k > 3 else []
        assert [(s.mode, s.layer, s.repeat, s.bucket) for s in rest] == expected


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_kept_rows_and_guesses(num_layers: int, k: int) -> None:
    own, used = plan(num_layers, k), min(num_layers, k)
    window = own.group("window")
    assert window.kept_tokens == 8 + used - 1
    assert window.draft_ahead == k - used
    assert window.draft_layers == tuple(range(used))
    state = own.group("csa_state")
    assert (state.kept_tokens, state.draft_ahead) == (state.span, 0)
    account = cache_account(spec(num_layers), 64, num_draft_tokens=k)
    kept = {g.name: g.kept_tokens for g in account.groups}
    assert kept["window"] == window.kept_tokens + k


def test_a_row_of_streams_is_carried_for_every_layer_behind_the_first() -> None:
    table = {
        n: next(m.num_bytes for m in plan(n, 3).memory if m.name == "request table")
        for n in (1, 2, 3)
    }
    row = 4 * 32 * 4  # streams, channels, bytes
    columns = {n: sum(g.table_width for g in plan(n, 3).groups) for n in (1, 2, 3)}
    for n in (1, 2, 3):
        more = row * (n - 1) + 8 * (columns[n] - columns[1])
        assert table[n] - table[1] == 4 * more  # slots, the null request's included


def test_a_chain_stage_without_a_program_is_refused() -> None:
    own = plan(2, 2)
    modes = tuple(
        replace(m, buckets=m.buckets[1:]) if m.mode is Mode.DRAFT_CHAIN else m for m in own.modes
    )
    with pytest.raises(PlanError, match="its draft_chain stage has no program"):
        verify_plan(replace(own, modes=modes))
