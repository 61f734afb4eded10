"""The forward modes of a plan: buckets, and the cache groups that each mode reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from v4graph.plan.chain import chain_mode
from v4graph.plan.types import Bucket, GroupPlan, Limits, Mode, ModePlan, SpeculationPlan


def mode_plans(
    limits: Limits, groups: Sequence[GroupPlan], speculation: SpeculationPlan
) -> tuple[ModePlan, ...]:
    """Every forward mode of the plan, its programs' sizes and what its steps read and write."""
    main = tuple(g.name for g in groups if g.layers)
    draft = tuple(g.name for g in groups if g.draft_layers)
    width, sizes = speculation.verify_width, limits.decode_buckets
    prefill = tuple(Bucket(t, r) for t, r in limits.prefill_buckets)
    verify = tuple(Bucket(n * width, n, width) for n in sizes)
    single = tuple(Bucket(n, n, 1) for n in sizes)
    kept = "all" if speculation.layers else "none"
    out = [ModePlan(Mode.PREFILL, "main", 0, prefill, main, main, "last_token", kept)]
    if width == 1:
        out.append(ModePlan(Mode.DECODE, "main", 1, single, main, main, "last_token", "none"))
    else:
        out.append(ModePlan(Mode.TARGET_VERIFY, "main", width, verify, main, main, "all", kept))
    extend_sizes = (*prefill, *verify)
    single_sizes = sorted({*sizes, *(r for _, r in limits.prefill_buckets)})
    if speculation.block_size:
        out += _block_modes(speculation.block_size, extend_sizes, single_sizes, draft)
    elif speculation.layers:
        out += _layer_modes(speculation, extend_sizes, single_sizes, draft)
    out.append(ModePlan(Mode.IDLE, "none", 0, (Bucket(1, 1, 1),), (), (), "none", "none"))
    return tuple(out)


def _layer_modes(
    speculation: SpeculationPlan,
    extend: tuple[Bucket, ...],
    requests: list[int],
    groups: tuple[str, ...],
) -> Iterator[ModePlan]:
    """MTP: the layers run over the round's rows one behind the other and draft once each, the last
    one then once for each more draft."""
    newest: Literal["last_token"] = "last_token"
    kept = "all" if speculation.num_chained else newest
    yield ModePlan(Mode.DRAFT_EXTEND, "draft", 0, extend, groups, groups, newest, kept)
    yield from chain_mode(speculation, extend, groups)
    if speculation.draft_ahead:
        single = tuple(Bucket(n, n, 1) for n in requests)
        yield ModePlan(Mode.DRAFT_DECODE, "draft", 1, single, groups, groups, newest, newest)


def _block_modes(
    size: int, extend: tuple[Bucket, ...], requests: list[int], groups: tuple[str, ...]
) -> Iterator[ModePlan]:
    """DSpark: context rows of the round's tokens are written; a block reads them, and keeps none
    of its own."""
    yield ModePlan(Mode.DRAFT_EXTEND, "draft", 0, extend, (), groups, "none", "none")
    blocks = tuple(Bucket(n * size, n, size) for n in requests)
    yield ModePlan(Mode.DRAFT_DECODE, "draft", size, blocks, groups, (), "all", "none")
