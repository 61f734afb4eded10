"""Build a plan's programs: parameters and pools on the device, one program a mode and bucket."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from v4graph.errors import ProgramError
from v4graph.model.projections import FLOAT32, StoredParam, decode_others, flatten
from v4graph.model.rope import inverse_frequencies
from v4graph.model.sublayers import AttentionSublayer, FfnSublayer
from v4graph.plan.types import Bucket, LayerPlan, Mode, Plan
from v4graph.plan.weights import head_tensor
from v4graph.program.compile_cache import user_fault
from v4graph.program.compiler import Compiler
from v4graph.program.drafting import make_stage
from v4graph.program.stage import ModelState, Stage, Tensors, pool_poison
from v4graph.program.step import StepProgram
from v4graph.program.table import RequestTable
from v4graph.spec.model import ModelSpec
from v4graph.words import counted

E4M3 = torch.float8_e4m3fn


class Progress(Protocol):
    """Takes a stage, how much of it is done, of how much, and what comes next."""

    def __call__(self, stage: str, done: int, total: int, what: str = "", /) -> None: ...


def build_state(
    spec: ModelSpec,
    plan: Plan,
    params: Mapping[str, StoredParam],
    device: torch.device,
    checked: bool,
    operators: bool = False,
) -> ModelState:
    """Put weights on `device` and allocate page pools and the request table.

    In checked mode pools start as NaN, so that reading a row nobody wrote shows in the logits.

    Args:
        params: plain or as stored (`model.projections.StoredParam`); only projections and experts
            can stay FP8 or FP4.
        operators: whether regions call registered operators where there are some.
    """
    layers, pools = _layers("layers", plan.layers, spec, plan, params, device, checked)
    draft = _layers("mtp", plan.speculation.layers, spec, plan, params, device, checked)
    dtype = _dtype(plan)
    own = {k: v for k, v in params.items() if not k.startswith(("layers.", "mtp."))}
    top = {k: _place(k, v, device) for k, v in flatten(decode_others(own, dtype), dtype).items()}
    # One tensor under two names where they are tied; regions ask for `head.weight`.
    top["head.weight"] = top[head_tensor(spec)]
    names = {name for name, _ in (*plan.rope_dims, *plan.draft_rope_dims)}
    freqs = {name: inverse_frequencies(spec.rope[name]).to(device) for name in sorted(names)}
    table = RequestTable(plan, spec.vocab_size, device)
    return ModelState(spec, plan, layers, draft[0], top, pools, draft[1], freqs, table, operators)


def _layers(
    block: str,
    kinds: Sequence[LayerPlan],
    spec: ModelSpec,
    plan: Plan,
    params: Mapping[str, StoredParam],
    device: torch.device,
    checked: bool,
) -> tuple[list[Tensors], list[Tensors]]:
    """Packed weights and page pools of each layer stored under `block.N`."""
    layers, pools = [], []
    for layer in kinds:
        prefix = f"{block}.{layer.index}."
        found = {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}
        own = decode_others(found, _dtype(plan))
        packed = FfnSublayer(spec, layer.ffn).pack(
            AttentionSublayer(spec, layer.attention).pack(own)
        )
        tensors = flatten(packed, _dtype(plan))
        layers.append({k: _place(k, v, device) for k, v in tensors.items()})
        caches = dict(spec.attention[layer.attention].caches)
        pools.append({role: _pool(plan, name, device, checked) for role, name in caches.items()})
    return layers, pools


_PROJECTIONS = (
    "e_proj.weight",
    "h_proj.weight",
    "attn.in",
    "attn.q",
    "attn.compress",
    "_fn",
    "gate.weight",
    "w13",
    "head.weight",
)
_OUTPUTS = ("wo_b.weight", "w2.weight")


def _dtype(plan: Plan) -> torch.dtype:
    return getattr(torch, plan.limits.dtype)


def _place(name: str, tensor: Tensor, device: torch.device) -> Tensor:
    """Put a weight on the device; on a CPU, plain projections lie input-major.

    Those whose products are float32 are converted, but not bf16 ones on a GPU (`linear_float32`).

    MKL multiplies a few rows by an input-major matrix up to twice as fast (8 x 1024 by 1024 x 24:
    13.5 us against 37.7 us on one core).
    """
    tensor = tensor.to(device)
    if name in FLOAT32 and (device.type == "cpu" or tensor.dtype is not torch.bfloat16):
        tensor = tensor.float()
    is_matrix = tensor.dim() == 2 and name.endswith((*_PROJECTIONS, *_OUTPUTS))
    if device.type == "cpu" and is_matrix and tensor.dtype not in (torch.uint8, E4M3):
        return tensor.t().contiguous().t()
    return tensor


def _pool(plan: Plan, group: str, device: torch.device, checked: bool) -> Tensor:
    g = plan.group(group)
    pool = torch.zeros(g.pool_shape, dtype=getattr(torch, g.row_dtype), device=device)
    return pool.fill_(pool_poison(pool)) if checked else pool


class ProgramSet:
    """Every step program of a plan, and the choice of one for a batch."""

    def __init__(
        self,
        state: ModelState,
        compiler: Compiler,
        checked: bool,
        keys: Collection[tuple[Mode, Bucket]] | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        """`keys` restricts the set to some programs; all of the plan's if left out. On a GPU
        compiled rounds become CUDA graphs unless `cuda_graphs` is False."""
        self.state, self.compiler, self.checked = state, compiler, checked
        self._stages: dict[tuple[Mode, Bucket, int], Stage] = {}
        on_gpu = state.table.device.type == "cuda"
        pool = torch.cuda.graph_pool_handle() if cuda_graphs and on_gpu else None
        self.programs: dict[tuple[Mode, Bucket], StepProgram] = {
            key: StepProgram(state, *key, compiler, checked, self._stage, pool)
            for key in state.plan.rounds()
            if keys is None or key in keys
        }

    def _stage(self, mode: Mode, bucket: Bucket, layer: int) -> Stage:
        key = (mode, bucket, layer)
        if key not in self._stages:
            self._stages[key] = make_stage(self.state, mode, bucket, self.compiler, layer)
        return self._stages[key]

    def order(self) -> list[tuple[Mode, Bucket]]:
        """All programs, largest first."""
        return sorted(self.programs, key=lambda key: (-key[1].num_tokens, -key[1].num_reqs))

    def warm_up(
        self,
        progress: Progress | None = None,
        before: Callable[[tuple[Mode, Bucket]], None] | None = None,
        order: Sequence[tuple[Mode, Bucket]] | None = None,
    ) -> None:
        """Compile all programs, then refuse further compilations.

        Args:
            progress: called with ("compile", done, total, the next program).
            before: called with each program's key before it is compiled.
            order: the order to compile in; `order()` if left out.

        Raises:
            CacheError: the directory of compiled programs cannot be written.
        """
        todo = list(order or self.order())
        for i, key in enumerate(todo):
            if progress is not None:
                mode, bucket = key
                size = counted(bucket.num_tokens, "token"), counted(bucket.num_reqs, "request")
                what = f"{mode.value} of {', '.join(size)}"
                progress("compile", i, len(todo), what)
            if before is not None:
                before(key)
            try:
                self.programs[key].warm_up()
            except RuntimeError as fault:  # Dynamo wraps what a compilation raises
                if (own := user_fault(fault)) is not None:
                    raise own from fault
                raise
            self.compiler.keep()
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
            f"no {mode.value} program holds {counted(num_tokens, 'token')} in "
            f"{counted(num_reqs, 'request')}"
        )
