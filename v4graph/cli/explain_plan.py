"""`v4graph explain plan`, `modes` and `program`: what follows from a spec and limits."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from v4graph.cli.options import (
    Dtype,
    DtypeOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    NumDraftTokensOption,
    OverlapOption,
    SpecArgument,
    SpeculativeOption,
)
from v4graph.errors import PlanError
from v4graph.plan.buffers import buffers
from v4graph.plan.lower import lower
from v4graph.plan.types import DTYPES, Bucket, BufferPlan, GroupPlan, Limits, ModePlan, Plan
from v4graph.plan.weight_totals import weight_totals
from v4graph.spec.load import load_spec, spec_path
from v4graph.spec.model import ModelSpec
from v4graph.words import counted

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from v4graph.program.build import ProgramSet

MAX_RANDOM_BYTES = 10**9
"""Without a checkpoint, `program` makes up weights of at most this size."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON with raw integers.")]
MaxNumBatchedTokensOption = Annotated[
    int, typer.Option(min=1, help="Tokens that one step computes at most.")
]


def plan_command(
    spec: SpecArgument,
    as_json: JsonOption = False,
    max_num_seqs: MaxNumSeqsOption = Limits.max_num_seqs,
    max_num_batched_tokens: MaxNumBatchedTokensOption = Limits.max_num_batched_tokens,
    max_model_len: MaxModelLenOption = None,
    dtype: DtypeOption = "float32",
    speculative: SpeculativeOption = None,
    num_draft_tokens: NumDraftTokensOption = None,
    overlap: OverlapOption = True,
) -> None:
    """Show the plan: layers, cache groups with their pools, buckets, memory."""
    limits = limits_of(
        (max_num_seqs, max_num_batched_tokens, max_model_len, dtype),
        (speculative, num_draft_tokens, overlap),
    )
    plan = lower(load_spec(spec), limits)
    if as_json:
        print_json(_plan_json(plan))
        return
    for table in (_layer_table(plan), _group_table(plan), _bucket_table(plan), _memory(plan)):
        print_table(table)


def modes_command(
    spec: SpecArgument,
    as_json: JsonOption = False,
    max_num_seqs: MaxNumSeqsOption = Limits.max_num_seqs,
    max_num_batched_tokens: MaxNumBatchedTokensOption = Limits.max_num_batched_tokens,
    max_model_len: MaxModelLenOption = None,
    dtype: DtypeOption = "float32",
    speculative: SpeculativeOption = None,
    num_draft_tokens: NumDraftTokensOption = None,
    overlap: OverlapOption = True,
) -> None:
    """List every static buffer of every mode and bucket."""
    limits = limits_of(
        (max_num_seqs, max_num_batched_tokens, max_model_len, dtype),
        (speculative, num_draft_tokens, overlap),
    )
    plan = lower(load_spec(spec), limits)
    if as_json:
        print_json({"spec": plan.name, "modes": [_mode_json(plan, m) for m in plan.modes]})
        return
    for mode in plan.modes:
        for bucket in mode.buckets:
            print_table(_buffer_table(mode, bucket, buffers(plan, mode.mode, bucket)))


def program_command(
    spec: SpecArgument,
    as_json: JsonOption = False,
    max_num_seqs: MaxNumSeqsOption = Limits.max_num_seqs,
    max_num_batched_tokens: MaxNumBatchedTokensOption = Limits.max_num_batched_tokens,
    max_model_len: MaxModelLenOption = None,
    dtype: DtypeOption = "float32",
    speculative: SpeculativeOption = None,
    num_draft_tokens: NumDraftTokensOption = None,
    overlap: OverlapOption = True,
) -> None:
    """Compile every program and report its regions; random weights if there is no checkpoint."""
    limits = limits_of(
        (max_num_seqs, max_num_batched_tokens, max_model_len, dtype),
        (speculative, num_draft_tokens, overlap),
    )
    loaded = load_spec(spec)
    programs, weights = _compiled(spec, loaded, lower(loaded, limits), dtype)
    data = _program_json(programs, weights)
    if as_json:
        print_json(data)
        return
    print_table(_region_table(data))
    print_table(_program_table(data))


