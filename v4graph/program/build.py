"""Build the programs of a plan: parameters and pools on the device, a program per mode and bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from v4graph.errors import ProgramError
from v4graph.model.sublayers import AttentionSublayer, FfnSublayer
from v4graph.model.rope import inverse_frequencies
from v4graph.plan.types import Bucket, Mode, Plan
from v4graph.program.compiler import Compiler
from v4graph.program.step import ModelState, StepProgram
from v4graph.program.table import RequestTable
from v4graph.spec.model import ModelSpec

Progress = Callable[[str, int, int], None]


def build_state(
    spec: ModelSpec,
    plan: Plan,
    params: Mapping[str, Tensor],
    device: torch.device,
    checked: bool,
) -> ModelState:
    """Put weights on `device` and allocate page pools and the request table.

    In checked mode pools start as NaN, so that reading a row nobody wrote shows in the logits.
    """
    layers, pools = [], []
    for layer in plan.layers:
        prefix = f"layers.{layer.index}."
        own = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
        packed = FfnSublayer(spec, layer.ffn).pack(
            AttentionSublayer(spec, layer.attention).pack(own)
        )
        layers.append({k: v.to(device) for k, v in packed.items()})
        caches = dict(spec.attention[layer.attention].caches)
        pools.append({role: _pool(plan, name, device, checked) for role, name in caches.items()})
    top = {k: v.to(device) for k, v in params.items() if not k.startswith(("layers.", "mtp."))}
    freqs = {name: inverse_frequencies(spec.rope[name]).to(device) for name, _ in plan.rope_dims}
    table = RequestTable(plan, device)
    return ModelState(spec, plan, layers, top, pools, freqs, table)


def _pool(plan: Plan, group: str, device: torch.device, checked: bool) -> Tensor:
    g = plan.group(group)
    shape, dtype = (g.num_pages * g.page_rows, g.row_dim), getattr(torch, g.row_dtype)
    return torch.full(shape, float("nan") if checked else 0.0, dtype=dtype, device=device)


class ProgramSet:
    """Every step program of a plan, and the choice of one for a batch."""

    def __init__(self, state: ModelState, compiler: Compiler, checked: bool) -> None:
        self.state, self.compiler, self.checked = state, compiler, checked
        self.programs: dict[tuple[Mode, Bucket], StepProgram] = {
            (m.mode, bucket): StepProgram(state, m.mode, bucket, compiler, checked)
            for m in state.plan.modes
            for bucket in m.buckets
        }

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile all programs, largest first, then refuse further compilations."""
        todo = sorted(
            self.programs.values(), key=lambda p: (-p.bucket.num_tokens, -p.bucket.num_reqs)
        )
        for i, program in enumerate(todo):
            if progress is not None:
                progress("compile", i, len(todo))
            program.warm_up()
        if progress is not None:
            progress("compile", len(todo), len(todo))
        self.compiler.seal()

    def dispatch(self, mode: Mode, num_tokens: int, num_reqs: int) -> StepProgram:
        """The smallest program of `mode` that holds the batch.

        Raises:
            ProgramError: no bucket is large enough (the scheduler broke the plan's limits).
        """
        for bucket in self.state.plan.mode(mode).buckets:
            if bucket.num_tokens >= num_tokens and bucket.num_reqs >= num_reqs:
                return self.programs[mode, bucket]
        raise ProgramError(
            f"no {mode.value} program holds {num_tokens} tokens in {num_reqs} requests"
        )
