"""Tokens per second with v4-nano's MTP layer against none, at batch 1 on held-out text, in one run.

    python benchmarks/cpu_speculation.py [--drafts 0,1,2,3,4,5] [--threads 2] [--json FILE]

One compiled engine for every number of drafts; 0 is no speculation. All write the same greedy
tokens: 96 behind each of 8 held-out prompts of 64. The engines take turns, prompt by prompt, three
times; of each prompt the best time counts. Timed is decoding: from a request's first token to its
last. Compilation, prompts and the prefix cache are left out. `break_even` is what a
round costs in plain steps: drafting pays while `tokens_per_round` is above it.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import SamplingParams
from v4graph.engine.rounds import DraftCounts
from v4graph.spec.load import load_spec, spec_path
from v4graph.text.tokenizer import Tokenizer

PROMPTS, LENGTH, NEW, TURNS = 8, 64, 96, 3


def prompts() -> list[list[int]]:
    """Held-out prompts from all over the text."""
    directory = spec_path("v4-nano").with_suffix("")
    text = (directory / "heldout.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_directory(directory, 0).encode(text, add_bos=False)
    step = len(ids) // PROMPTS
    return [ids[i * step : i * step + LENGTH] for i in range(PROMPTS)]


def engine(drafts: int) -> LLMEngine:
    """A compiled greedy engine for one sequence."""
    config = EngineConfig(
        max_num_seqs=1,
        max_num_batched_tokens=LENGTH,
        max_model_len=256,
        prefill_buckets=((LENGTH, 1),),
        greedy_only=True,
        speculative="mtp" if drafts else "none",
        num_draft_tokens=drafts or None,
        prefix_cache=False,
    )
    spec = load_spec("v4-nano")
    return LLMEngine.from_spec(spec, spec_path("v4-nano").with_suffix(""), config)


def decode(llm: LLMEngine, ids: list[int]) -> tuple[float, list[int]]:
    """Seconds between the first token and the last, and all tokens."""
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    llm.add_request("x", ids, params)
    out: list[int] = []
    begin = time.perf_counter()
    while llm.has_unfinished():
        for step in llm.step():
            if not out:
                begin = time.perf_counter()
            out += step.token_ids
    return time.perf_counter() - begin, out


def main() -> None:
    """Run everything and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--drafts", default="0,1,2,3,4,5")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engines = {int(k): engine(int(k)) for k in args.drafts.split(",")}
    if 0 not in engines:
        parser.error("--drafts: 0 is what the others are compared with")
    texts = prompts()
    for llm in engines.values():
        decode(llm, texts[0])
        llm.draft_counts = DraftCounts()
    best: dict[tuple[int, int], float] = {}
    for _ in range(TURNS):
        for p, ids in enumerate(texts):
            written = {}
            for k, llm in engines.items():
                seconds, written[k] = decode(llm, ids)
                best[k, p] = min(best.get((k, p), seconds), seconds)
            if any(tokens != written[0] for tokens in written.values()):
                raise SystemExit(f"prompt {p}: speculation changed the tokens")
    totals = {k: sum(best[k, p] for p in range(PROMPTS)) for k in engines}
    rows: list[dict[str, Any]] = []
    for k, llm in engines.items():
        row = {"num_draft_tokens": k, "ratio": round(totals[0] / totals[k], 3)}
        if k:
            per_round = llm.draft_counts.tokens_per_round
            row["tokens_per_round"] = round(per_round, 3)
            row["draft_acceptance"] = round(llm.draft_counts.draft_acceptance, 3)
            row["break_even"] = round(totals[k] * per_round / totals[0], 3)
        rows.append(row)
    report = {
        "threads": args.threads,
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "results": rows,
    }
    text = json.dumps(report, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
