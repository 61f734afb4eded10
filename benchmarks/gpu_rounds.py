"""v4-nano's speculative rounds on a GPU: the acceptance gap at length, and what a round costs.

    python benchmarks/gpu_rounds.py --out DIR [--prompts 64] [--max-tokens 200]

Writes rounds.json. Part 1: greedy rounds at k = 1..8, every draft, accepted count and token held
against a full recompute on the same GPU in float32. Part 2: ms and kernel launches of a round at
batch 1 and 8, CUDA graphs off and on, in one run. Tokens must equal decoding without speculation.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import SamplingParams
from v4graph.engine.rounds import DraftCounts, RoundRecord
from v4graph.model.loader import load_params
from v4graph.model.recompute import RecomputeModel
from v4graph.model.rounds import EngineRound, RoundOracle
from v4graph.spec.load import load_spec, spec_path
from v4graph.spec.model import ModelSpec, MtpSpeculation

NEAR_TIE = 1e-4
Params = dict[str, Tensor]


def prompts(folder: Path, count: int) -> list[list[int]]:
    """Prompts of 4 to 160 tokens from all over the held-out text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = re.sub(
        r"^=== .+ ===\n", "", (folder / "heldout.txt").read_text("utf-8"), flags=re.MULTILINE
    )
    step = len(text) // (count + 1)
    lengths = [4 + (i * 37) % 157 for i in range(count)]
    return [tokenizer.encode(text[i * step :][: 12 * n]).ids[:n] for i, n in enumerate(lengths)]


def engine(spec: ModelSpec, params: Params, k: int, **more: Any) -> LLMEngine:
    """A greedy engine with k drafts a round."""
    config: dict[str, Any] = {
        "max_num_batched_tokens": 256,
        "max_model_len": 512,
        "device": "cuda",
        "greedy_only": True,
        "speculative": "mtp" if k else "none",
        "num_draft_tokens": k or None,
        **more,
    }
    return LLMEngine.from_params(spec, dict(params), EngineConfig(**config))


def serve(llm: LLMEngine, ids: list[list[int]], new: int, name: str) -> dict[str, list[int]]:
    """Greedy tokens by request."""
    out: dict[str, list[int]] = {}
    for i, prompt in enumerate(ids):
        out[f"{name}{i}"] = []
        wanted = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        llm.add_request(f"{name}{i}", prompt, wanted)
    while llm.has_unfinished():
        for step in llm.step():
            out[step.request_id] += step.token_ids
    llm.check_integrity()
    return out


def gap(spec: ModelSpec, params: Params, ids: list[list[int]], new: int) -> list[dict[str, Any]]:
    """Part 1."""
    mode = spec.speculative["mtp"]
    assert isinstance(mode, MtpSpeculation)
    on_gpu = {n: t.cuda() for n, t in params.items()}
    oracle = RoundOracle(RecomputeModel(spec, on_gpu), mode, max_rows=1 << 16)
    plain = serve(engine(spec, params, 0, compile=False, max_num_seqs=16), ids, new, "r")
    out = []
    for k in range(1, 9):
        begin = time.perf_counter()
        llm = engine(spec, params, k, compile=False, max_num_seqs=16)
        records: dict[str, list[RoundRecord]] = {}
        llm.recorder = lambda r, own=records: own.setdefault(r.request_id, []).append(r)
        tokens = serve(llm, ids, new, "r")
        differences = []
        for i, prompt in enumerate(ids):
            own = records[f"r{i}"]
            full = [*prompt, *tokens[f"r{i}"]]
            full = [*full[: own[-1].num_tokens], *own[-1].tokens]
            rounds = [EngineRound(r.num_tokens, tuple(r.drafts), tuple(r.tokens)) for r in own]
            differences += [vars(d) | {"prompt": i} for d in oracle.check(full, rounds)]
        counts = llm.draft_counts
        pairs = zip(counts.accepted_at, counts.proposed_at, strict=True)
        result = {
            "k": k,
            "compared": sum(len(r.drafts) + len(r.tokens) for own in records.values() for r in own),
            "rounds": counts.rounds,
            "tokens_per_round": counts.tokens_per_round,
            "draft_acceptance": counts.draft_acceptance,
            "approximate_rate": counts.approximate_rate,
            "acceptance_by_position": [a / p for a, p in pairs],
            "near_ties": [d for d in differences if d["gap"] < NEAR_TIE],
            "differences": [d for d in differences if d["gap"] >= NEAR_TIE],
            "requests_unlike_plain": sum(tokens[n] != plain[n] for n in plain),
            "seconds": time.perf_counter() - begin,
        }
        print(json.dumps(result), flush=True)
        out.append(result)
    return out


