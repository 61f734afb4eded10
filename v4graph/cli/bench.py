"""`v4graph bench acceptance`: the engine's speculative rounds held against a full recompute."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from v4graph.cli.explain_plan import print_json, print_table, table_of
from v4graph.cli.options import (
    CheckedOption,
    CompileOption,
    DeviceOption,
    MaxNumSeqsOption,
    OverlapOption,
    SpecArgument,
    SpeculativeOption,
    WeightsOption,
    load_tokenizer,
    weights_directory,
)
from v4graph.errors import PlanError, RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from v4graph.engine.engine import EngineConfig
    from v4graph.engine.rounds import DraftCounts, RoundRecord
    from v4graph.model.rounds import Difference
    from v4graph.spec.model import DsparkSpeculation, ModelSpec, MtpSpeculation

NEAR_TIE = 1e-4
app = typer.Typer(no_args_is_help=True, help="Measure the engine.")


@app.callback()
def bench() -> None:
    """Measure the engine."""


@dataclass
class Measured:
    """One engine run at one number of drafts."""

    k: int
    counts: DraftCounts
    sequences: dict[str, list[int]]
    rounds: dict[str, list[RoundRecord]]
    seconds: float
    num_tokens: int
    differences: list[Difference] = field(default_factory=list)


@app.command()
def acceptance(
    spec: SpecArgument,
    weights: WeightsOption = None,
    speculative: SpeculativeOption = None,
    num_draft_tokens: Annotated[
        str, typer.Option(metavar="K,K,...", help="Numbers of drafts to run, one after another.")
    ] = "1,2,3",
    text: Annotated[
        Path | None,
        typer.Option(help="Text to cut prompts from; the checkpoint's heldout.txt if left out."),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts, of 4 to 160 tokens.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to write for each.")] = 64,
    max_num_seqs: MaxNumSeqsOption = 8,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a prefill step; small ones cut prompts in chunks.")
    ] = 64,
    device: DeviceOption = "auto",
    compiled: CompileOption = True,
    checked: CheckedOption = False,
    overlap: OverlapOption = True,
    variants: Annotated[
        bool, typer.Option(help="Also recompute with an MTP layer's conventions the other way.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare every draft, acceptance and token of greedy rounds with an uncached recompute.

    Exit status 1 if any differs by more than a near-tie of the logits (1e-4).
    """
    import torch

    from v4graph.engine.engine import EngineConfig
    from v4graph.model.loader import load_params
    from v4graph.spec.load import load_spec
    from v4graph.spec.model import MtpSpeculation

    loaded = load_spec(spec)
    directory = weights_directory(spec, weights)
    mode = _drafter(loaded, speculative)
    numbers = _numbers(num_draft_tokens)
    prompts = _prompts(spec, weights, loaded, text or directory / "heldout.txt", num_prompts)
    params = load_params(loaded, directory, torch.float32, speculative=mode[0])
    results, console = [], Console(stderr=True)
    for k in numbers:
        config = EngineConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=min(loaded.max_position_embeddings, 160 + max_tokens + 16),
            device=device,
            compile=compiled,
            checked=checked,
            greedy_only=True,
            speculative=mode[0],
            num_draft_tokens=k,
            overlap=overlap,
        )
        console.print(f"k = {k}: engine", highlight=False)
        measured = measure(loaded, params, config, prompts, max_tokens, k)
        console.print(f"k = {k}: recompute", highlight=False)
        recheck(loaded, params, mode[1], measured, config)
        results.append(measured)
    data = {
        "spec": loaded.name,
        "device": str(config.torch_device()),
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_tokens": max_tokens,
        "results": [_result(r) for r in results],
    }
    if variants and isinstance(mode[1], MtpSpeculation):
        data["variants"] = conventions(loaded, params, mode[1], results[-1], config)
    if as_json:
        print_json(data)
    else:
        _print(data)
    if any(r["differences"] for r in data["results"]):
        raise typer.Exit(1)


