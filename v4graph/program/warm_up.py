"""Compile every program of an engine, on a CPU on two cores."""

from __future__ import annotations

import os

import torch

from v4graph.plan.types import Bucket, Mode
from v4graph.program import precompile
from v4graph.program.build import ProgramSet, Progress


def warm_up(programs: ProgramSet, progress: Progress | None) -> None:
    """Compile; on a CPU half of the programs in a second process, unless the cache has them."""
    state, keys = programs.state, programs.order()
    two_cores = (os.cpu_count() or 1) > 1
    cpu = state.table.device.type == "cpu"
    if not (programs.compiler.enabled and cpu and two_cores and len(keys) > 1):
        programs.warm_up(progress)
        return
    theirs = tuple(keys[::2])
    job = precompile.Job(state.spec, state.plan, theirs, torch.get_num_threads())
    child = precompile.start(job)
    waited = False

    def before(key: tuple[Mode, Bucket]) -> None:
        nonlocal waited
        if key in theirs and not waited:
            precompile.finish(job, child)
            waited = True

    programs.warm_up(progress, before, [*keys[1::2], *theirs])
