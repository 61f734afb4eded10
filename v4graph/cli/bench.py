"""`v4graph bench acceptance`: the engine's speculative rounds held against a full recompute."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from v4graph.cli.bench_report import Measured, figures, print_report, result_of
from v4graph.cli.explain_plan import print_json
from v4graph.cli.options import (
    AllowNonfiniteOption,
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
from v4graph.errors import NonFiniteLogitsError, PlanError, RequestError
from v4graph.plan.lower import MAX_DRAFT_TOKENS, speculation_plan
from v4graph.plan.types import Limits
from v4graph.words import counted

if TYPE_CHECKING:
    from torch import Tensor

    from v4graph.engine.engine import EngineConfig
    from v4graph.engine.rounds import RoundRecord
    from v4graph.model.rounds import Drafting
    from v4graph.spec.model import ModelSpec, MtpSpeculation

app = typer.Typer(no_args_is_help=True, help="Measure the engine.")


@app.callback()
def bench() -> None:
    """Measure the engine."""


@app.command()
def acceptance(
    spec: SpecArgument,
    weights: WeightsOption = None,
    speculative: SpeculativeOption = None,
    num_draft_tokens: Annotated[
        str,
        typer.Option(
            metavar="K,K,...", help="Numbers of drafts, 1 to 8, to run one after another."
        ),
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
    allow_nonfinite: AllowNonfiniteOption = False,
    variants: Annotated[
        bool,
        typer.Option(
            help="Also recompute the last K with an MTP layer's conventions the other way."
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare every draft, acceptance and token of greedy rounds with an uncached recompute.

    Both are counted over the same rounds. Exit status 1 if anything differs by more than a near-tie
    of the logits (1e-4).
    """
    import torch

    from v4graph.engine.engine import EngineConfig
    from v4graph.model.loader import load_params
    from v4graph.spec.load import load_spec
    from v4graph.spec.model import MtpSpeculation

    loaded = load_spec(spec)
    directory = weights_directory(spec, weights)
    mode = _drafter(loaded, speculative)
    numbers = _numbers(num_draft_tokens, loaded, mode[0])
    prompts = _prompts(spec, weights, loaded, text or directory / "heldout.txt", num_prompts)
    params = load_params(
        loaded,
        directory,
        torch.float32,
        speculative=mode[0],
        allow_nonfinite=allow_nonfinite,
    )
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
        measured = measure(loaded, params, config, prompts, max_tokens)
        console.print(f"k = {k}: recompute", highlight=False)
        recheck(loaded, params, mode[1], measured, config)
        results.append(measured)
    data = {
        "spec": loaded.name,
        "speculative": mode[0],
        "device": str(config.torch_device()),
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_tokens": max_tokens,
        "results": [result_of(r) for r in results],
    }
    if variants and isinstance(mode[1], MtpSpeculation):
        data["variants"] = conventions(loaded, params, mode[1], results[-1], config)
    if as_json:
        print_json(data)
    else:
        print_report(data)
    if any(r["differences"] for r in data["results"]):
        raise typer.Exit(1)


def _drafter(spec: ModelSpec, name: str | None) -> tuple[str, Drafting]:
    from v4graph.spec.model import NoSpeculation

    found = {n: m for n, m in spec.speculative.items() if not isinstance(m, NoSpeculation)}
    if name is not None:
        found = {n: m for n, m in found.items() if n == name}
    if not found:
        wanted = "a speculative mode" if name is None else f"speculative mode {name!r}"
        declared = ", ".join(f"{n} (kind {m.kind})" for n, m in spec.speculative.items()) or "none"
        raise PlanError(
            f"bench acceptance needs {wanted} of kind mtp, dspark or ngram; {spec.name} declares "
            f"{declared}"
        )
    return next(iter(found.items()))


def _numbers(text: str, spec: ModelSpec, mode: str) -> list[int]:
    """Numbers of drafts, each of which `mode` can make."""
    wanted = f"--num-draft-tokens {text!r}: expected numbers of 1 to {MAX_DRAFT_TOKENS} like 1,2,3"
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as e:
        raise RequestError(wanted, "num_draft_tokens") from e
    for k in numbers:
        if not 1 <= k <= MAX_DRAFT_TOKENS:
            raise RequestError(f"{wanted}; got {k}", "num_draft_tokens")
        # Told before any weights are read.
        speculation_plan(spec, Limits(speculative=mode, num_draft_tokens=k))
    return numbers


def _text(path: Path) -> str:
    """The text to cut prompts from.

    Raises:
        RequestError: no file, none that holds text, or none that can be read.
    """
    where = f"--text {path}"
    if not path.exists():
        raise RequestError(f"{where}: no such file; give a text to cut prompts from", "text")
    if not path.is_file():
        what = "a directory" if path.is_dir() else "not a regular file"
        raise RequestError(f"{where}: {what}; expected a text file in UTF-8", "text")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        found = f"byte {e.object[e.start]:#04x} at offset {e.start:,}"
        raise RequestError(f"{where}: not UTF-8 ({found}); expected a text in UTF-8", "text") from e
    except OSError as e:
        raise RequestError(f"{where}: cannot be read ({e.strerror})", "text") from e