def _drafter(spec: ModelSpec, name: str | None) -> tuple[str, MtpSpeculation | DsparkSpeculation]:
    from v4graph.spec.model import DsparkSpeculation, MtpSpeculation

    kinds = (MtpSpeculation, DsparkSpeculation)
    found = {n: m for n, m in spec.speculative.items() if isinstance(m, kinds)}
    if name is not None:
        found = {n: m for n, m in found.items() if n == name}
    if not found:
        wanted = "a speculative mode" if name is None else repr(name)
        wanted += " of kind mtp or dspark"
        declared = ", ".join(spec.speculative) or "none"
        raise PlanError(f"bench acceptance needs {wanted}; {spec.name} declares {declared}")
    return next(iter(found.items()))


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as e:
        raise RequestError(
            f"--num-draft-tokens {text!r}: expected numbers like 1,2,3", "num_draft_tokens"
        ) from e
    return numbers


def _prompts(
    name: str, weights: Path | None, spec: ModelSpec, path: Path, count: int
) -> list[list[int]]:
    """Prompts of mixed lengths, cut from all over a text."""
    if not path.is_file():
        raise RequestError(f"--text {path}: no such file; give a text to cut prompts from", "text")
    tokenizer = load_tokenizer(name, weights, spec.bos_token_id)
    # Header lines between documents are no text of theirs.
    plain = re.sub(r"^=== .+ ===\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lengths = [4 + (i * 37) % 157 for i in range(count)]
    step = len(plain) // (count + 1)
    out = []
    for i, length in enumerate(lengths):
        ids = tokenizer.encode(plain[i * step : i * step + 12 * length])
        if len(ids) < length:
            raise RequestError(f"--text {path}: too short for {count} prompts", "text")
        out.append(ids[:length])
    return out


def measure(
    spec: ModelSpec,
    params: dict[str, Tensor],
    config: EngineConfig,
    prompts: list[list[int]],
    max_tokens: int,
    k: int,
) -> Measured:
    """Run the prompts greedily through an engine and keep its rounds.

    Timed in a second run without a recorder, which reads drafts back.
    """
    from v4graph.engine.engine import LLMEngine
    from v4graph.engine.request import SamplingParams
    from v4graph.engine.rounds import DraftCounts

    engine = LLMEngine.from_params(spec, dict(params), config)
    wanted = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    rounds: dict[str, list[RoundRecord]] = {}
    sequences: dict[str, list[int]] = {}

    def run(prefix: str) -> float:
        for i, ids in enumerate(prompts):
            sequences[f"{prefix}{i}"] = list(ids)
            engine.add_request(f"{prefix}{i}", ids, wanted)
        start = time.perf_counter()
        while engine.has_unfinished():
            for out in engine.step():
                sequences[out.request_id] += out.token_ids
        return time.perf_counter() - start

    engine.recorder = lambda r: rounds.setdefault(r.request_id, []).append(r)
    run("recorded ")
    engine.recorder, engine.draft_counts = None, DraftCounts()
    seconds = run("timed ")
    recorded = {n: s for n, s in sequences.items() if n.startswith("recorded ")}
    for name, ids in recorded.items():
        if sequences[name.replace("recorded ", "timed ")] != ids:
            raise PlanError(f"{name}: a second run wrote other tokens")
    num_tokens = sum(len(ids) for ids in recorded.values()) - sum(map(len, prompts))
    return Measured(k, engine.draft_counts, recorded, rounds, seconds, num_tokens)


def recheck(
    spec: ModelSpec,
    params: dict[str, Tensor],
    mode: MtpSpeculation | DsparkSpeculation,
    measured: Measured,
    config: EngineConfig,
) -> None:
    """Recompute every recorded round of a run and keep what differs."""
    from v4graph.model.recompute import RecomputeModel
    from v4graph.model.rounds import EngineRound, RoundOracle

    device = config.torch_device()
    model = RecomputeModel(spec, {n: t.to(device) for n, t in params.items()})
    oracle = RoundOracle(model, mode)
    for name, ids in measured.sequences.items():
        records = measured.rounds.get(name, [])
        rounds = [EngineRound(r.num_tokens, tuple(r.drafts), tuple(r.tokens)) for r in records]
        full = list(ids)
        if rounds:
            last = rounds[-1]
            full = [*full[: last.num_tokens], *last.tokens]
        measured.differences += oracle.check(full, rounds)


def conventions(
    spec: ModelSpec,
    params: dict[str, Tensor],
    mode: MtpSpeculation,
    measured: Measured,
    config: EngineConfig,
) -> list[dict[str, Any]]:
    """Acceptance along the same sequences under other conventions of the draft layer's rows.

    As the spec states them; the mask of position 0 and the rotary offset the other way; and, to
    show what a wrong pairing costs, rows with the streams and the token of one position.
    """
    from v4graph.engine.rounds import DraftCounts
    from v4graph.model.recompute import RecomputeModel
    from v4graph.model.rounds import RoundOracle

    device = config.torch_device()
    model = RecomputeModel(spec, {n: t.to(device) for n, t in params.items()})
    stated = {
        "mask_position_zero": mode.mask_position_zero,
        "position_offset": mode.position_offset,
        "token_shift": 1,
    }
    others: list[dict[str, Any]] = [
        {"mask_position_zero": not mode.mask_position_zero},
        {"position_offset": 1 - mode.position_offset},
        {"token_shift": 0},
    ]
    out = []
    for variant in ({}, *others):
        used = {**stated, **variant}
        shift = used["token_shift"]
        own = mode.model_copy(update={k: v for k, v in used.items() if k != "token_shift"})
        oracle = RoundOracle(model, own, token_shift=shift)
        counts = DraftCounts()
        for name, ids in measured.sequences.items():
            if name in measured.rounds:
                first = measured.rounds[name][0].num_tokens
                for drafts, accepted in oracle.rounds_of(ids, first, measured.k):
                    counts.add(drafts, accepted)
        out.append({**used, **_figures(counts)})
    return out


def _figures(counts: DraftCounts) -> dict[str, Any]:
    pairs = zip(counts.accepted_at, counts.proposed_at, strict=True)
    return {
        "rounds": counts.rounds,
        "tokens_per_round": round(counts.tokens_per_round, 4),
        "draft_acceptance": round(counts.draft_acceptance, 4),
        "approximate_rate": round(counts.approximate_rate, 4),
        "acceptance_by_position": [round(a / p, 4) if p else 0.0 for a, p in pairs],
    }


def _result(r: Measured) -> dict[str, Any]:
    ties = [d for d in r.differences if d.gap < NEAR_TIE]
    other = [d for d in r.differences if d.gap >= NEAR_TIE]
    compared = sum(len(x.drafts) + len(x.tokens) for own in r.rounds.values() for x in own)
    return {
        "num_draft_tokens": r.k,
        **_figures(r.counts),
        "ms_per_round": round(1000 * r.seconds / max(r.counts.rounds, 1), 3),
        "tokens_per_s": round(r.num_tokens / r.seconds, 1),
        "compared_tokens": compared,
        "near_ties": [asdict(d) for d in ties],
        "differences": [asdict(d) for d in other],
    }


def _print(data: dict[str, Any]) -> None:
    table = table_of(
        f"acceptance of {data['spec']} on {data['device']}: {data['prompts']} prompts, "
        f"{data['max_tokens']} tokens each, greedy",
        "k",
        "rounds,tokens per round,draft acceptance,approximate rate,by position,"
        "ms per request and round,tokens/s,compared,near-ties,differences",
        "tokens per round: the main model's own token included; draft acceptance: accepted over "
        "proposed drafts;\napproximate rate: 1 - 1 / tokens per round; compared: drafts and "
        "tokens against an uncached recompute",
    )
    for r in data["results"]:
        table.add_row(
            str(r["num_draft_tokens"]),
            f"{r['rounds']:,}",
            f"{r['tokens_per_round']:.4f}",
            f"{r['draft_acceptance']:.4f}",
            f"{r['approximate_rate']:.4f}",
            " ".join(f"{x:.3f}" for x in r["acceptance_by_position"]),
            f"{r['ms_per_round']:.3f}",
            f"{r['tokens_per_s']:.1f}",
            f"{r['compared_tokens']:,}",
            str(len(r["near_ties"])),
            str(len(r["differences"])),
        )
    print_table(table)
    for v in data.get("variants", ()):
        mask = "masked" if v["mask_position_zero"] else "not masked"
        typer.echo(
            f"recompute, position 0 {mask}, row t rotated as t + {v['position_offset']}, with the "
            f"token at t + {v['token_shift']}: {v['tokens_per_round']:.4f} tokens per round, draft "
            f"acceptance {v['draft_acceptance']:.4f}"
        )
    for r in data["results"]:
        for d in (*r["near_ties"], *r["differences"])[:20]:
            typer.echo(
                f"k={r['num_draft_tokens']} {d['where']} {d['index']} behind {d['num_tokens']} "
                f"tokens: engine {d['found']}, recompute {d['expected']}, logits {d['gap']:.2e} "
                "apart"
            )
