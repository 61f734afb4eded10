"""`v4graph explain`: what a spec means, as tables for a person or as JSON for a program."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, islice
from typing import Annotated, Any, Literal

import typer
import yaml
from rich.table import Table

from v4graph.cli.explain_budget import budget_command
from v4graph.cli.explain_plan import (
    JsonOption,
    modes_command,
    plan_command,
    print_json,
    print_table,
    program_command,
)
from v4graph.cli.options import SpecArgument
from v4graph.plan.cache import CacheAccount, cache_account
from v4graph.plan.weight_totals import PartTotals, WeightTotals, weight_totals
from v4graph.plan.weights import TensorEntry, draft_inventory, main_inventory
from v4graph.spec.load import load_spec
from v4graph.spec.model import ModelSpec, RowFormat
from v4graph.words import counted

app = typer.Typer(no_args_is_help=True, help="Say what a spec means: bytes, tensors, caches.")


ModelDtype = Literal["float32", "bfloat16"]
_DTYPE_BYTES: dict[ModelDtype, int] = {"float32": 4, "bfloat16": 2}

app.command("plan")(plan_command)
app.command("modes")(modes_command)
app.command("program")(program_command)
app.command("budget")(budget_command)


@app.command("spec")
def spec_command(spec: SpecArgument, as_json: JsonOption = False) -> None:
    """Print a spec with every default and every `like` written out."""
    explain_spec(load_spec(spec), as_json)


@app.command("weights")
def weights_command(
    spec: SpecArgument,
    as_json: JsonOption = False,
    summary: Annotated[bool, typer.Option("--summary", help="Totals only.")] = False,
) -> None:
    """List every tensor of the checkpoint with its dtype, shape and bytes."""
    explain_weights(load_spec(spec), as_json, summary)


@app.command("cache")
def cache_command(
    spec: SpecArgument,
    as_json: JsonOption = False,
    summary: Annotated[bool, typer.Option("--summary", help="Totals only.")] = False,
    tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Length of the sequence; the longest one if left out."),
    ] = None,
    rows: Annotated[
        RowFormat | None,
        typer.Option(help="Row format instead of the spec's; index rows are fp8 beside fp8_ds."),
    ] = None,
    dtype: Annotated[
        ModelDtype, typer.Option(help="Compute dtype, in which `model` rows are stored.")
    ] = "bfloat16",
    draft_tokens: Annotated[
        int, typer.Option(min=0, help="Drafts a round; widens kept ranges, adds draft layers.")
    ] = 0,
) -> None:
    """Account for the cache of one sequence: rows, pages and bytes of every group."""
    explain_cache(
        load_spec(spec),
        tokens,
        as_json,
        summary=summary,
        row_format=rows,
        dtype_bytes=_DTYPE_BYTES[dtype],
        num_draft_tokens=draft_tokens,
    )


def explain_spec(spec: ModelSpec, as_json: bool = False) -> None:
    """Print `spec` normalised; the YAML form loads again as the same spec."""
    data = spec.model_dump(mode="json", exclude_none=True)
    if as_json:
        print_json(data)
        return
    kinds = [f"{attention}+{ffn}" for attention, ffn in spec.layer_kinds]
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    lines = [f"# {counted(len(kinds), 'layer')}: " + _counted(kinds)]
    if len(runs) <= 12:
        lines.append("# in order: " + ", ".join(f"{n} x {kind}" for kind, n in runs))
    totals = weight_totals(spec).total
    lines.append(f"# {totals.num_params:,} parameters, {totals.num_bytes:,} bytes of weights")
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)
    _write_lines([*lines, text.rstrip()])


def explain_weights(spec: ModelSpec, as_json: bool = False, summary: bool = False) -> None:
    """Print the checkpoint inventory (unless `summary`) and its totals."""
    totals = weight_totals(spec)
    parts = (("main", main_inventory(spec)), ("draft", draft_inventory(spec)))
    if as_json:
        data: dict[str, Any] = {"spec": spec.name, "totals": asdict(totals)}
        for part in ("total", "main", "draft"):
            by_dtype = data["totals"][part].pop("by_dtype")
            data["totals"][part]["by_dtype"] = {
                dtype: {"num_tensors": n, "num_bytes": size}
                for dtype, (n, size) in by_dtype.items()
            }
        if not summary:
            data["tensors"] = [_tensor_json(part, e) for part, entries in parts for e in entries]
        # Indenting would take json's slow path: seconds for Pro.
        print_json(data, indent=2 if summary else None)
        return
    if not summary:
        # Plain lines: a rich table of 145,116 rows takes minutes.
        _write_lines(_tensor_lines([e for _, entries in parts for e in entries]))
    print_table(_totals_table(spec.name, totals))


def explain_cache(
    spec: ModelSpec,
    tokens: int | None = None,
    as_json: bool = False,
    *,
    summary: bool = False,
    row_format: str | None = None,
    dtype_bytes: int = 2,
    num_draft_tokens: int = 0,
) -> None:
    """Print the cache account of one sequence of `tokens` (the longest one when None).

    Raises:
        PlanError: see `cache_account`.
    """
    length = spec.max_position_embeddings if tokens is None else tokens
    account = cache_account(spec, length, row_format, num_draft_tokens, dtype_bytes)
    if as_json:
        print_json(_cache_json(account, summary))
        return
    if not summary:
        print_table(_cache_table(account))
    print_table(_cache_totals(account))


def _counted(kinds: Sequence[str]) -> str:
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


def _tensor_json(part: str, entry: TensorEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "num_bytes": entry.num_bytes,
        "part": part,
    }


def _tensor_lines(entries: Sequence[TensorEntry]) -> Iterator[str]:
    width = max(len(e.name) for e in entries)
    yield f"{'name':<{width}}  {'dtype':<7}  {'shape':<16}  {'bytes':>15}"
    for e in entries:
        shape = "x".join(map(str, e.shape))
        yield f"{e.name:<{width}}  {e.dtype:<7}  {shape:<16}  {e.num_bytes:>15,}"


def _totals_table(name: str, totals: WeightTotals) -> Table:
    table = Table(title=f"weights of {name}")
    table.add_column("part")
    for column in ("tensors", "bytes", "parameters"):
        table.add_column(column, justify="right")

    def add(label: str, part: PartTotals) -> None:
        table.add_row(label, f"{part.num_tensors:,}", f"{part.num_bytes:,}", f"{part.num_params:,}")

    for dtype, (tensors, size) in totals.total.by_dtype.items():
        table.add_row(dtype, f"{tensors:,}", f"{size:,}", "")
    table.add_section()
    add("main", totals.main)
    add("draft (mtp.N)", totals.draft)
    table.add_section()
    add("total", totals.total)
    return table


def _cache_json(account: CacheAccount, summary: bool) -> dict[str, Any]:
    data: dict[str, Any] = {
        "spec": account.spec_name,
        "tokens": account.tokens,
        "num_draft_tokens": account.num_draft_tokens,
        "dtype_bytes": account.dtype_bytes,
        "totals": {
            "bytes_per_token": account.bytes_per_token,
            "kv_bytes": account.kv_bytes,
            "history_bytes": account.history_bytes,
            "history_page_bytes": account.history_page_bytes,
            "constant_bytes": account.constant_bytes,
            "constant_page_bytes": account.constant_page_bytes,
            "sequence_bytes": account.sequence_bytes,
            "sequence_page_bytes": account.sequence_page_bytes,
        },
    }
    if not summary:
        data["groups"] = [
            {
                **asdict(group),
                "bytes_per_token": group.bytes_per_token,
                "rows": group.rows(account.tokens),
                "pages": group.pages(account.tokens),
                "sequence_bytes": group.sequence_bytes(account.tokens),
                "sequence_page_bytes": group.sequence_page_bytes(account.tokens),
            }
            for group in account.groups
        ]
    return data


def _cache_table(account: CacheAccount) -> Table:
    table = Table(
        title=f"cache of {account.spec_name}: one sequence of "
        f"{counted(account.tokens, 'token', form=',')}",
        caption="row and page bytes are of one layer; B/token and totals are of all layers",
    )
    table.add_column("group")
    table.add_column("format")
    columns = "layers,row B,page tokens,page rows,page B,kept tokens,B/token,rows B,pages B"
    for column in columns.split(","):
        table.add_column(column, justify="right")
    for g in account.groups:
        table.add_row(
            g.name,
            g.row_format,
            str(g.main_layers) + (f"+{g.draft_layers}" if g.draft_layers else ""),
            f"{g.row_bytes:,}",
            f"{g.page_tokens:,}",
            f"{g.page_rows:,}",
            f"{g.page_bytes:,}",
            f"{g.kept_tokens:,}" if g.kept_tokens else "all",
            "" if g.kept_tokens else f"{g.bytes_per_token:,.2f}",
            f"{g.sequence_bytes(account.tokens):,}",
            f"{g.sequence_page_bytes(account.tokens):,}",
        )
    return table


def _cache_totals(account: CacheAccount) -> Table:
    table = Table(title="totals of the sequence")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("GiB", justify="right")

    def add(label: str, size: int) -> None:
        table.add_row(label, f"{size:,}", f"{size / 2**30:.2f}")

    table.add_row("growth a token", f"{account.bytes_per_token:,.2f}", "")
    add("window, compressed and index rows (public figures)", account.kv_bytes)
    add("history rows", account.history_bytes)
    add("history pages", account.history_page_bytes)
    add("sliding rows, at most", account.constant_bytes)
    add("sliding pages, at most", account.constant_page_bytes)
    table.add_section()
    add("all rows", account.sequence_bytes)
    add("all pages", account.sequence_page_bytes)
    return table


def _write_lines(lines: Iterable[str]) -> None:
    rest = iter(lines)
    while chunk := list(islice(rest, 4096)):
        sys.stdout.write("\n".join(chunk) + "\n")
