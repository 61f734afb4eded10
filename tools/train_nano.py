"""Train a nano model from scratch, on one GPU or (tiny settings) a CPU.

    python tools/train_nano.py --data .nano --out OUT --minutes 17 --call-seconds 570 \
        --state /tmp/nano.pt

The learning rate follows trained wall-clock time against `--minutes`, so a run always ends with
annealed weights. A call ends after `--call-seconds`; the next call resumes from `--state`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nano.export import save_weights
from nano.fast import FastModel
from nano.init import initial_params
from nano.loss import Objective
from nano.optim import Optimiser, balance, trained
from torch import Tensor

from v4graph.spec.load import load_spec

WARM_UP, FLAT_UNTIL = 0.015, 0.35


def schedule(progress: float) -> float:
    """Share of the peak learning rate: warm-up, a plateau, a linear decay to zero."""
    if progress < WARM_UP:
        return max(progress / WARM_UP, 0.01)
    return min(1.0, max(0.0, (1 - progress) / (1 - FLAT_UNTIL)))


def read_ids(path: Path, device: str) -> Tensor:
    ids = np.frombuffer(lzma.decompress(path.read_bytes()), dtype=np.uint16)
    return torch.from_numpy(ids.astype(np.int32)).to(device)


class Batches:
    """Windows of the token stream, every epoch in a new order from a new offset."""

    def __init__(self, ids: Tensor, batch: int, length: int, seed: int) -> None:
        self.ids, self.batch, self.width, self.seed = ids, batch, length + 2, seed
        self.span = torch.arange(self.width, device=ids.device)
        self.epoch, self.cursor = -1, 0
        self.starts = torch.empty(0, dtype=torch.int64)

    def seek(self, epoch: int, cursor: int) -> None:
        gen = torch.Generator().manual_seed(self.seed * 1000 + epoch)
        step = self.width - 2
        count = (len(self.ids) - 2 * self.width) // step
        offset = int(torch.randint(0, step, (), generator=gen))
        starts = torch.randperm(count, generator=gen) * step + offset
        self.starts = starts.to(self.ids.device)
        self.epoch, self.cursor = epoch, cursor

    def next(self) -> Tensor:
        if self.cursor + self.batch > len(self.starts):
            self.seek(self.epoch + 1, 0)
        starts = self.starts[self.cursor : self.cursor + self.batch]
        self.cursor += self.batch
        return self.ids[starts[:, None] + self.span].long()


def held_out(objective: Objective, ids: Tensor, args: argparse.Namespace) -> dict[str, float]:
    """Mean losses over the first windows of the held-out stream (with gradients on, so that the
    compiled training graphs serve)."""
    width, sums = args.length + 2, {}
    windows = min(len(ids) // width, args.eval_windows) // args.batch
    for i in range(windows):
        part = ids[i * args.batch * width :][: args.batch * width].view(args.batch, width).long()
        for k, v in objective(part).parts.items():
            sums[k] = sums.get(k, 0.0) + float(v) / windows
    return sums


def restore(path: Path, params: dict[str, Tensor], optimiser: Optimiser, device: str) -> Any:
    """Load parameters and optimiser state in place; returns the counters."""
    state = torch.load(path, map_location=device)
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(state["params"][name])
    optimiser.load_state_dict(state["optimiser"])
    return state


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spec", default="v4-nano")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, help="resume from and save to this file")
    parser.add_argument("--minutes", type=float, required=True, help="whole schedule")
    parser.add_argument("--call-seconds", type=float, default=1e9, help="this process")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=3, help="recurrent draft steps")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", action="store_true", help="print the slowest kernels")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--eval-windows", type=int, default=256)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--save-every", type=float, default=150.0, help="seconds")
    return parser.parse_args()


def profile(objective: Objective, optimiser: Optimiser, batches: Batches) -> None:
    """Kernel times of two steps."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as trace:
        for _ in range(2):
            objective(batches.next()).total.backward()
            optimiser.step(0.0, 1.0)
        torch.cuda.synchronize()
    rows = [e for e in trace.key_averages() if e.self_device_time_total > 0]
    rows = [e for e in rows if e.device_type == torch.autograd.DeviceType.CUDA]
    total = sum(e.self_device_time_total for e in rows)
    print(f"device time of two steps: {total / 1000:.1f} ms")
    for e in sorted(rows, key=lambda e: -e.self_device_time_total)[:45]:
        print(f"{e.self_device_time_total / 1000:8.2f} ms {e.count:5d}  {e.key[:150]}")


