"""Lowering: rings no wider and no narrower than they must be, pools that hold what they promise."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from math import ceil

import pytest

from tests.support.tiny import SHAPES, Tiny
from v4graph.errors import PlanError
from v4graph.plan.buffers import buffers, closing_ratios, num_closings
from v4graph.plan.lower import lower
from v4graph.plan.types import Bucket, BufferPlan, GroupPlan, Limits, Mode, Plan, ring_tokens
from v4graph.plan.verify import verify_plan
from v4graph.spec.load import load_spec
from v4graph.spec.model import ModelSpec

TINY = Tiny(kinds=("swa", "csa", "hca"), csa_ratio=4, hca_ratio=16, window=10, max_len=4096)


def tiny_plan(
    tokens: int = 8,
    drafts: int = 0,
    max_len: int = 4096,
    tiny: Tiny = TINY,
    overlap: bool = False,
) -> Plan:
    limits = Limits(
        max_num_seqs=2,
        max_num_batched_tokens=tokens,
        max_model_len=max_len,
        speculative="mtp" if drafts else "none",
        num_draft_tokens=drafts,
        overlap=overlap,
    )
    return lower(tiny.spec(), limits)


def pool_bytes(plan: Plan) -> int:
    return sum(g.num_pages * g.page_bytes for g in plan.groups)


# Kept ranges and rings -------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 1, 3, 8])
def test_kept_ranges_are_the_span(drafts: int) -> None:
    """A rejected draft is written again by the step that reads it: it keeps no row alive."""
    plan = tiny_plan(drafts=drafts)
    assert {g.name: g.kept_tokens for g in plan.groups} == {
        "window": 10,
        "csa_kv": 0,
        "csa_index": 0,
        "csa_state": 2 * 4,
        "index_state": 2 * 4,
        "hca_kv": 0,
        "hca_state": 16,
    }
    ahead = {g.name: g.draft_ahead for g in plan.groups}
    assert ahead == {**dict.fromkeys(ahead, 0), "window": max(drafts - 1, 0)}
    assert {g.name for g in plan.groups if g.draft_layers} == ({"window"} if drafts else set())


def rows_in_one_step(g: GroupPlan, first: int, written: int) -> range:
    """Positions that must not share a ring slot: read by a query at `first`, or written."""
    return range(max(first - g.kept_tokens + 1, 0), first + written)


@pytest.mark.parametrize("page", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("tokens", "drafts"), [(1, 0), (1, 3), (7, 0), (8, 3), (2, 8), (33, 0)])
def test_a_ring_holds_every_step_and_not_a_page_more(
    page: int, tokens: int, drafts: int, overlap: bool
) -> None:
    """Two live blocks in one ring column would overwrite each other's rows.

    With overlap the host places a round up to `drafts` tokens behind where it will begin.
    """
    tiny = Tiny(**{**vars(TINY), "page_tokens": page})
    plan = tiny_plan(tokens, drafts, tiny=tiny, overlap=overlap)
    late = drafts if overlap else 0
    for g in plan.groups:
        if not g.kept_tokens:
            continue
        written = max(tokens, drafts + 1 + late) + g.draft_ahead
        most = 0
        for first in range(g.kept_tokens + 4 * g.page_tokens):
            rows = rows_in_one_step(g, first, written)
            most = max(most, rows[-1] // g.page_tokens - rows[0] // g.page_tokens + 1)
        assert g.table_width == most, g.name


@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_one_page_less_is_refused(drafts: int) -> None:
    plan = tiny_plan(2, drafts, tiny=Tiny(**{**vars(TINY), "page_tokens": 1}))
    verify_plan(plan)
    for i, g in enumerate(plan.groups):
        for field in ("table_width", "num_pages", "kept_tokens", "draft_ahead"):
            least = {"num_pages": g.table_width + 1}.get(field, getattr(g, field))
            if least == 0:
                continue
            short = replace(g, **{field: least - 1})
            groups = (*plan.groups[:i], short, *plan.groups[i + 1 :])
            with pytest.raises(PlanError, match=f"cache group '{g.name}'"):
                verify_plan(replace(plan, groups=groups))


def test_ring_sizes_of_v4_flash_at_page_size_one() -> None:
    """Window 128, ratio 4 (a span of 8) and ratio 128: span - 1 + W rows when nothing overlaps."""
    for k in (1, 3, 8):
        tiny = Tiny(
            kinds=("swa", "csa", "hca"), csa_ratio=4, hca_ratio=128, window=128, page_tokens=1
        )
        plan = tiny_plan(1, k, tiny=replace(tiny, max_len=4096))
        need = {
            g.name: ring_tokens(g, plan.limits, plan.speculation)
            for g in plan.groups
            if g.kept_tokens
        }
        W = k + 1
        assert need == {
            # The guesses of drafting are written behind the verified rows.
            "window": 127 + W + (k - 1),
            "csa_state": 7 + W,
            "index_state": 7 + W,
            "hca_state": 127 + W,
        }


# Speculative modes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(speculative="mtq"), "speculative 'mtq': tiny declares none, mtp"),
        (Limits(speculative="none", num_draft_tokens=2), "speculative mode 'none' drafts none"),
        (Limits(speculative="mtp", num_draft_tokens=9), "num_draft_tokens 9: expected 1..8"),
        (Limits(speculative="mtp", num_draft_tokens=-1), "num_draft_tokens -1: expected 1..8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_speculative_modes_that_cannot_be(limits: Limits, message: str) -> None:
    with pytest.raises(PlanError) as fault:
        lower(TINY.spec(), limits)
    assert message in str(fault.value)


def test_the_first_speculative_mode_is_the_default() -> None:
    data = TINY.data()
    for names in (("none", "mtp"), ("mtp", "none"), ("mtp",), ()):
        spec = ModelSpec.model_validate(
            {**data, "speculative": {n: data["speculative"][n] for n in names}}
        )
        assert lower(spec, Limits()).speculation.name == (names[0] if names else "none")
        assert lower(spec, Limits(speculative="none")).speculation.kind == "none"


@pytest.mark.parametrize("k", [1, 2, 8])
def test_the_stages_of_a_round(k: int) -> None:
    plan = lower(TINY.spec(), Limits(speculative="mtp", num_draft_tokens=k, max_num_seqs=4))
    assert plan.decode_mode is Mode.TARGET_VERIFY
    for mode, bucket in plan.rounds():
        stages = [(s.mode, s.bucket, s.repeat) for s in plan.stages(mode, bucket)]
        if mode is Mode.IDLE:
            assert stages == [(mode, bucket, 1)]
            continue
        drafting = Bucket(bucket.num_reqs, bucket.num_reqs, 1)
        more = [(Mode.DRAFT_DECODE, drafting, k - 1)] if k > 1 else []
        assert stages == [(mode, bucket, 1), (Mode.DRAFT_EXTEND, bucket, 1), *more]
    sizes = {b for m, b in plan.rounds() if m is Mode.TARGET_VERIFY}
    assert sizes == {Bucket(k + 1, 1, k + 1), Bucket(4 * (k + 1), 4, k + 1)}


def test_every_mode_touches_only_the_groups_of_its_layers() -> None:
    plan = lower(TINY.spec(), Limits(speculative="mtp", num_draft_tokens=3))
    every = {g.name for g in plan.groups}
    touched = {m.mode: set(m.reads) | set(m.writes) for m in plan.modes}
    assert touched == {
        Mode.PREFILL: every,
        Mode.TARGET_VERIFY: every,
        Mode.DRAFT_EXTEND: {"window"},
        Mode.DRAFT_DECODE: {"window"},
        Mode.IDLE: set(),
    }


def test_short_sequences_need_no_ring() -> None:
    plan = tiny_plan(max_len=20)
    for g in plan.groups:
        assert g.table_width <= ceil(20 / g.page_tokens)
    assert plan.group("window").table_width == 2


def test_history_tables_cover_the_longest_sequence() -> None:
    plan = tiny_plan(max_len=1000)
    for name in ("csa_kv", "csa_index", "hca_kv"):
        g = plan.group(name)
        assert g.table_width == ceil(1000 / g.page_tokens) == g.pages_per_seq
        assert g.max_entries >= 1000 // g.ratio


# Limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4095, 4096])
def test_max_model_len_within_the_spec(length: int) -> None:
    assert tiny_plan(max_len=length).max_model_len == length


def test_max_model_len_defaults_to_the_spec() -> None:
    assert tiny_plan(max_len=0).max_model_len == 4096


@pytest.mark.parametrize("length", [-1, 4097])
def test_max_model_len_out_of_range(length: int) -> None:
    with pytest.raises(PlanError, match=rf"max_model_len {length}: expected 1\.\.4096"):
        tiny_plan(max_len=length)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(max_num_seqs=0), "max_num_seqs 0: expected at least 1"),
        (Limits(max_num_batched_tokens=0), "max_num_batched_tokens 0: expected at least 1"),
        (Limits(dtype="float16"), "dtype 'float16'"),
        (Limits(decode_buckets=(1, 4)), "end at max_num_seqs 8"),
        (Limits(decode_buckets=(8, 4)), "ascending"),
        (Limits(decode_buckets=(4, 4, 8)), "ascending"),
        (Limits(decode_buckets=(0, 8)), "decode_buckets"),
        (Limits(decode_buckets=(1, 16)), "end at max_num_seqs 8"),
        (Limits(prefill_buckets=((256, 8), (32, 8))), "ascending"),
        (Limits(prefill_buckets=((256, 8), (256, 8))), "ascending"),
        (Limits(prefill_buckets=((4, 8), (256, 8))), "1 <= requests <= tokens"),
        (Limits(prefill_buckets=((32, 0), (256, 8))), "1 <= requests <= tokens"),
        (Limits(prefill_buckets=((128, 8),)), "must hold max_num_batched_tokens 256"),
        (Limits(prefill_buckets=((512, 8),)), "must hold max_num_batched_tokens 256"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_limits_that_cannot_hold(limits: Limits, message: str) -> None:
    with pytest.raises(PlanError) as fault:
        lower(TINY.spec(), limits)
    assert message in str(fault.value)


def test_given_buckets_are_kept() -> None:
    limits = Limits(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        decode_buckets=(1, 2, 4),
        prefill_buckets=((16, 1), (16, 4), (64, 4)),
    )
    plan = lower(TINY.spec(), limits)
    assert plan.mode(Mode.DECODE).buckets == (Bucket(1, 1, 1), Bucket(2, 2, 1), Bucket(4, 4, 1))
    assert plan.mode(Mode.PREFILL).buckets == (Bucket(16, 1), Bucket(16, 4), Bucket(64, 4))


@pytest.mark.parametrize(("tokens", "seqs"), list(product((1, 5, 32, 33, 200), (1, 4, 64))))
def test_default_buckets_hold_every_batch(tokens: int, seqs: int) -> None:
    limits = Limits(max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=64)
    plan = lower(TINY.spec(), limits)
    largest = plan.mode(Mode.PREFILL).buckets[-1]
    # Every request of a prefill step computes a token at least.
    assert largest == Bucket(tokens, min(seqs, tokens))
    assert plan.mode(Mode.DECODE).buckets[-1] == Bucket(seqs, seqs, 1)


# Pools -----------------------------------------------------------------------------------------


def test_by_default_every_sequence_may_be_full_length() -> None:
    for name, tiny in SHAPES.items():
        plan = lower(tiny.spec(), Limits(max_num_seqs=3, max_model_len=512))
        for g in plan.groups:
            if not g.kept_tokens:
                assert g.num_pages == 1 + 3 * g.table_width, (name, g.name)


def least_memory() -> int:
    """The smallest kv_memory_bytes that lowers."""
    low, high = 0, pool_bytes(lower(TINY.spec(), Limits(max_num_seqs=4)))
    while high - low > 1:
        middle = (low + high) // 2
        try:
            lower(TINY.spec(), Limits(max_num_seqs=4, kv_memory_bytes=middle))
            high = middle
        except PlanError:
            low = middle
    return high


def test_pools_stay_within_the_memory_and_cover_one_sequence() -> None:
    least = least_memory()
    with pytest.raises(PlanError) as fault:
        lower(TINY.spec(), Limits(max_num_seqs=4, kv_memory_bytes=least - 1))
    assert "(kv_memory_bytes, --kv-memory): one sequence of 4,096 tokens" in str(fault.value)
    told = [int(n.replace(",", "")) for n in re.findall(r"\d+(?:,\d+)*", str(fault.value))]
    given, _, history, _, windows, partly, null, together = told
    assert (given, together) == (least - 1, least)
    assert history + windows + partly + null == least

    full = pool_bytes(lower(TINY.spec(), Limits(max_num_seqs=4)))
    before = 0
    for budget in (least, least + 1, least * 3 // 2, full - 1, full, full * 10):
        plan = lower(TINY.spec(), Limits(max_num_seqs=4, kv_memory_bytes=budget))
        assert before <= pool_bytes(plan) <= min(budget, full)
        before = pool_bytes(plan)
        for g in plan.groups:
            assert g.num_pages - 1 >= g.pages_per_seq, g.name
            if not g.kept_tokens:
                assert g.num_pages - 1 >= g.pages_for(4096), g.name
    assert before == full


def test_memory_lines_add_up() -> None:
    plan = tiny_plan()
    lines = {line.name: line.num_bytes for line in plan.memory}
    assert lines["page pools"] == pool_bytes(plan)
    assert lines["page pools"] == sum(n for name, n in lines.items() if name.startswith("pages "))
    assert lines["weights (checkpoint)"] == plan.weight_bytes
    for g in plan.groups:
        rows = g.num_pages * g.page_rows * len(g.layers)
        assert lines[f"pages {g.name}"] == rows * g.row_dim * 4


# Closing windows -------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [2, 3, 4, 8])
def test_num_closings_bounds_every_split(ratio: int) -> None:
    """All splits of up to 19 tokens over up to 4 requests, at every phase of their windows.

    Requests close windows independently, so each share takes the start that closes most.
    """

    def closed(n0: int, q: int) -> int:
        return (n0 + q) // ratio - n0 // ratio

    for tokens, requests in product(range(1, 20), range(1, 5)):
        if requests > tokens:
            continue
        most = 0
        for shares in product(range(tokens + 1), repeat=requests - 1):
            last = tokens - sum(shares)
            if last < 0:
                continue
            most = max(
                most,
                sum(max(closed(n0, q) for n0 in range(ratio)) for q in (*shares, last)),
            )
        bound = num_closings(Bucket(tokens, requests), ratio)
        assert most <= bound, (tokens, requests)
        # A first token of each request closes a window, then every ratio-th token does.
        assert most == requests + (tokens - requests) // ratio


@pytest.mark.parametrize("requests", [1, 2, 5])
def test_decode_closes_one_window_a_request(requests: int) -> None:
    assert num_closings(Bucket(requests, requests, 1), 4) == requests


# Buffers ---------------------------------------------------------------------------------------


def _shapes(plan: Plan, mode: Mode, bucket: Bucket) -> dict[str, BufferPlan]:
    return {b.name: b for b in buffers(plan, mode, bucket)}


def test_buffers_of_v4_nano() -> None:
    plan = lower(load_spec("v4-nano"), Limits(speculative="none"))
    assert closing_ratios(plan.groups) == (4, 32)
    for mode, bucket, c4, c32 in (
        (Mode.PREFILL, Bucket(256, 8), 72, 16),
        (Mode.PREFILL, Bucket(32, 8), 16, 9),
        (Mode.DECODE, Bucket(8, 8, 1), 8, 8),
        (Mode.DECODE, Bucket(1, 1, 1), 1, 1),
    ):
        T, R = bucket.num_tokens, bucket.num_reqs
        found = {name: b.shape for name, b in _shapes(plan, mode, bucket).items()}
        assert found == {
            **dict.fromkeys(("slots", "query_lens", "logits_rows", "do_sample"), (R,)),
            "step": (1,),
            "stamp": (2,),
            **dict.fromkeys(("input_ids", "positions", "is_valid_token"), (T,)),
            "closing_positions.4": (c4,),
            "closing_positions.32": (c32,),
            **{f"rope.{r}.{p}": (T, 8) for r in ("main", "compress") for p in ("cos", "sin")},
            "window.slot_mapping": (T,),
            "window.read_slots": (T, 64),
            **{f"{g}.slot_mapping": (c4,) for g in ("csa_kv", "csa_index")},
            **{f"{g}.read_slots": (T, 2048) for g in ("csa_kv", "csa_index")},
            "csa_index.num_entries": (T,),
            **{f"{g}.slot_mapping": (T,) for g in ("csa_state", "csa_index_state", "hca_state")},
            **{f"{g}.read_slots": (c4, 8) for g in ("csa_state", "csa_index_state")},
            "hca_kv.slot_mapping": (c32,),
            "hca_kv.read_slots": (T, 256),
            "hca_state.read_slots": (c32, 32),
        }


def test_the_host_writes_three_buffers() -> None:
    plan = lower(load_spec("v4-nano"), Limits())
    for mode in plan.modes:
        for bucket in mode.buckets:
            host = {
                name for name, b in _shapes(plan, mode.mode, bucket).items() if b.producer == "host"
            }
            assert host == {"slots", "query_lens", "step"}


def test_buffer_bytes() -> None:
    found = _shapes(
        lower(load_spec("v4-nano"), Limits(speculative="none")), Mode.DECODE, Bucket(8, 8, 1)
    )
    sizes = {"slots": 64, "do_sample": 8, "rope.main.cos": 8 * 8 * 4, "window.read_slots": 4096}
    assert {name: found[name].num_bytes for name in sizes} == sizes
