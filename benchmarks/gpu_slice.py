"""Decoding, speculative rounds and prefill of a model at its real dimensions, on one GPU.

    python benchmarks/gpu_slice.py flash-slice24 --out DIR [--batches 1,8,32,64,128] [--ks 0,1,3]
        [--long 32768,65536] [--long-batches 1,8] [--prefill 8192,32768] [--profile 1,32]

Weights are random, in the checkpoint's own formats, drawn in memory. Every request has its own
random prompt; it is prefilled by the engine, then `--steps` engine steps are timed together, wall
clock, the host's work included. With random weights hardly a draft is accepted: a round costs the
same. `bytes` is the floor from the plan (`v4graph.plan.traffic`); its time at the copy bandwidth,
measured beside it, over the step's is `share`. Writes DIR/SPEC.json after every figure.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from bandwidth import copy_bandwidth, synchronise
from torch.profiler import ProfilerActivity, profile

from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.engine.request import SamplingParams
from v4graph.model.loader import load_quantised
from v4graph.model.projections import StoredParam
from v4graph.model.random_weights import RandomSource, RandomWeights
from v4graph.plan.traffic import round_traffic
from v4graph.spec.load import load_spec
from v4graph.spec.model import ModelSpec

PROMPT = 1024


class Bench:
    """One model in memory, and what is measured of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin = args, time.monotonic()
        self.spec: ModelSpec = load_spec(args.spec)
        self.device = torch.device(args.device)
        self.out: dict[str, Any] = {"spec": self.spec.name, "torch": torch.__version__, "rows": []}
        if self.device.type == "cuda":
            self.out["device"] = torch.cuda.get_device_name()
        self.bandwidth = copy_bandwidth(self.device)
        self.out["copy_bytes_per_s"] = self.bandwidth
        begin = time.perf_counter()
        source = RandomSource(RandomWeights(self.spec, seed=1, device=self.device))
        dtype = getattr(torch, args.dtype)
        self.params: dict[str, StoredParam] = load_quantised(
            self.spec, source, dtype, device=self.device
        )
        synchronise(self.device)
        self.note("draw weights", seconds=time.perf_counter() - begin)

    def left(self) -> float:
        """Seconds that may still be spent."""
        return self.args.seconds - (time.monotonic() - self.begin)

    def note(self, what: str, **values: Any) -> None:
        """Print a figure and keep it."""
        values = {k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}
        print(f"[{time.monotonic() - self.begin:6.1f}] {what}: {values}", flush=True)
        self.out["rows"].append({"what": what, **values})
        path = self.args.out / f"{self.spec.name}.json"
        path.write_text(json.dumps(self.out, indent=1) + "\n")

    def engine(self, k: int, batches: list[int], longest: int) -> LLMEngine:
        """An engine with k drafts a round and one program for each batch size."""
        tokens = self.args.prefill_tokens
        config = EngineConfig(
            max_num_seqs=batches[-1],
            max_num_batched_tokens=tokens,
            max_model_len=longest,
            kv_memory_bytes=int(self.args.kv_gib * 2**30),
            dtype=self.args.dtype,
            device=str(self.device),
            compile=not self.args.eager,
            kernels="operators",
            decode_buckets=tuple(batches),
            prefill_buckets=((tokens, batches[-1]),),
            greedy_only=True,
            speculative="mtp" if k else "none",
            num_draft_tokens=k or None,
            prefix_cache=False,
        )
        begin = time.perf_counter()

        def progress(stage: str, done: int, total: int, what: str = "", /) -> None:
            print(f"[{time.monotonic() - self.begin:6.1f}] {stage} {done}/{total}", flush=True)

        engine = LLMEngine.from_params(self.spec, dict(self.params), config, progress)
        synchronise(self.device)
        seconds = time.perf_counter() - begin
        stats = engine.programs.compiler.stats
        compiling = sum(s.seconds for s in stats.values())
        self.note(
            f"start k={k}",
            seconds=seconds,
            compiling=compiling,
            regions=len(stats),
            batches=batches,
        )
        return engine

    def requests(self, engine: LLMEngine, count: int, length: int, max_tokens: int) -> None:
        """Add requests of random prompts."""
        rng = random.Random(count * length)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for i in range(count):
            prompt = [rng.randrange(2, self.spec.vocab_size) for _ in range(length)]
            engine.add_request(f"{count}.{length}.{i}", prompt, params)

    def prefill(self, engine: LLMEngine, length: int) -> None:
        """Tokens a second of one prompt, its first token included; the second of two runs."""
        for timed in (False, True):
            self.requests(engine, 1, length, 1)
            synchronise(self.device)
            begin = time.perf_counter()
            while engine.has_unfinished():
                engine.step()
            synchronise(self.device)
            seconds = time.perf_counter() - begin
            if timed:
                self.note("prefill", prompt=length, seconds=seconds, tokens_per_s=length / seconds)

    def decode(self, engine: LLMEngine, k: int, batch: int, prompt: int, traced: bool) -> None:
        """Milliseconds of a decoding round, and its share of the copy bandwidth."""
        steps = self.args.steps
        self.requests(engine, batch, prompt, (steps + 30) * (k + 1))
        while any(r.num_generated_tokens == 0 for r in list(engine._requests.values())):
            engine.step()
        for _ in range(5):
            engine.step()
        synchronise(self.device)
        before, begin = engine.metrics["generation_tokens"], time.perf_counter()
        for _ in range(steps):
            engine.step()
        synchronise(self.device)
        ms = (time.perf_counter() - begin) / steps * 1e3
        made = engine.metrics["generation_tokens"] - before
        lines = round_traffic(self.spec, engine.plan, batch, prompt)
        size = sum(line.num_bytes for line in lines)
        floor = size / self.bandwidth * 1e3
        self.note(
            "decode" if k == 0 else f"round k={k}",
            batch=batch,
            prompt=prompt,
            ms=ms,
            bytes=size,
            floor_ms=floor,
            share=floor / ms,
            tokens_per_round=made / steps / batch,
        )
        if traced:
            self.trace(engine, k, batch)
        for name in list(engine._requests):
            engine.abort(name)
        while engine.has_unfinished():
            engine.step()

    def trace(self, engine: LLMEngine, k: int, batch: int, steps: int = 4) -> None:
        """Time of each kernel in a few steps."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
            for _ in range(steps):
                engine.step()
            synchronise(self.device)
        rows = [
            {
                "kernel": e.key[:110],
                "ms": round(e.self_device_time_total / steps / 1e3, 5),
                "calls": e.count / steps,
            }
            for e in traced.key_averages()
            if e.self_device_time_total > 0 and e.device_type.name != "CPU"
        ]
        rows.sort(key=lambda row: -row["ms"])
        busy = sum(row["ms"] for row in rows)
        calls = sum(row["calls"] for row in rows)
        self.note(f"profile k={k}", batch=batch, busy_ms=busy, launches=calls)
        for row in rows[:28]:
            print(f"    {row['ms']:9.4f} ms {row['calls']:7.1f}  {row['kernel']}", flush=True)
        self.out["rows"][-1]["kernels"] = rows[:60]

    def run(self) -> None:
        """Everything that the options ask for, as far as the time goes."""
        args = self.args
        for k in args.ks:
            if self.left() < 30:
                self.note("no time left", k=k)
                return
            longest = max([PROMPT, *args.long, *args.prefill]) + 64 * (k + 1) + 512
            engine = self.engine(k, args.batches, longest)
            if self.device.type == "cuda":
                self.note(f"memory k={k}", gib=torch.cuda.memory_allocated() / 2**30)
            cases = [(b, args.prompt) for b in args.batches]
            cases += [(b, n) for n in args.long for b in args.long_batches] if k == 0 else []
            for length in args.prefill if k == 0 else ():
                self.prefill(engine, length)
            for batch, prompt in cases:
                if self.left() < 15:
                    self.note("no time left", batch=batch)
                    break
                self.decode(
                    engine, k, batch, prompt, batch in args.profile and prompt == args.prompt
                )
            del engine
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


def numbers(text: str) -> list[int]:
    """Whole numbers separated by commas."""
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    """Measure one spec."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("spec")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 64, 128])
    parser.add_argument("--ks", type=numbers, default=[0, 1, 3])
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--long", type=numbers, default=[])
    parser.add_argument("--long-batches", type=numbers, default=[1, 8])
    parser.add_argument("--prefill", type=numbers, default=[])
    parser.add_argument("--profile", type=numbers, default=[], help="batch sizes to trace")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--kv-gib", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop starting parts then")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    Bench(args).run()


if __name__ == "__main__":
    main()