def _prompts(
    name: str, weights: Path | None, spec: ModelSpec, path: Path, count: int
) -> list[list[int]]:
    """Prompts of mixed lengths, cut from all over a text."""
    text = _text(path)
    tokenizer = load_tokenizer(name, weights, spec.bos_token_id)
    # Header lines between documents are no text of theirs.
    plain = re.sub(r"^=== .+ ===\n", "", text, flags=re.MULTILINE)
    lengths = [4 + (i * 37) % 157 for i in range(count)]
    step = len(plain) // (count + 1)
    out = []
    for i, length in enumerate(lengths):
        ids = tokenizer.encode(plain[i * step : i * step + 12 * length])
        if len(ids) < length:
            raise RequestError(f"--text {path}: too short for {counted(count, 'prompt')}", "text")
        out.append(ids[:length])
    return out


def measure(
    spec: ModelSpec,
    params: dict[str, Tensor],
    config: EngineConfig,
    prompts: list[list[int]],
    max_tokens: int,
) -> Measured:
    """Run the prompts greedily through an engine and keep its rounds.

    Timed in a second run without a recorder, which reads drafts back.
    """
    from v4graph.engine.engine import LLMEngine
    from v4graph.engine.request import FinishReason, SamplingParams
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
                if out.finish_reason is FinishReason.ERROR:
                    prompt = prompts[int(out.request_id.removeprefix(prefix))]
                    raise NonFiniteLogitsError.after(len(sequences[out.request_id]) - len(prompt))
        return time.perf_counter() - start

    engine.recorder = lambda r: rounds.setdefault(r.request_id, []).append(r)
    run("recorded ")
    counts = engine.draft_counts
    engine.recorder, engine.draft_counts = None, DraftCounts()
    seconds = run("timed ")
    recorded = {n: s for n, s in sequences.items() if n.startswith("recorded ")}
    for name, ids in recorded.items():
        if sequences[name.replace("recorded ", "timed ")] != ids:
            raise PlanError(f"{name}: a second run wrote other tokens")
    num_tokens = sum(len(ids) for ids in recorded.values()) - sum(map(len, prompts))
    timed = engine.draft_counts.rounds
    plan = engine.plan
    return Measured(
        k=plan.speculation.num_draft_tokens,
        max_model_len=plan.max_model_len,
        counts=counts,
        own_counts=DraftCounts(),
        sequences={
            name: _up_to_last_round(ids, rounds.get(name, [])) for name, ids in recorded.items()
        },
        rounds=rounds,
        seconds_per_round=seconds / max(timed, 1),
        tokens_per_s=num_tokens / seconds,
    )


def _up_to_last_round(ids: list[int], rounds: list[RoundRecord]) -> list[int]:
    """A sequence with all that its last round committed, also behind the request's end."""
    return [*ids[: rounds[-1].num_tokens], *rounds[-1].tokens] if rounds else ids


def recheck(
    spec: ModelSpec,
    params: dict[str, Tensor],
    mode: Drafting,
    measured: Measured,
    config: EngineConfig,
) -> None:
    """Recompute every recorded round of a run: keep what differs, and count the recompute's own
    drafts and tokens in the same rounds."""
    from v4graph.model.recompute import RecomputeModel
    from v4graph.model.rounds import EngineRound, RoundOracle

    device = config.torch_device()
    model = RecomputeModel(spec, {n: t.to(device) for n, t in params.items()})
    oracle = RoundOracle(model, mode)
    for name, records in measured.rounds.items():
        rounds = [EngineRound(r.num_tokens, tuple(r.drafts), tuple(r.tokens)) for r in records]
        ids = measured.sequences[name]
        found, own = oracle.compare(ids, rounds, measured.k, measured.max_model_len)
        measured.differences += found
        for r in own:
            measured.own_counts.add(len(r.drafts), len(r.tokens) - 1)


def conventions(
    spec: ModelSpec,
    params: dict[str, Tensor],
    mode: MtpSpeculation,
    measured: Measured,
    config: EngineConfig,
) -> list[dict[str, Any]]:
    """Acceptance in the same rounds under other conventions of the draft layer's rows.

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
    out = [{**stated, "num_draft_tokens": measured.k, **figures(measured.own_counts)}]
    for variant in others:
        used = {**stated, **variant}
        shift = used["token_shift"]
        own = mode.model_copy(update={k: v for k, v in used.items() if k != "token_shift"})
        oracle = RoundOracle(model, own, token_shift=shift)
        counts = DraftCounts()
        for name, records in measured.rounds.items():
            known, ids = [r.num_tokens for r in records], measured.sequences[name]
            for r in oracle.own_rounds(ids, known, measured.k, measured.max_model_len):
                counts.add(len(r.drafts), len(r.tokens) - 1)
        out.append({**used, "num_draft_tokens": measured.k, **figures(counts)})
    return out
