"""Time to first token of prompts that share a prefix, with and without the prefix cache.

Two engines of v4-nano run the same conversations in one process, taking turns prompt by prompt, so
that what else the machine does meets both. Each conversation begins with the same system prompt;
every turn sends all that was said before and some new text.

    python benchmarks/prefix_cache.py [--conversations N] [--turns N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import time
from pathlib import Path

import torch

from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import SamplingParams
from v4graph.spec.load import load_spec, spec_path
from v4graph.text.tokenizer import Tokenizer

SYSTEM, QUESTION, ANSWER = 384, 48, 32


def tokens() -> list[int]:
    """v4-nano's held-out text."""
    folder = spec_path("v4-nano").with_suffix("")
    text = re.sub(r"^=== .+ ===\n", "", (folder / "heldout.txt").read_text("utf-8"), flags=re.M)
    tokenizer = Tokenizer.from_directory(folder, load_spec("v4-nano").bos_token_id)
    return tokenizer.encode(text[:120_000])


def engine(prefix_cache: bool) -> LLMEngine:
    """v4-nano with its draft layer, on the CPU or GPU that there is."""
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=128,
        max_model_len=2048,
        prefill_buckets=((128, 4),),
        decode_buckets=(4,),
        greedy_only=True,
        prefix_cache=prefix_cache,
    )
    return LLMEngine.from_spec(load_spec("v4-nano"), spec_path("v4-nano").with_suffix(""), config)


def ask(llm: LLMEngine, name: str, prompt: list[int]) -> tuple[float, list[int]]:
    """Seconds to the first token, and all tokens of the answer."""
    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    llm.add_request(name, prompt, params)
    first, out = 0.0, []
    while llm.has_unfinished():
        for step in llm.step():
            first = first or time.perf_counter() - start
            out += step.token_ids
    return first, out


def main() -> None:
    """Run and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = tokens()
    engines = {"cache": engine(True), "no cache": engine(False)}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    rows, differing = [], 0
    place = SYSTEM
    for c in range(args.conversations):
        prompt = text[:SYSTEM]
        for turn in range(args.turns):
            prompt = [*prompt, *text[place : place + QUESTION]]
            place += QUESTION
            prefix = engines["cache"].metrics["prefix_hit_tokens"]
            answers = {}
            order = list(engines.items())
            for name, llm in order if (c + turn) % 2 else reversed(order):
                first, answers[name] = ask(llm, f"{c}.{turn}", prompt)
                seconds[name].append(first)
            hit = engines["cache"].metrics["prefix_hit_tokens"] - prefix
            times = {name: seconds[name][-1] for name in engines}
            rows.append({"turn": turn, "prompt": len(prompt), "hit": hit, **times})
            differing += answers["cache"] != answers["no cache"]
            print(
                f"conversation {c} turn {turn}: {len(prompt):5} tokens, {hit:5.0f} from the cache, "
                f"first token after {times['cache'] * 1e3:7.1f} ms, without a cache "
                f"{times['no cache'] * 1e3:7.1f} ms"
            )
            prompt = [*prompt, *answers["no cache"]]
    metrics = engines["cache"].metrics
    report = {
        "machine": platform.processor() or platform.machine(),
        "device": str(engines["cache"].programs.state.table.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "hit_rate": metrics["prefix_hit_tokens"] / metrics["prefix_query_tokens"],
        "median_first_token_seconds": {n: statistics.median(v) for n, v in seconds.items()},
        "differing_answers": differing,
        "rows": rows,
    }
    medians = report["median_first_token_seconds"]
    print(
        f"hit rate {report['hit_rate']:.1%} of {metrics['prefix_query_tokens']:.0f} prompt tokens; "
        f"median time to first token {medians['cache'] * 1e3:.1f} ms, without a cache "
        f"{medians['no cache'] * 1e3:.1f} ms; {differing} answers differ"
    )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
