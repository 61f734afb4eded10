"""Time of each Triton kernel on one GPU, and what share of the copy bandwidth it reaches.

    python benchmarks/kernels.py OUT.json [--only attention,experts] [--reference]

Shapes are V4-Flash's. A case has several input sets, together larger than the L2; a CUDA graph
runs all of them, and the median replay counts. Bytes are those that must move: every input that is
read and every output, once. Outputs are first compared with the reference operator on the CPU;
`--reference` also times that operator, eager, on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from bandwidth import copy_bandwidth
from kernel_cases import GROUPS, Case
from torch import Tensor

from v4graph_kernels import tuning

L2_BYTES = 256 << 20
"""Input sets together hold at least this much, four times the L2 of an H200."""
MAX_SETS = 24


def graph_us(calls: list[Callable[[], object]], replays: int = 30) -> float:
    """Median microseconds of one call, all calls being captured in one CUDA graph."""
    for call in calls:
        call()  # compiles and tunes; capture allows neither
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def relative_difference(case: Case, args: tuple) -> float | None:
    """`||kernel - reference|| / ||reference||` of the first output, both on the GPU."""
    if case.reference is None:
        return None
    got, expected = case.run(*args), case.reference(*args)
    got, expected = (o[0] if isinstance(o, tuple) else o for o in (got, expected))
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm())


def measure(case: Case, bandwidth: float, with_reference: bool) -> dict:
    """One row of the result."""
    sets = [case.make()]
    size = sum(a.nbytes for a in sets[0] if isinstance(a, Tensor))
    shared = case.name == "fp4_experts"
    wanted = 8 if shared else min(MAX_SETS, -(-L2_BYTES // size))
    difference = relative_difference(case, sets[0])
    sets += [case.make() for _ in range(wanted - 1)]
    us = graph_us([lambda a=a: case.run(*a) for a in sets])
    share = case.bytes_moved / (us * 1e-6) / bandwidth
    out = {
        "kernel": case.name,
        **case.shape,
        "us": round(us, 2),
        "mbytes": round(case.bytes_moved / 1e6, 3),
        "share_of_copy_bandwidth": round(share, 3),
        "difference": difference,
    }
    if case.operations:
        out["tflops"] = round(case.operations / (us * 1e6), 1)
    if with_reference and case.reference is not None:
        reference = case.reference
        out["reference_us"] = round(graph_us([lambda: reference(*sets[0])], 10), 2)
    return out


def main() -> None:
    """Measure the chosen groups and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, separated by commas")
    parser.add_argument(
        "--tune", type=Path, help="try every configuration, and write the best ones' table here"
    )
    parser.add_argument("--reference", action="store_true", help="time the references too")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(GROUPS)
    if unknown:
        parser.error(f"--only: no group {', '.join(sorted(unknown))}; one of {', '.join(GROUPS)}")
    if options.tune:
        os.environ["V4GRAPH_TUNE_KERNELS"] = "1"
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(torch.device("cuda"))
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_s": bandwidth,
        "kernels": [],
    }
    print(f"{found['device']}: copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    for group in options.only.split(","):
        for case in GROUPS[group]():
            row = measure(case, bandwidth, options.reference)
            found["kernels"].append(row)
            print(row, flush=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
            if options.tune:
                tuning.save(options.tune)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
