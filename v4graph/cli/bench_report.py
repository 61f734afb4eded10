"""What `v4graph bench acceptance` tells of engine and recompute, as JSON and as tables."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from v4graph.cli.explain_plan import print_table, table_of
from v4graph.words import counted

if TYPE_CHECKING:
    from v4graph.engine.rounds import DraftCounts, RoundRecord
    from v4graph.model.rounds import Difference

NEAR_TIE = 1e-4


@dataclass
class Measured:
    """One engine run at one number of drafts."""

    k: int
    max_model_len: int
    counts: DraftCounts
    """Of the engine."""
    own_counts: DraftCounts
    """Of the recompute: its own drafts and tokens in the same rounds."""
    sequences: dict[str, list[int]]
    """Prompt and output by request, with all that the last round committed."""
    rounds: dict[str, list[RoundRecord]]
    """By request, in order."""
    seconds_per_round: float
    tokens_per_s: float
    differences: list[Difference] = field(default_factory=list)


def figures(counts: DraftCounts) -> dict[str, Any]:
    """Sums and rates, each under its own name."""
    pairs = zip(counts.accepted_at, counts.proposed_at, strict=True)
    return {
        "rounds": counts.rounds,
        "drafts": counts.drafts,
        "accepted_drafts": counts.accepted,
        "tokens_per_round": round(counts.tokens_per_round, 4),
        "draft_acceptance": round(counts.draft_acceptance, 4),
        "approximate_rate": round(counts.approximate_rate, 4),
        "acceptance_by_position": [round(a / p, 4) if p else 0.0 for a, p in pairs],
    }


def result_of(r: Measured) -> dict[str, Any]:
    """The engine's figures, the recompute's over the same rounds, and every difference."""
    compared = sum(len(x.drafts) + len(x.tokens) for own in r.rounds.values() for x in own)
    told = [_told(d) for d in r.differences]
    near = [d.gap < NEAR_TIE for d in r.differences]
    return {
        "num_draft_tokens": r.k,
        **figures(r.counts),
        "recompute": figures(r.own_counts),
        "ms_per_round": round(1000 * r.seconds_per_round, 3),
        "tokens_per_s": round(r.tokens_per_s, 1),
        "compared_tokens": compared,
        "near_ties": [d for d, tie in zip(told, near, strict=True) if tie],
        "differences": [d for d, tie in zip(told, near, strict=True) if not tie],
    }


def _told(difference: Difference) -> dict[str, Any]:
    """A difference; JSON has no infinity, so a gap that no logits tell is null."""
    gap = difference.gap
    return {**asdict(difference), "gap": gap if math.isfinite(gap) else None}


def print_report(data: dict[str, Any]) -> None:
    """Two rows a number of drafts, engine and recompute; then the conventions, if there are any."""
    table = table_of(
        f"acceptance of {data['spec']}, speculative mode {data['speculative']}, on "
        f"{data['device']}: {counted(data['prompts'], 'prompt')}, "
        f"{counted(data['max_tokens'], 'token')} each, greedy",
        "k,counted by",
        "rounds,tokens per round,draft acceptance,approximate rate,by position,"
        "ms per request and round,tokens/s,compared,near-ties,differences",
        "recompute: its own drafts and tokens, without any cache, behind the known tokens of the "
        "same rounds;\ntokens per round: the main model's own token included; draft acceptance: "
        "accepted over proposed drafts;\napproximate rate: 1 - 1 / tokens per round; compared: "
        "drafts and tokens, one by one",
    )
    for r in data["results"]:
        table.add_row(
            str(r["num_draft_tokens"]),
            "engine",
            *_rates(r),
            f"{r['ms_per_round']:.3f}",
            f"{r['tokens_per_s']:.1f}",
            f"{r['compared_tokens']:,}",
            str(len(r["near_ties"])),
            str(len(r["differences"])),
        )
        table.add_row("", "recompute", *_rates(r["recompute"]), end_section=True)
    print_table(table)
    if "variants" in data:
        _print_variants(data["variants"])
    for r in data["results"]:
        for d in (*r["near_ties"], *r["differences"])[:20]:
            apart = "" if d["gap"] is None else f", logits {d['gap']:.2e} apart"
            typer.echo(
                f"k={r['num_draft_tokens']} {d['where']} {d['index']} behind {d['num_tokens']} "
                f"tokens: engine {d['found']}, recompute {d['expected']}{apart}"
            )


def _rates(r: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{r['rounds']:,}",
        f"{r['tokens_per_round']:.4f}",
        f"{r['draft_acceptance']:.4f}",
        f"{r['approximate_rate']:.4f}",
        " ".join(f"{x:.3f}" for x in r["acceptance_by_position"]),
    )


def _print_variants(variants: list[dict[str, Any]]) -> None:
    k = variants[0]["num_draft_tokens"]
    table = table_of(
        f"recompute at k = {k} under other conventions of the draft layer's rows",
        "convention",
        "rounds,tokens per round,draft acceptance",
        f"over the engine's rounds at k = {k}, all drafted anew: the first row is that of the "
        "recompute above",
    )
    for i, v in enumerate(variants):
        mask = "masked" if v["mask_position_zero"] else "not masked"
        name = (
            f"position 0 {mask}, row t rotated as t + {v['position_offset']}, with the token at "
            f"t + {v['token_shift']}"
        )
        rounds, per_round, acceptance, *_ = _rates(v)
        table.add_row(name + (" (the spec's)" if i == 0 else ""), rounds, per_round, acceptance)
    print_table(table)
