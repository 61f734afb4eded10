"""The memory account of an engine, line by line, and a plan that fits what is free.

Every line is what the engine will allocate, from the plan; activations are an estimate from above
of what the reference operators hold at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from v4graph.errors import PlanError
from v4graph.plan.buffers import buffers
from v4graph.plan.lower import lower
from v4graph.plan.types import DTYPES, Bucket, GroupPlan, Limits, Mode, Plan, ring_tokens
from v4graph.plan.weight_totals import part_totals
from v4graph.plan.weights import draft_inventory, main_inventory
from v4graph.spec.model import HyperConnections, ModelSpec
from v4graph.words import counted

MEMORY_FRACTION = 0.9
"""Part of the free memory that an engine takes; the rest is for what no plan knows (libraries'
workspaces, fragments)."""


@dataclass(frozen=True)
class BudgetLine:
    """One line of the account."""

    part: str
    """`weights`, `pages`, `table`, `buffers` or `work`."""
    name: str
    num_bytes: int
    note: str = ""


def budget(spec: ModelSpec, plan: Plan) -> tuple[BudgetLine, ...]:
    """What an engine of `plan` allocates."""
    # Draft layers that do not run are not placed; without drafts of theirs not even loaded.
    running = tuple(f"mtp.{layer.index}." for layer in plan.speculation.layers)
    drafters = (t for t in draft_inventory(spec) if t.name.startswith(running))
    weights = part_totals([*main_inventory(spec), *drafters])
    size, form = weights.num_params * DTYPES[plan.limits.dtype], f"as {plan.limits.dtype}"
    if plan.limits.stored_weights:
        size, form = weights.num_bytes, "as stored"
    lines = [BudgetLine("weights", "weights", size, form)]
    for g in plan.groups:
        for who, layers in (("target", g.layers), ("draft", g.draft_layers)):
            if layers:
                each = g.num_pages * g.layer_page_bytes
                lines.append(
                    BudgetLine("pages", f"{g.name}, {who}", each * len(layers), _pool(plan, g))
                )
    table = next(m.num_bytes for m in plan.memory if m.name == "request table")
    lines.append(
        BudgetLine("table", "request table", table, f"{plan.limits.max_num_seqs} + 1 rows")
    )
    stages = {(s.mode, s.bucket) for mode, b in plan.rounds() for s in plan.stages(mode, b)}
    static = sum(b.num_bytes for mode, size in stages for b in buffers(plan, mode, size))
    lines.append(BudgetLine("buffers", "static buffers", static, counted(len(stages), "stage")))
    largest = max(stages, key=lambda s: activations(spec, plan, *s))
    tokens = counted(largest[1].num_tokens, "token")
    note = f"estimate; {largest[0].value} of {tokens}; a CUDA graph's pool"
    lines.append(BudgetLine("work", "activations", activations(spec, plan, *largest), note))
    return tuple(lines)


def total(lines: tuple[BudgetLine, ...], *parts: str) -> int:
    """Bytes of some parts; of all if none is named."""
    return sum(line.num_bytes for line in lines if not parts or line.part in parts)


def _pool(plan: Plan, g: GroupPlan) -> str:
    pages = counted(g.num_pages, "page")
    if not g.kept_tokens:
        return f"{pages} of {counted(g.page_tokens, 'token')}; history"
    ring = ring_tokens(g, plan.limits, plan.speculation)
    parts = [
        f"{counted(g.kept_tokens - 1, 'token')} behind a query",
        f"a step of {ring - (g.kept_tokens - 1) - g.draft_ahead}",
    ]
    if g.draft_ahead:
        parts.append(counted(g.draft_ahead, "guess", "guesses"))
    return f"{pages}; ring of {g.table_width}: {' + '.join(parts)}"


def activations(spec: ModelSpec, plan: Plan, mode: Mode, bucket: Bucket) -> int:
    """Bytes that one stage holds at once, from above: residual streams twice, one sublayer's
    queries and outputs, the gathered rows of the widest attention, logits, distributions."""
    if plan.mode(mode).layers == "none":
        return 0
    T, R = bucket.num_tokens, bucket.num_reqs
    size = DTYPES[plan.limits.dtype]
    streams = spec.residual.streams if isinstance(spec.residual, HyperConnections) else 1
    heads = max(a.heads * a.head_dim for a in spec.attention.values())
    groups = [g for g in plan.groups if g.name in plan.mode(mode).reads]
    rows = 0
    for g in groups:
        listed = g.span or g.max_entries
        if g.kind != "compressor_state":
            rows = max(rows, listed * (g.row_dim * size + DTYPES["float32"]))
    logits = (T if plan.mode(mode).logits == "all" else R) * spec.vocab_size * DTYPES["float32"]
    copies = 1 if plan.limits.greedy_only else 6
    return T * (2 * streams * spec.hidden_size * size + 4 * heads * size + rows) + copies * logits


@dataclass(frozen=True)
class Overcommit:
    """What a profiler that leaves the draft layers out of the account promises too much."""

    pool_bytes: int
    """Page pools that it would allocate for the same memory, draft layers' part included."""
    promised_bytes: int
    """What it believes them to take."""

    @property
    def num_bytes(self) -> int:
        """Bytes beyond the budget."""
        return self.pool_bytes - self.promised_bytes


def without_draft_groups(spec: ModelSpec, plan: Plan) -> Overcommit:
    """The account of the same limits with the draft layers' pools forgotten."""
    pools = sum(g.num_pages * g.page_bytes for g in plan.groups)
    limits = replace(plan.limits, kv_memory_bytes=plan.limits.kv_memory_bytes or pools)
    blind = lower(spec, limits, count_draft_layers=False)
    promised = sum(g.num_pages * (g.page_bytes - g.draft_page_bytes) for g in blind.groups)
    return Overcommit(sum(g.num_pages * g.page_bytes for g in blind.groups), promised)


def fit(spec: ModelSpec, limits: Limits, free_bytes: int) -> Plan:
    """The plan of `limits` with page pools that fit beside everything else in the free memory.

    Raises:
        PlanError: not even one sequence fits, or page pools of `kv_memory_bytes` do not.
    """
    plan = lower(spec, limits)
    lines = budget(spec, plan)
    usable = int(free_bytes * MEMORY_FRACTION)
    if total(lines) <= usable:
        return plan
    fixed = total(lines) - total(lines, "pages")
    free = f"{free_bytes:,} bytes are free, of which {MEMORY_FRACTION:.0%} may be used ({usable:,})"
    if fixed >= usable:
        raise PlanError(f"{free}; {_parts(lines, pages=False)} alone need {fixed:,}")
    room = usable - fixed
    if limits.kv_memory_bytes:
        raise PlanError(
            f"{free}; {_parts(lines, pages=True)} together need {total(lines):,}: set "
            f"kv_memory_bytes (--kv-memory) to {room:,} or less, or leave it out"
        )
    try:
        return lower(spec, replace(limits, kv_memory_bytes=room))
    except PlanError as e:
        raise PlanError(f"{free}; {_parts(lines, pages=False)} leave {room:,}: {e}") from e


def _parts(lines: tuple[BudgetLine, ...], pages: bool) -> str:
    """The parts of an account with their bytes, in words."""
    names = {
        "weights": "weights",
        "pages": "page pools",
        "table": "request table",
        "buffers": "static buffers",
        "work": "activations",
    }
    told = [f"{name} {total(lines, p):,}" for p, name in names.items() if pages or p != "pages"]
    return f"{', '.join(told[:-1])} and {told[-1]}"
