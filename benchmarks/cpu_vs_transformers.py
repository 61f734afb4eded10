"""v4graph against transformers' `generate` on the same weights, machine and threads, in one run.

    python benchmarks/cpu_vs_transformers.py [--threads 2] [--json FILE]

Both decode greedily in float32. For each batch size all engines get the same prompts of 100 tokens
and generate 64 tokens, alternating, three times; the best run of each counts. v4graph runs without
speculation and with v4-nano's MTP layer, always without its prefix cache. The time per decoded
token at a long context is measured on v4graph alone, against its own at 100 tokens, with one engine
whose programs are sized for the long context. Warm-up and compilation are left out.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import SamplingParams
from v4graph.spec.load import load_spec, spec_path

PROMPT, NEW = 100, 64
LONG = 4000


def held_out_ids(count: int) -> list[int]:
    """The first `count` held-out tokens of v4-nano."""
    from v4graph.text.tokenizer import Tokenizer

    directory = spec_path("v4-nano").with_suffix("")
    text = (directory / "heldout.txt").read_text(encoding="utf-8")
    return Tokenizer.from_directory(directory, 0).encode(text, add_bos=True)[:count]


def engine(batch: int, max_model_len: int, speculative: str = "none") -> LLMEngine:
    """A compiled greedy engine with one program a mode."""
    spec = load_spec("v4-nano")
    config = EngineConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=max(PROMPT * batch, 128),
        max_model_len=max_model_len,
        decode_buckets=(batch,),
        prefill_buckets=((max(PROMPT * batch, 128), batch),),
        greedy_only=True,
        speculative=speculative,
        prefix_cache=False,
    )
    return LLMEngine.from_spec(spec, spec_path("v4-nano").with_suffix(""), config)


def run_ours(llm: LLMEngine, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
    """Seconds and the tokens of every prompt."""
    out: dict[str, list[int]] = {}
    begin = time.perf_counter()
    for i, ids in enumerate(prompts):
        out[str(i)] = []
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        llm.add_request(str(i), ids, params)
    while llm.has_unfinished():
        for step in llm.step():
            out[step.request_id] += step.token_ids
    return time.perf_counter() - begin, list(out.values())


def run_theirs(
    model: torch.nn.Module, prompts: list[list[int]], new: int
) -> tuple[float, list[list[int]]]:
    """Seconds and the tokens of every prompt."""
    ids = torch.tensor(prompts)
    begin = time.perf_counter()
    with torch.no_grad():
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=2,
        )
    return time.perf_counter() - begin, out[:, ids.shape[1] :].tolist()


def compare(batch: int, model: torch.nn.Module, text: list[int]) -> dict[str, float]:
    """Tokens per second of both at one batch size, prompt processing included."""
    prompts = [text[i * 97 : i * 97 + PROMPT] for i in range(batch)]
    ours = {mode: engine(batch, 256, mode) for mode in ("none", "mtp")}
    for llm in ours.values():
        run_ours(llm, prompts, 4)
    run_theirs(model, prompts, 4)
    best: dict[str, float] = {}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(3):
        runs = {mode: run_ours(llm, prompts, NEW) for mode, llm in ours.items()}
        runs["transformers"] = run_theirs(model, prompts, NEW)
        for name, (seconds, written) in runs.items():
            best[name] = min(best.get(name, seconds), seconds)
            tokens[name] = written
    other = tokens["transformers"]
    report: dict[str, float] = {
        "batch": batch,
        "transformers_tokens_per_s": batch * NEW / best["transformers"],
    }
    for mode in ours:
        report[f"v4graph_{mode}_tokens_per_s"] = batch * NEW / best[mode]
        report[f"ratio_{mode}"] = best["transformers"] / best[mode]
        same = sum(a == b for a, b in zip(tokens[mode], other, strict=True))
        report[f"prompts_with_equal_tokens_{mode}"] = same
    return report


def long_context(text: list[int]) -> dict[str, float]:
    """Milliseconds per decoded token at 100 and at 4,000 tokens of context."""
    llm = engine(1, LONG + 96)
    result = {}
    for context in (PROMPT, LONG):
        best = float("inf")
        for _ in range(3):
            params = SamplingParams(max_tokens=49, temperature=0.0, ignore_eos=True)
            llm.add_request("x", text[:context], params)
            while not llm.step():
                pass  # prefill
            begin = time.perf_counter()
            while llm.has_unfinished():
                llm.step()
            best = min(best, (time.perf_counter() - begin) / 48)
        result[f"ms_per_token_at_{context}"] = best * 1e3
    result["ratio"] = result[f"ms_per_token_at_{LONG}"] / result[f"ms_per_token_at_{PROMPT}"]
    return result


def main() -> None:
    """Run everything and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    directory = spec_path("v4-nano").with_suffix("")
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text = held_out_ids(LONG)
    report = {
        "threads": args.threads,
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "batches": [compare(batch, model, text) for batch in (1, 8)],
        "long_context": long_context(text),
    }
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
