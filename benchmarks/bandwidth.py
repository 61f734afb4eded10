"""The copy bandwidth of a device: what every benchmark here calls the limit of its memory.

    python benchmarks/bandwidth.py [--device cpu]

It is that of single large copies. The same copy as a node of a CUDA graph, one replay at a time,
reached two thirds of it on an H200 (2.71 against 4.24 TB/s), so shares of that would flatter.
"""

from __future__ import annotations

import argparse
import time

import torch


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written a second by a copy of 4 GiB (CPU: 64 MiB); the best of ten."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 24), device=device)
    target, times = torch.empty_like(source), []
    for _ in range(12):
        synchronise(device)
        begin = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        times.append(time.perf_counter() - begin)
    return 2 * source.nbytes / min(times[2:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the copy bandwidth of a device.")
    parser.add_argument("--device", default="cuda")
    print(f"{copy_bandwidth(torch.device(parser.parse_args().device)) / 1e12:.3f} TB/s")