def launches(llm: LLMEngine, ids: list[list[int]]) -> dict[str, float]:
    """Host calls that start work on the GPU, and kernels run, per decode round."""
    from torch.profiler import ProfilerActivity, profile

    for i, prompt in enumerate(ids):
        wanted = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
        llm.add_request(f"launches {i}", prompt, wanted)
    while any(r.is_prefilling for r in llm.scheduler.running) or llm.scheduler.waiting:
        llm.step()
    llm.step()
    torch.cuda.synchronize()
    rounds = 10
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(rounds):
            llm.step()
        torch.cuda.synchronize()
    events = profiled.key_averages()
    calls = {e.key: e.count for e in events}
    kernels = sum(
        e.count for e in events if e.device_type == torch.autograd.DeviceType.CUDA and e.count
    )
    for i in range(len(ids)):
        llm.abort(f"launches {i}")
    while llm.has_unfinished():
        llm.step()
    return {
        "kernel_launches": (
            calls.get("cudaLaunchKernel", 0)
            + calls.get("cuLaunchKernel", 0)
            + calls.get("cudaLaunchKernelExC", 0)
            + calls.get("cuLaunchKernelEx", 0)
        )
        / rounds,
        "graph_launches": calls.get("cudaGraphLaunch", 0) / rounds,
        "copies": calls.get("cudaMemcpyAsync", 0) / rounds,
        "synchronisations": (
            calls.get("cudaStreamSynchronize", 0) + calls.get("cudaDeviceSynchronize", 0)
        )
        / rounds,
        "event_waits": calls.get("cudaEventSynchronize", 0) / rounds,
        "device_activities": kernels / rounds,
    }


def cost(
    spec: ModelSpec,
    params: Params,
    ids: list[list[int]],
    new: int,
    sizes: tuple[list[int], list[int]],
) -> list[dict[str, Any]]:
    """Part 2, at the given batch sizes and numbers of drafts."""
    batches, ks = sizes
    out: list[dict[str, Any]] = []
    for batch in batches:
        for k in ks:
            seen: list[dict[str, list[int]]] = []
            for graphs in (False, True):
                begin = time.perf_counter()
                llm = engine(
                    spec,
                    params,
                    k,
                    max_num_seqs=batch,
                    decode_buckets=(batch,),
                    prefill_buckets=((256, batch),),
                    cuda_graphs=graphs,
                )
                start = time.perf_counter() - begin
                serve(llm, ids[:batch], 64, "warm")
                llm.draft_counts = DraftCounts()
                steps = llm.metrics["num_steps"]
                torch.cuda.synchronize()
                begin = time.perf_counter()
                tokens = serve(llm, ids[:batch], new, "r")
                torch.cuda.synchronize()
                seconds = time.perf_counter() - begin
                seen.append(tokens)
                memory = torch.cuda.memory_allocated()
                program = llm.programs.dispatch(llm.plan.decode_mode, batch * (k + 1), batch)
                serve(llm, ids[:batch], new, "again")
                # Alone, on padding: device time of the round without the engine around it.
                stream_ms = timed(lambda p=program: p.run([], [], 0, False))
                result = {
                    "batch": batch,
                    "k": k,
                    "cuda_graphs": graphs,
                    "start_s": start,
                    "seconds": seconds,
                    "tokens_per_s": batch * new / seconds,
                    "steps": llm.metrics["num_steps"] - steps,
                    "ms_per_step": 1000 * seconds / max(1, (llm.metrics["num_steps"] - steps) / 2),
                    "ms_per_padded_round": stream_ms,
                    "tokens_per_round": llm.draft_counts.tokens_per_round if k else 1.0,
                    "calls_per_round": program.calls_per_step().get("greedy", 0),
                    "memory_growth_bytes": torch.cuda.memory_allocated() - memory,
                    **launches(llm, ids[:batch]),
                }
                print(json.dumps(result), flush=True)
                out.append(result)
            assert [list(t.values()) for t in seen[:1]] == [list(t.values()) for t in seen[1:]]
    return out


def timed(run: Any, repeats: int = 200) -> float:
    """Milliseconds of `run` between CUDA events, median of five."""
    for _ in range(10):
        run()
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return sorted(times)[2]


def main() -> None:
    """Both parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--parts", default="gap,cost")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--ks", default="0,1,3")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    spec, folder = load_spec("v4-nano"), spec_path("v4-nano").with_suffix("")
    params = load_params(spec, folder, torch.float32, None)
    ids = prompts(folder, args.prompts)
    data: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "prompts": len(ids),
        "max_tokens": args.max_tokens,
    }
    parts = args.parts.split(",")
    for part in parts:
        if part == "gap":
            data[part] = gap(spec, params, ids, args.max_tokens)
        else:
            sizes = ([int(n) for n in text.split(",")] for text in (args.batches, args.ks))
            data[part] = cost(spec, params, ids, args.max_tokens, (next(sizes), next(sizes)))
        (args.out / "rounds.json").write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