def main() -> None:
    born = time.monotonic()
    args = parse()
    cuda = args.device == "cuda"
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    spec = load_spec(args.spec)
    ids = read_ids(args.data / "train.u16.xz", args.device)
    test = read_ids(args.data / "heldout.u16.xz", args.device)

    counts = torch.bincount(ids.cpu().long(), minlength=spec.vocab_size)
    params = {k: v.to(args.device) for k, v in initial_params(spec, counts, args.seed).items()}
    for p in trained(params).values():
        p.requires_grad_()
    groups = next(iter(spec.attention.values())).o_groups
    optimiser = Optimiser(params, groups)
    compute = torch.bfloat16 if cuda else torch.float32
    model = FastModel(spec, params, args.length, compute, compile_=not args.eager)
    objective = Objective(model, args.depth, compile_=not args.eager)
    batches = Batches(ids, args.batch, args.length, args.seed)
    batches.seek(0, 0)
    step, spent, tokens = 0, 0.0, 0
    if args.state and args.state.exists():
        state = restore(args.state, params, optimiser, args.device)
        batches.seek(state["epoch"], state["cursor"])
        step, spent, tokens = state["step"], state["spent"], state["tokens"]
    log = (args.out / "log.jsonl").open("a")

    def save() -> None:
        save_weights(spec, params, args.out, shards=2)
        if args.state:
            row = {"params": params, "optimiser": optimiser.state_dict(), "step": step}
            row |= {"spent": spent, "tokens": tokens}
            torch.save(row | {"epoch": batches.epoch, "cursor": batches.cursor}, args.state)

    def tell(row: dict[str, float]) -> None:
        line = json.dumps({k: round(v, 5) for k, v in row.items()})
        print(line, flush=True)
        log.write(line + "\n")

    # Compile before the clock of the schedule starts.
    objective(batches.next()).total.backward()
    for p in trained(params).values():
        p.grad = None
    if cuda:
        torch.cuda.synchronize()
    tell({"ready_seconds": time.monotonic() - born, "epoch_tokens": len(ids)})
    base, start, saved = spent, time.monotonic(), time.monotonic()
    marked, marked_tokens = start, tokens
    while step < args.max_steps:
        progress = spent / (args.minutes * 60)
        if progress >= 1 or time.monotonic() - born > args.call_seconds:
            break
        rate = args.lr * schedule(progress)
        model.dense.fill_(progress < 2 * WARM_UP)
        losses = objective(batches.next())
        losses.total.backward()
        norm = optimiser.step(rate, args.clip)
        with torch.no_grad():
            for p, load in losses.loads.items():
                if f"{p}.ffn.gate.bias" in params:
                    balance(params[f"{p}.ffn.gate.bias"], load, 1e-3 * schedule(progress))
        step += 1
        tokens += args.batch * args.length
        if cuda and step % 10 == 0:
            torch.cuda.synchronize()
        now = time.monotonic()
        spent = base + now - start
        if step % args.log_every == 0 or step <= 3:
            row = {"step": step, "progress": progress, "lr": rate, "norm": float(norm)}
            row |= {k: float(v) for k, v in losses.parts.items()}
            worst = max(float(v.max() / v.float().mean()) for v in losses.loads.values())
            now = time.monotonic()
            speed = (tokens - marked_tokens) / (now - marked)
            tell(row | {"load": worst, "tokens": tokens, "tokens_per_second": speed})
            marked, marked_tokens = now, tokens
            if not math.isfinite(row["main"]) and args.state and args.state.exists():
                # A lost run costs more than a detour: go back and continue gently.
                restore(args.state, params, optimiser, args.device)
                args.lr *= 0.5
        if now - saved > args.save_every:
            save()
            saved = time.monotonic()
    model.dense.fill_(False)
    if args.profile:
        profile(objective, optimiser, batches)
    save()
    if cuda:
        tell({"gib": torch.cuda.max_memory_allocated() / 2**30})
    scores = held_out(objective, test, args)
    tell(
        {"step": step, "spent": spent, "tokens": tokens}
        | {f"test_{k}": v for k, v in scores.items()}
    )
    tell({"call_seconds": time.monotonic() - born})


if __name__ == "__main__":
    main()
