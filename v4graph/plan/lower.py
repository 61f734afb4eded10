"""Lower a spec and limits to a Plan: cache groups, modes, buckets and the memory account."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from v4graph.errors import PlanError
from v4graph.plan.cache import is_index, page_bytes, rotated_channels
from v4graph.plan.chain import carried_bytes, stream_shape
from v4graph.plan.modes import mode_plans
from v4graph.plan.rules import RULE_FLOATS, RULE_INTS
from v4graph.plan.types import (
    DTYPES,
    GroupPlan,
    LayerPlan,
    Limits,
    MemoryLine,
    Plan,
    SpeculationPlan,
    ring_tokens,
    unknown_tokens,
)
from v4graph.plan.verify import verify_plan
from v4graph.plan.weights import inventory
from v4graph.spec.model import (
    CompressedGroup,
    CompressorStateGroup,
    DsparkSpeculation,
    ModelSpec,
    NgramSpeculation,
    NoSpeculation,
    SlidingWindowGroup,
    SparseAttention,
)
from v4graph.words import counted

MAX_DRAFT_TOKENS = 8


def lower(spec: ModelSpec, limits: Limits, *, count_draft_layers: bool = True) -> Plan:
    """Derive the plan of `spec`.

    Args:
        count_draft_layers: False sizes pools as if draft layers had none, for showing what that
            overcommits.

    Raises:
        PlanError: limits that cannot hold (lengths, buckets, memory) or a row format that does not
            suit its group.
    """
    limits, max_model_len = _resolve(spec, limits)
    speculation = speculation_plan(spec, limits)
    limits = replace(
        limits,
        speculative=speculation.name,
        num_draft_tokens=speculation.num_draft_tokens,
    )
    layers = tuple(LayerPlan(i, a, f) for i, (a, f) in enumerate(spec.layer_kinds))
    shapes = _group_shapes(spec, limits, max_model_len, layers, speculation)
    groups = _size_pools(shapes, limits, max_model_len, speculation, count_draft_layers)
    tensors = inventory(spec)
    pools = sum(g.num_pages * g.page_bytes for g in groups)
    table = _table_bytes(spec, groups, limits, max_model_len, speculation)
    weight_bytes = sum(t.num_bytes for t in tensors)
    plan = Plan(
        name=spec.name,
        limits=limits,
        max_model_len=max_model_len,
        layers=layers,
        speculation=speculation,
        rope_dims=_rope_dims(spec, layers),
        draft_rope_dims=_rope_dims(spec, speculation.layers),
        groups=groups,
        index_groups=_index_groups(spec, layers),
        modes=mode_plans(limits, groups, speculation),
        memory=(
            MemoryLine("weights (checkpoint)", weight_bytes),
            *(MemoryLine(f"pages {g.name}", g.num_pages * g.page_bytes) for g in groups),
            MemoryLine("page pools", pools),
            MemoryLine("request table", table),
        ),
        num_tensors=len(tensors),
        weight_bytes=weight_bytes,
    )
    verify_plan(plan)
    return plan


def speculation_plan(spec: ModelSpec, limits: Limits) -> SpeculationPlan:
    """The speculative mode that `limits` choose, its number of drafts resolved."""
    name = limits.speculative or next(iter(spec.speculative), "none")
    mode = NoSpeculation(kind="none") if name == "none" else spec.speculative.get(name)
    if mode is None:
        known = ", ".join(["none", *(n for n in spec.speculative if n != "none")])
        raise PlanError(f"speculative {name!r}: {spec.name} declares {known}")
    if isinstance(mode, NoSpeculation):
        if limits.num_draft_tokens:
            raise PlanError(
                f"num_draft_tokens {limits.num_draft_tokens}: speculative mode {name!r} drafts none"
            )
        return SpeculationPlan(name, "none", 0)
    count = limits.num_draft_tokens or mode.num_draft_tokens
    if not 1 <= count <= MAX_DRAFT_TOKENS:
        raise PlanError(f"num_draft_tokens {count}: expected 1..{MAX_DRAFT_TOKENS}")
    if isinstance(mode, NgramSpeculation):
        return SpeculationPlan(name, "ngram", count, ngram=(mode.min_ngram, mode.max_ngram))
    # Draft i comes from layer i, or from the last one: with fewer drafts the rest has no work.
    every = tuple(LayerPlan(i, mode.attention, mode.ffn) for i in range(mode.num_layers))
    shape = stream_shape(spec)
    if isinstance(mode, DsparkSpeculation):
        if count > mode.block_size:
            raise PlanError(
                f"num_draft_tokens {count}: expected at most {mode.block_size}, the block_size of "
                f"speculative mode {name!r}"
            )
        return SpeculationPlan(
            name,
            "dspark",
            count,
            every,
            block_size=mode.block_size,
            noise_token_id=mode.noise_token_id,
            target_layers=tuple(mode.target_layer_ids),
            stream_shape=shape,
        )
    offset = mode.position_offset
    return SpeculationPlan(
        name, "mtp", count, every[:count], position_offset=offset, stream_shape=shape
    )


def _rope_dims(spec: ModelSpec, layers: Sequence[LayerPlan]) -> tuple[tuple[str, int], ...]:
    names = sorted({spec.attention[layer.attention].rope for layer in layers})
    return tuple((name, spec.rope[name].dim) for name in names)


def _index_groups(spec: ModelSpec, layers: Sequence[LayerPlan]) -> tuple[str, ...]:
    kinds = {layer.attention for layer in layers}
    return tuple(
        sorted(
            {a.caches.index for k in kinds if isinstance(a := spec.attention[k], SparseAttention)}
        )
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
    if limits.cached_boundaries < 0:
        raise PlanError(f"cached_boundaries {limits.cached_boundaries}: expected 0 or more")
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
    spec: ModelSpec,
    limits: Limits,
    max_model_len: int,
    layers: tuple[LayerPlan, ...],
    speculation: SpeculationPlan,
) -> list[GroupPlan]:
    """Groups without their pool sizes (`num_pages` 0)."""

    def users_of(name: str, of: tuple[LayerPlan, ...]) -> tuple[int, ...]:
        return tuple(
            layer.index
            for layer in of
            if name in dict(spec.attention[layer.attention].caches).values()
        )

    out = []
    for name, group in spec.cache_groups.items():
        users, draft_users = users_of(name, layers), users_of(name, speculation.layers)
        if not users and not draft_users:
            continue
        ahead, back = speculation.draft_ahead, speculation.num_chained
        ahead, back = (ahead, back) if draft_users else (0, 0)
        if isinstance(group, SlidingWindowGroup):
            ratio, span, dim, every = 1, group.window, group.row.dim, 1
            row_format = _row_format(spec, name, group.row.format, limits.dtype)
        elif isinstance(group, CompressedGroup):
            ratio, span, dim, every = group.ratio, 0, group.row.dim, group.ratio
            row_format = _row_format(spec, name, group.row.format, limits.dtype)
        else:
            of = _fed_group(spec, group)
            halves = 2 if of.overlap else 1
            ratio, span, every = 1, of.ratio * halves, of.ratio
            dim, row_format = 2 * of.row.dim * halves, "f32"
        rope_dim = rotated_channels(spec, name) if row_format == "fp8_ds" else 0
        rows = group.page_tokens // ratio
        full = ceil(max_model_len / group.page_tokens)
        shape = GroupPlan(
            name=name,
            kind=group.kind,
            layers=users,
            draft_layers=draft_users,
            row_dim=dim,
            row_format=row_format,
            rope_dim=rope_dim,
            layer_page_bytes=page_bytes(row_format, rows, dim, rope_dim),
            ratio=ratio,
            closes_every=every,
            span=span,
            page_tokens=group.page_tokens,
            page_rows=rows,
            kept_tokens=span and span + back,
            draft_ahead=ahead,
            table_width=full,
            pages_per_seq=full,
            num_pages=0,
        )
        if span:
            ring = shape.touched_pages(ring_tokens(shape, limits, speculation))
            columns = min(full, ring)
            shape = replace(shape, table_width=columns, pages_per_seq=columns)
        out.append(shape)
    return out


def _fed_group(spec: ModelSpec, state: CompressorStateGroup) -> CompressedGroup:
    of = spec.cache_groups[state.of]
    if not isinstance(of, CompressedGroup):
        raise PlanError(f"compressor_state of {state.of!r}: not a compressed group")
    return of


def _row_format(spec: ModelSpec, name: str, row_format: str, compute: str) -> str:
    if row_format == "model":
        return {"float32": "f32", "bfloat16": "bf16"}[compute]
    packed = "fp8" if is_index(spec, name) else "fp8_ds"
    if row_format not in ("f32", "bf16", packed):
        what = "index" if packed == "fp8" else "key-value"
        raise PlanError(
            f"cache group {name!r}: row format {row_format!r} of {what} rows; expected 'model', "
            f"'f32', 'bf16' or {packed!r}"
        )
    return row_format


def _size_pools(
    shapes: list[GroupPlan],
    limits: Limits,
    max_model_len: int,
    speculation: SpeculationPlan,
    count_draft_layers: bool,
) -> tuple[GroupPlan, ...]:
    """Give every group pages for the most history tokens that the memory allows.

    Sliding groups take a constant per sequence; history groups share what is left, in proportion
    to their bytes per token, with one partly filled page a sequence on top. Boundaries that the
    prefix cache may keep are pages of sliding groups on top of those.
    """
    seqs = limits.max_num_seqs
    width = speculation.verify_width + unknown_tokens(limits, speculation)

    def sized(tokens: int, boundaries: int) -> list[GroupPlan]:
        out = []
        for g in shapes:
            ahead = width + g.draft_ahead
            if g.kept_tokens:
                # Sequences that decode hold the kept range and the look-ahead; the tokens of one
                # prefill step are shared.
                held = g.touched_pages(g.kept_tokens - 1 + ahead)
                flight = ceil(limits.max_num_batched_tokens / g.page_tokens) + seqs
                pages = min(seqs * min(held, g.table_width) + flight, seqs * g.table_width)
                pages = max(pages, g.table_width)
                if g.carried_tokens:
                    pages += boundaries * g.touched_pages(g.carried_tokens)
            else:
                partly = seqs * (1 + ceil((ahead - 1) / g.page_tokens)) - 1
                pages = min(ceil(tokens / g.page_tokens) + partly, seqs * g.table_width)
            out.append(replace(g, num_pages=1 + pages))
        return out

    def cost(tokens: int, boundaries: int) -> int:
        return sum(g.num_pages * _page(g, count_draft_layers) for g in sized(tokens, boundaries))

    most, kept = seqs * max_model_len, limits.cached_boundaries
    budget = limits.kv_memory_bytes or cost(most, kept)
    each = cost(most, 1) - cost(most, 0)
    if limits.kv_memory_bytes and each:
        room = min(budget // 8, budget - cost(max_model_len, 0))
        kept = max(min(kept, room // each), 0)
    if cost(max_model_len, kept) > budget:
        least = sized(max_model_len, kept)
        raise PlanError(
            f"page pools of {budget:,} bytes (kv_memory_bytes, --kv-memory): "
            f"{_told(least, max_model_len, seqs, count_draft_layers)}; lower max_model_len or "
            "max_num_seqs, or give more memory"
        )
    low, high = max_model_len, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle, kept) <= budget else (low, middle - 1)
    return tuple(sized(low, kept))


def _page(g: GroupPlan, count_draft_layers: bool) -> int:
    """Bytes of a page as the account counts them."""
    return g.page_bytes - (0 if count_draft_layers else g.draft_page_bytes)


def _told(groups: Sequence[GroupPlan], num_tokens: int, seqs: int, count_draft_layers: bool) -> str:
    """What the least page pools are for, part by part."""
    history = partly = windows = null = 0
    for g in groups:
        page, pages = _page(g, count_draft_layers), g.num_pages - 1
        whole = 0 if g.kept_tokens else ceil(num_tokens / g.page_tokens)
        null += page
        history += whole * page
        windows += pages * page if g.kept_tokens else 0
        partly += 0 if g.kept_tokens else (pages - whole) * page
    return (
        f"one sequence of {counted(num_tokens, 'token', form=',')} takes {history:,}, the windows "
        f"of {counted(seqs, 'sequence')} {windows:,}, the partly filled pages of the others "
        f"{partly:,}, and a null page of every group {null:,}: together "
        f"{history + windows + partly + null:,}"
    )


def _table_bytes(
    spec: ModelSpec,
    groups: Sequence[GroupPlan],
    limits: Limits,
    max_model_len: int,
    speculation: SpeculationPlan,
) -> int:
    slots, k = limits.max_num_seqs + 1, limits.num_draft_tokens
    columns = sum(g.table_width for g in groups) * DTYPES["int64"]
    tokens = (max_model_len + 1) * DTYPES["int64"]
    scalars = (10 + k) * DTYPES["int64"] + carried_bytes(speculation, limits.dtype)
    stored = speculation.layers and not limits.greedy_only
    draft_probs = 0 if not stored else k * spec.vocab_size * DTYPES["float32"]
    rules = RULE_INTS * DTYPES["int64"] + RULE_FLOATS * DTYPES["float32"]
    rules = rules if limits.logits_processing else 0
    return slots * (columns + tokens + scalars + draft_probs + rules)
