"""Lower a spec and limits to a Plan: cache groups, modes, buckets and the memory account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from v4graph.errors import PlanError
from v4graph.plan.types import (
    DTYPES,
    Bucket,
    GroupPlan,
    LayerPlan,
    Limits,
    MemoryLine,
    Mode,
    ModePlan,
    Plan,
)
from v4graph.plan.weights import inventory
from v4graph.spec.model import (
    CompressedGroup,
    CompressorStateGroup,
    ModelSpec,
    SlidingWindowGroup,
)

_ROW_DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def lower(spec: ModelSpec, limits: Limits) -> Plan:
    """Derive the plan of `spec`.

    Raises:
        PlanError: limits that cannot hold (lengths, buckets, memory) or a row format without an
            implementation in this version.
    """
    limits, max_model_len = _resolve(spec, limits)
    layers = tuple(LayerPlan(i, a, f) for i, (a, f) in enumerate(spec.layer_kinds))
    ropes = sorted({spec.attention[layer.attention].rope for layer in layers})
    shapes = _group_shapes(spec, limits, max_model_len, layers)
    groups = _size_pools(shapes, limits, max_model_len)
    tensors = inventory(spec)
    pools = sum(g.num_pages * g.page_bytes for g in groups)
    table = _table_bytes(groups, limits, max_model_len)
    weight_bytes = sum(t.num_bytes for t in tensors)
    return Plan(
        name=spec.name,
        limits=limits,
        max_model_len=max_model_len,
        layers=layers,
        rope_dims=tuple((name, spec.rope[name].dim) for name in ropes),
        groups=groups,
        modes=_modes(limits, groups),
        memory=(
            MemoryLine("weights (checkpoint)", weight_bytes),
            *(MemoryLine(f"pages {g.name}", g.num_pages * g.page_bytes) for g in groups),
            MemoryLine("page pools", pools),
            MemoryLine("request table", table),
        ),
        num_tensors=len(tensors),
        weight_bytes=weight_bytes,
    )


def _resolve(spec: ModelSpec, limits: Limits) -> tuple[Limits, int]:
    longest = limits.max_model_len or spec.max_position_embeddings
    if not 1 <= longest <= spec.max_position_embeddings:
        raise PlanError(
            f"max_model_len {longest}: expected 1..{spec.max_position_embeddings}, the spec's "
            "max_position_embeddings"
        )
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if getattr(limits, name) < 1:
            raise PlanError(f"{name} {getattr(limits, name)}: expected at least 1")
    if limits.dtype not in ("float32", "bfloat16"):
        raise PlanError(f"dtype {limits.dtype!r}: expected 'float32' or 'bfloat16'")
    decode = limits.decode_buckets or tuple(sorted({1, limits.max_num_seqs}))
    tokens = limits.max_num_batched_tokens
    prefill = limits.prefill_buckets or _default_prefill(tokens, limits.max_num_seqs)
    _check_buckets(decode, prefill, limits)
    return replace(limits, decode_buckets=decode, prefill_buckets=prefill), longest


def _default_prefill(tokens: int, seqs: int) -> tuple[tuple[int, int], ...]:
    """A full-sized program, and a small one so that short prompts do not pay for it."""
    small = min(32, tokens)
    sizes = {(small, min(seqs, small)), (tokens, min(seqs, tokens))}
    return tuple(sorted(sizes))


def _check_buckets(
    decode: Sequence[int], prefill: Sequence[tuple[int, int]], limits: Limits
) -> None:
    if sorted(set(decode)) != list(decode) or decode[-1] != limits.max_num_seqs or decode[0] < 1:
        raise PlanError(
            f"decode_buckets {tuple(decode)}: expected ascending sizes that end at max_num_seqs "
            f"{limits.max_num_seqs}, so that every batch has a program"
        )
    largest = prefill[-1]
    if sorted(set(prefill)) != list(prefill) or any(t < r or r < 1 for t, r in prefill):
        raise PlanError(
            f"prefill_buckets {tuple(prefill)}: expected ascending (tokens, requests) pairs with "
            "1 <= requests <= tokens"
        )
    if largest[0] != limits.max_num_batched_tokens:
        raise PlanError(
            f"prefill_buckets {tuple(prefill)}: the largest must hold max_num_batched_tokens "
            f"{limits.max_num_batched_tokens}"
        )


def _group_shapes(
    spec: ModelSpec, limits: Limits, max_model_len: int, layers: tuple[LayerPlan, ...]
) -> list[GroupPlan]:
    """Groups without their pool sizes (`num_pages` 0)."""
    width = limits.num_draft_tokens + 1
    in_flight = max(limits.max_num_batched_tokens, width)
    out = []
    for name, group in spec.cache_groups.items():
        users = tuple(
            layer.index
            for layer in layers
            if name in dict(spec.attention[layer.attention].caches).values()
        )
        if not users:
            continue
        if isinstance(group, SlidingWindowGroup):
            ratio, span, dim, every = 1, group.window, group.row.dim, 1
            dtype = _row_dtype(name, group.row.format, limits.dtype)
        elif isinstance(group, CompressedGroup):
            ratio, span, dim, every = group.ratio, 0, group.row.dim, group.ratio
            dtype = _row_dtype(name, group.row.format, limits.dtype)
        else:
            of = _fed_group(spec, group)
            halves = 2 if of.overlap else 1
            ratio, span, every = 1, of.ratio * halves, of.ratio
            dim, dtype = 2 * of.row.dim * halves, "float32"
        # R3: a range of `span` rows plus the verify width less one survives any rejection.
        kept = span + width - 1
        full = ceil(max_model_len / group.page_tokens)
        ring = ceil((kept + in_flight) / group.page_tokens) + 1
        columns = full if span == 0 else min(full, ring)
        out.append(
            GroupPlan(
                name=name,
                kind=group.kind,
                layers=users,
                row_dim=dim,
                row_dtype=dtype,
                ratio=ratio,
                closes_every=every,
                span=span,
                page_tokens=group.page_tokens,
                page_rows=group.page_tokens // ratio,
                kept_tokens=0 if span == 0 else kept,
                table_width=columns,
                pages_per_seq=columns,
                num_pages=0,
            )
        )
    return out


def _fed_group(spec: ModelSpec, state: CompressorStateGroup) -> CompressedGroup:
    of = spec.cache_groups[state.of]
    if not isinstance(of, CompressedGroup):
        raise PlanError(f"compressor_state of {state.of!r}: not a compressed group")
    return of


def _row_dtype(name: str, row_format: str, compute: str) -> str:
    if row_format == "model":
        return compute
    if row_format in _ROW_DTYPES:
        return _ROW_DTYPES[row_format]
    raise PlanError(
        f"cache group {name!r}: row format {row_format!r} has no kernel in this version; "
        "expected 'model', 'f32' or 'bf16' to run (accounts and weights can still be explained)"
    )


def _size_pools(
    shapes: list[GroupPlan], limits: Limits, max_model_len: int
) -> tuple[GroupPlan, ...]:
    """Give every group pages for the most history tokens that the memory allows.

    Sliding groups take a constant per sequence; history groups share what is left, in proportion
    to their bytes per token, with one partly filled page a sequence on top.
    """
    seqs = limits.max_num_seqs

    def sized(tokens: int) -> list[GroupPlan]:
        out = []
        for g in shapes:
            if g.kept_tokens:
                # Idle sequences hold the kept range; the tokens of one step are shared.
                resting = min(g.table_width, ceil((g.kept_tokens - 1) / g.page_tokens) + 1)
                flight = ceil(limits.max_num_batched_tokens / g.page_tokens) + seqs
                pages = min(seqs * resting + flight, seqs * g.table_width)
                pages = max(pages, g.table_width)
            else:
                pages = min(ceil(tokens / g.page_tokens) + seqs - 1, seqs * g.table_width)
            out.append(replace(g, num_pages=1 + pages))
        return out

    def cost(tokens: int) -> int:
        return sum(g.num_pages * g.page_bytes for g in sized(tokens))

    most = seqs * max_model_len
    budget = limits.kv_memory_bytes or cost(most)
    if cost(max_model_len) > budget:
        raise PlanError(
            f"kv_memory_bytes {budget:,}: one sequence of {max_model_len:,} tokens beside the "
            f"windows of {seqs} sequences needs {cost(max_model_len):,}; lower max_model_len or "
            "max_num_seqs, or give more memory"
        )
    low, high = max_model_len, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= budget else (low, middle - 1)
    return tuple(sized(low))


def _table_bytes(groups: Sequence[GroupPlan], limits: Limits, max_model_len: int) -> int:
    slots = limits.max_num_seqs + 1
    columns = sum(g.table_width for g in groups) * DTYPES["int64"]
    tokens = (max_model_len + 1) * DTYPES["int64"]
    scalars = 7 * DTYPES["int64"]
    return slots * (columns + tokens + scalars)


def _modes(limits: Limits, groups: Sequence[GroupPlan]) -> tuple[ModePlan, ...]:
    names = tuple(g.name for g in groups)
    prefill = tuple(Bucket(t, r) for t, r in limits.prefill_buckets)
    decode = tuple(Bucket(n, n) for n in limits.decode_buckets)
    return (
        ModePlan(Mode.PREFILL, 0, prefill, names, names, "last_token"),
        ModePlan(Mode.DECODE, 1, decode, names, names, "last_token"),
    )