def print_table(table: Table) -> None:
    """Print a table, whole even where there is no terminal to say how wide it may be."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)


def print_json(data: Any, indent: int | None = 2) -> None:
    """Print plain values as JSON."""
    sys.stdout.write(json.dumps(data, indent=indent) + "\n")


def limits_of(
    sizes: tuple[int, int, int | None, Dtype],
    speculation: tuple[str | None, int | None, bool],
    kv_memory_bytes: int = 0,
) -> Limits:
    """Limits from (sequences, step tokens, longest, dtype) and (mode, drafts, overlap)."""
    seqs, tokens, longest, dtype = sizes
    name, num_draft_tokens, overlap = speculation
    return Limits(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        max_model_len=longest or 0,
        dtype=dtype,
        kv_memory_bytes=kv_memory_bytes,
        speculative=name or "",
        num_draft_tokens=num_draft_tokens or 0,
        overlap=overlap,
    )


# Plan ------------------------------------------------------------------------------------------


def _pool_bytes(g: GroupPlan) -> int:
    return g.num_pages * g.page_bytes


def _plan_json(plan: Plan) -> dict[str, Any]:
    groups = [
        {**asdict(g), "page_bytes": g.page_bytes, "num_bytes": _pool_bytes(g)} for g in plan.groups
    ]
    return {**plan.to_json(), "groups": groups}


def _layer_table(plan: Plan) -> Table:
    table = table_of(
        f"plan of {plan.name}: {counted(len(plan.layers), 'layer')}, sequences of up to "
        f"{counted(plan.max_model_len, 'token', form=',')}",
        "layers,attention,ffn",
    )
    for (attention, ffn), run in groupby(plan.layers, lambda layer: (layer.attention, layer.ffn)):
        indices = [layer.index for layer in run]
        table.add_row(_span(indices), attention, ffn)
    for layer in plan.speculation.layers:
        table.add_row(f"{plan.speculation.name} {layer.index}", layer.attention, layer.ffn)
    return table


def _span(indices: list[int]) -> str:
    first, last = indices[0], indices[-1]
    return str(first) if first == last else f"{first}-{last}"


def _group_table(plan: Plan) -> Table:
    table = table_of(
        "cache groups",
        "group,kind,row format",
        "layers,draft layers,row dim,ratio,page tokens,page rows,kept tokens,table width,pages,"
        "bytes",
        "bytes are of all layers; one page of each pool is the null page",
    )
    for g in plan.groups:
        kept = f"{g.kept_tokens:,}" if g.kept_tokens else "all"
        users = (len(g.layers), len(g.draft_layers))
        counts = (*users, g.row_dim, g.ratio, g.page_tokens, g.page_rows)
        sizes = (g.table_width, g.num_pages, _pool_bytes(g))
        table.add_row(g.name, g.kind, g.row_format, *_figures(counts), kept, *_figures(sizes))
    return table


def _bucket_table(plan: Plan) -> Table:
    k = plan.speculation.num_draft_tokens
    table = table_of(
        "modes",
        "mode,layers,buckets (tokens x requests),logits,streams,then",
        caption=f"speculative mode {plan.speculation.name}, {k} draft tokens a round",
    )
    firsts = {mode for mode, _ in plan.rounds()}
    for mode in plan.modes:
        sizes = ", ".join(f"{b.num_tokens}x{b.num_reqs}" for b in mode.buckets)
        then = ""
        if mode.mode in firsts:
            stages = plan.stages(mode.mode, mode.buckets[0])[1:]
            then = ", ".join(f"{s.repeat} x {s.mode.value}" for s in stages)
        table.add_row(mode.mode.value, mode.layers, sizes, mode.logits, mode.streams, then)
    return table


def _memory(plan: Plan) -> Table:
    table = table_of("memory", "what", "bytes,MiB")
    for line in plan.memory:
        table.add_row(line.name, f"{line.num_bytes:,}", f"{line.num_bytes / 2**20:,.2f}")
    return table


# Modes -----------------------------------------------------------------------------------------


def _mode_json(plan: Plan, mode: ModePlan) -> dict[str, Any]:
    programs = []
    for bucket in mode.buckets:
        entries = buffers(plan, mode.mode, bucket)
        programs.append(
            {
                **asdict(bucket),
                "num_bytes": sum(b.num_bytes for b in entries),
                "buffers": [{**asdict(b), "num_bytes": b.num_bytes} for b in entries],
            }
        )
    return {**asdict(mode), "buckets": programs}


def _buffer_table(mode: ModePlan, bucket: Bucket, entries: tuple[BufferPlan, ...]) -> Table:
    width = mode.tokens_per_request
    each = counted(width, "token") if width else "any number of tokens"
    table = table_of(
        f"{mode.mode.value}: {counted(bucket.num_tokens, 'token')}, "
        f"{counted(bucket.num_reqs, 'request')}",
        "buffer,dtype,shape,producer",
        "bytes",
        f"{each} a request; {mode.layers} layers; logits: {mode.logits}; streams: "
        f"{mode.streams}\nreads {', '.join(mode.reads)}\n"
        f"writes {', '.join(mode.writes)}",
    )
    for b in entries:
        shape = "x".join(map(str, b.shape))
        table.add_row(b.name, b.dtype, shape, b.producer, f"{b.num_bytes:,}")
    table.add_section()
    table.add_row("total", "", "", "", f"{sum(b.num_bytes for b in entries):,}")
    return table


# Programs --------------------------------------------------------------------------------------


def _compiled(name: str, spec: ModelSpec, plan: Plan, dtype: Dtype) -> tuple[ProgramSet, str]:
    """Every program of the plan, warmed up, and where its weights came from."""
    directory = spec_path(name).with_suffix("")
    size = weight_totals(spec).total.num_params * DTYPES[dtype]
    if not directory.is_dir() and size > MAX_RANDOM_BYTES:
        raise PlanError(
            f"{spec.name}: no checkpoint directory {directory}, and {size:,} bytes of weights are "
            f"too many to make up (at most {MAX_RANDOM_BYTES:,}); `explain plan` and `explain "
            "modes` need none"
        )
    # Not before the checks above: this imports torch.
    from v4graph.engine.engine import EngineConfig
    from v4graph.program.build import ProgramSet, build_state
    from v4graph.program.compiler import Compiler

    params = _params(spec, directory if directory.is_dir() else None, dtype, plan.speculation.name)
    state = build_state(spec, plan, params, EngineConfig().torch_device(), checked=False)
    programs = ProgramSet(state, Compiler(), checked=False)
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("compiling") as status:
            programs.warm_up(
                lambda stage, done, total, what="", /: status.update(
                    f"{stage} {what} {done}/{total}"
                )
            )
    else:
        programs.warm_up()
    return programs, "checkpoint" if directory.is_dir() else "random"


def _params(
    spec: ModelSpec, directory: Path | None, dtype: Dtype, speculative: str
) -> dict[str, Tensor]:
    import torch

    from v4graph.model.loader import load_params
    from v4graph.model.params import random_params

    torch_dtype = getattr(torch, dtype)
    if directory is None:
        return random_params(spec, dtype=torch_dtype)
    return load_params(spec, directory, torch_dtype, speculative=speculative)


def _program_json(programs: ProgramSet, weights: str) -> dict[str, Any]:
    plan, stats = programs.state.plan, programs.compiler.stats
    return {
        "spec": plan.name,
        "weights": weights,
        "regions": [
            {
                "name": name,
                "compilations": s.compilations,
                "num_ops": s.num_ops,
                "seconds": round(s.seconds, 3),
                # A region is a full graph: a break would have raised.
                "graph_breaks": 0,
            }
            for name, s in stats.items()
        ],
        # In the order in which dispatch tries them: the first that holds a batch runs it.
        "programs": [
            {
                "mode": mode.value,
                **asdict(bucket),
                "stages": [
                    {"mode": s.mode.value, **asdict(s.bucket), "repeat": s.repeat}
                    for s in plan.stages(mode, bucket)
                ],
                "calls_per_step": programs.programs[mode, bucket].calls_per_step(),
            }
            for mode, bucket in plan.rounds()
        ],
        "recompilations": programs.compiler.recompilations,
    }


def _region_table(data: dict[str, Any]) -> Table:
    table = table_of(
        f"compiled regions of {data['spec']} ({data['weights']} weights)",
        "region",
        "compilations,graph ops,compile s,graph breaks",
    )
    for r in data["regions"]:
        counts = _figures((r["compilations"], r["num_ops"]))
        table.add_row(r["name"], *counts, f"{r['seconds']:.2f}", str(r["graph_breaks"]))
    table.add_section()
    totals = [sum(r[key] for r in data["regions"]) for key in ("compilations", "num_ops")]
    seconds = sum(r["seconds"] for r in data["regions"])
    table.add_row("total", *_figures(totals), f"{seconds:.2f}", "0")
    return table


def _program_table(data: dict[str, Any]) -> Table:
    table = table_of(
        "programs",
        "mode",
        "tokens,requests,calls a greedy round,calls a sampling round",
        "of a mode, the first program that holds a batch runs it\n"
        f"recompilations after warm-up: {data['recompilations']}",
    )
    for p in data["programs"]:
        calls = p["calls_per_step"]
        sizes = _figures((p["num_tokens"], p["num_reqs"]))
        # Nothing is recorded of a program that calls next to nothing (idle) or samples nothing.
        variants = [f"{calls[v]:,}" if v in calls else "-" for v in ("greedy", "sample")]
        table.add_row(p["mode"], *sizes, *variants)
    return table


def table_of(title: str, left: str, right: str = "", caption: str | None = None) -> Table:
    """A table with comma-separated column names, those on the right right-aligned."""
    table = Table(title=title, caption=caption)
    for column in left.split(","):
        table.add_column(column)
    for column in right.split(",") if right else ():
        table.add_column(column, justify="right")
    return table


def _figures(values: Any) -> list[str]:
    return [f"{value:,}" for value in values]
