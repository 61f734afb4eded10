"""Compile programs in a second process, so that two cores share a cold start.

The child builds the same programs over zeros and runs them once; what it leaves is Inductor's
cache on disk, from which this process then takes them. A stamp in the cache marks sets that need no
child.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from v4graph.model.params import logical_entries, stack_experts
from v4graph.plan.types import Bucket, Mode, Plan
from v4graph.program.build import ProgramSet, build_state
from v4graph.program.compile_cache import STAMP_SUFFIX, compile_cache
from v4graph.program.compiler import Compiler
from v4graph.spec.model import ModelSpec

Keys = tuple[tuple[Mode, Bucket], ...]


@dataclass(frozen=True)
class Job:
    """Everything the child needs; weights are zeros of the same shapes."""

    spec: ModelSpec
    plan: Plan
    keys: Keys
    num_threads: int

    def stamp(self) -> Path:
        """The file that says the cache holds these programs."""
        parts = (self.spec.model_dump_json(), self.plan, self.keys, self.num_threads)
        text = repr((parts, torch.__version__, sys.version, _source_state()))
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        return compile_cache().directory / f"{name}{STAMP_SUFFIX}"


def _source_state() -> str:
    """Changes whenever a file of the package that traced code comes from does."""
    root = Path(__file__).parents[1]
    files = [p for part in ("ops", "model", "program") for p in sorted((root / part).glob("*.py"))]
    return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()


def start(job: Job) -> subprocess.Popen[bytes] | None:
    """Start the child; None when the cache already holds the programs."""
    if job.stamp().is_file():
        return None
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.num_threads)}
    child = subprocess.Popen(
        [sys.executable, "-m", "v4graph.program.precompile"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    if child.stdin is not None:
        child.stdin.write(pickle.dumps(job))
        child.stdin.close()
    return child


def finish(job: Job, child: subprocess.Popen[bytes] | None) -> None:
    """Wait for the child. Its failure costs time only: this process compiles what is missing."""
    if child is not None and child.wait() == 0:
        job.stamp().touch()


def main() -> None:
    """The child: a pickled `Job` on standard input."""
    job: Job = pickle.loads(sys.stdin.buffer.read())
    torch.set_num_threads(job.num_threads)
    compute = getattr(torch, job.plan.limits.dtype)
    dtypes = {"F32": torch.float32, "I64": torch.int64}
    zeros = {
        e.name: torch.zeros(e.shape, dtype=dtypes.get(e.dtype, compute))
        for e in logical_entries(job.spec)
    }
    state = build_state(job.spec, job.plan, stack_experts(zeros), torch.device("cpu"), False)
    ProgramSet(state, Compiler(), False, job.keys).warm_up()


if __name__ == "__main__":
    main()
