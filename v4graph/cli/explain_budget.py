"""`v4graph explain budget`: where an engine's memory goes, and what fits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from v4graph.cli.explain_plan import (
    JsonOption,
    MaxNumBatchedTokensOption,
    limits_of,
    print_json,
    print_table,
    table_of,
)
from v4graph.cli.options import (
    DtypeOption,
    KvMemoryOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    NumDraftTokensOption,
    OverlapOption,
    SpecArgument,
    SpeculativeOption,
    num_bytes,
)
from v4graph.plan.budget import MEMORY_FRACTION, budget, fit, total, without_draft_groups
from v4graph.plan.lower import lower
from v4graph.plan.types import Limits, Plan
from v4graph.spec.load import load_spec
from v4graph.words import counted


def budget_command(
    spec: SpecArgument,
    as_json: JsonOption = False,
    max_num_seqs: MaxNumSeqsOption = Limits.max_num_seqs,
    max_num_batched_tokens: MaxNumBatchedTokensOption = Limits.max_num_batched_tokens,
    max_model_len: MaxModelLenOption = None,
    dtype: DtypeOption = "float32",
    speculative: SpeculativeOption = None,
    num_draft_tokens: NumDraftTokensOption = None,
    overlap: OverlapOption = True,
    kv_memory: KvMemoryOption = None,
    free: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the device, such as 139GiB.")
    ] = None,
) -> None:
    """The memory account, line by line; what the draft layers' pools take of it; what fits."""
    loaded = load_spec(spec)
    limits = limits_of(
        (max_num_seqs, max_num_batched_tokens, max_model_len, dtype),
        (speculative, num_draft_tokens, overlap),
        num_bytes("--kv-memory", kv_memory),
    )
    memory = num_bytes("--free", free)
    plan = fit(loaded, limits, memory) if memory else lower(loaded, limits)
    lines = budget(loaded, plan)
    blind = without_draft_groups(loaded, plan)
    data: dict[str, Any] = {
        "spec": plan.name,
        "speculative": plan.speculation.name,
        "num_draft_tokens": plan.speculation.num_draft_tokens,
        "free_bytes": memory or None,
        "lines": [asdict(line) for line in lines],
        "total_bytes": total(lines),
        "page_bytes": total(lines, "pages"),
        "fits": _fits(plan),
        "without_draft_groups": {**asdict(blind), "overcommit_bytes": blind.num_bytes},
    }
    if as_json:
        print_json(data)
        return
    table = table_of(
        f"memory of {plan.name}: {counted(plan.limits.max_num_seqs, 'sequence')}, speculative "
        f"mode {plan.speculation.name}, "
        f"{counted(plan.speculation.num_draft_tokens, 'draft token')}",
        "part,what,how",
        "bytes,MiB",
        f"of free memory {MEMORY_FRACTION:.0%} may be used" if memory else None,
    )
    for line in lines:
        table.add_row(line.part, line.name, line.note, f"{line.num_bytes:,}", _mib(line.num_bytes))
    table.add_section()
    table.add_row("total", "", "", f"{total(lines):,}", _mib(total(lines)))
    print_table(table)
    for row in data["fits"]:
        typer.echo(
            f"{counted(row['num_tokens'], 'token', form=',')} each: "
            f"{counted(row['num_seqs'], 'sequence')} at once"
        )
    if blind.num_bytes:
        typer.echo(
            f"page pools sized without the draft layers would take {blind.pool_bytes:,} bytes "
            f"where {blind.promised_bytes:,} are accounted for: {blind.num_bytes:,} too many"
        )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.2f}"


def _fits(plan: Plan) -> list[dict[str, int]]:
    """How many sequences of some lengths the pools hold at once, none of them preempted."""
    out = []
    behind = plan.speculation.verify_width + plan.unknown_tokens
    for tokens in sorted({plan.max_model_len >> shift for shift in (0, 1, 2, 4)} - {0}):
        seqs = plan.limits.max_num_seqs
        for g in plan.groups:
            longest = min(tokens + behind + g.draft_ahead, plan.max_model_len)
            need = g.pages_for(longest)
            if g.kept_tokens:
                need = min(need, g.touched_pages(g.kept_tokens + behind + g.draft_ahead - 1))
            seqs = min(seqs, (g.num_pages - 1) // need)
        out.append({"num_tokens": tokens, "num_seqs": seqs})
    return out
