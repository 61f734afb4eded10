"""The engine: requests in, tokens out, one step program at a time. Not thread safe, text-free."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from v4graph.engine.pages import PageManager
from v4graph.engine.request import FinishReason, Request, SamplingParams, StepOutput
from v4graph.engine.scheduler import ScheduledBatch, Scheduler
from v4graph.errors import PlanError, RequestError
from v4graph.model.loader import load_params
from v4graph.plan.lower import lower
from v4graph.plan.types import Bucket, Limits, Mode, Plan
from v4graph.program import precompile
from v4graph.program.build import ProgramSet, build_state
from v4graph.program.compiler import Compiler
from v4graph.spec.model import ModelSpec

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EngineConfig:
    """What a user may set; 0 or None leaves the choice to the plan."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    max_model_len: int | None = None
    kv_memory_bytes: int | None = None
    dtype: str = "float32"
    device: str = "auto"
    compile: bool = True
    checked: bool = False
    kernels: str = "reference"
    seed: int = 0
    decode_buckets: tuple[int, ...] = ()
    prefill_buckets: tuple[tuple[int, int], ...] = ()
    greedy_only: bool = False
    """Build no sampling programs; requests with a temperature are refused."""

    def limits(self) -> Limits:
        """The plan's view of this configuration."""
        return Limits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len or 0,
            kv_memory_bytes=self.kv_memory_bytes or 0,
            dtype=self.dtype,
            decode_buckets=self.decode_buckets,
            prefill_buckets=self.prefill_buckets,
            greedy_only=self.greedy_only,
        )

    def torch_device(self) -> torch.device:
        """The device to run on.

        Raises:
            PlanError: a name that torch does not know, or CUDA where there is none.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as e:
            raise PlanError(f"device {self.device!r}: expected auto, cpu or cuda[:N]") from e
        if device.type == "cuda" and not torch.cuda.is_available():
            raise PlanError(f"device {self.device!r}: no NVIDIA GPU is visible to torch")
        return device


def _warm_up(programs: ProgramSet, progress: Progress | None) -> None:
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


class LLMEngine:
    """Continuous batching over the step programs of one model."""

    def __init__(self, spec: ModelSpec, plan: Plan, programs: ProgramSet, seed: int = 0) -> None:
        self.spec, self.plan, self.programs = spec, plan, programs
        state = programs.state
        poison = state.poison_pages if programs.checked else None
        self.pages = PageManager(plan, state.table, poison)
        self.scheduler = Scheduler(plan, self.pages)
        self.max_model_len = plan.max_model_len
        self._requests: dict[str, Request] = {}
        self._seeds = random.Random(seed)
        self._eos = frozenset(spec.eos_token_ids)
        self._step = 0
        self._arrivals = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0

    @classmethod
    def from_params(
        cls,
        spec: ModelSpec,
        params: dict[str, torch.Tensor],
        config: EngineConfig,
        progress: Progress | None = None,
    ) -> LLMEngine:
        """Build an engine around parameters in memory (see `v4graph.model.params`)."""
        if config.kernels != "reference":
            raise PlanError(f"kernels {config.kernels!r}: this version has 'reference' only")
        plan = lower(spec, config.limits())
        state = build_state(spec, plan, params, config.torch_device(), config.checked)
        programs = ProgramSet(state, Compiler(config.compile), config.checked)
        _warm_up(programs, progress)
        return cls(spec, plan, programs, config.seed)

    @classmethod
    def from_spec(
        cls,
        spec: ModelSpec,
        weights: Path,
        config: EngineConfig,
        progress: Progress | None = None,
    ) -> LLMEngine:
        """Load the checkpoint directory `weights` and build an engine.

        Args:
            progress: called with (stage, done, total) while loading and compiling.

        Raises:
            WeightsError, PlanError: the checkpoint or the limits do not fit the spec.
        """
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(config.dtype)
        if dtype is None:
            raise PlanError(f"dtype {config.dtype!r}: expected 'float32' or 'bfloat16'")
        params = load_params(spec, weights, dtype, progress)
        return cls.from_params(spec, params, config, progress)

    # Requests ----------------------------------------------------------------------------------

    def add_request(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        """Queue a request.

        Raises:
            RequestError: empty or overlong prompt, ids outside the vocabulary, id in use, or a
                length that the page pools can never hold.
        """
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use", "request_id")
        if self.plan.limits.greedy_only and params.temperature > 0:
            raise RequestError(
                f"temperature {params.temperature:g}: this engine was built for greedy output",
                "temperature",
            )
        if not prompt_ids:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        for token in prompt_ids:
            if not isinstance(token, int) or not 0 <= token < self.spec.vocab_size:
                raise RequestError(
                    f"token id {token!r} is not in 0..{self.spec.vocab_size - 1}", "prompt"
                )
        if len(prompt_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens; the context of "
                f"{self.max_model_len} leaves no room to generate",
                "prompt",
            )
        longest = min(len(prompt_ids) + params.max_tokens, self.max_model_len)
        if not self.pages.fits_alone(longest):
            raise RequestError(
                f"{longest} tokens need more cache pages than the pools hold", "max_tokens"
            )
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(62)
        request = Request(
            request_id, list(prompt_ids), len(prompt_ids), params, seed, self._arrivals
        )
        self._arrivals += 1
        self._requests[request_id] = request
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """Drop a request; unknown or finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.finish(request)

    def has_unfinished(self) -> bool:
        """Whether a step would have work."""
        return bool(self._requests)

    # Steps -------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Run one step program; [] when there is nothing to do or no token came out."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        self._step += 1
        counts = batch.num_scheduled_tokens
        program = self.programs.dispatch(batch.mode, sum(counts), len(counts))
        result = program.run(
            [r.slot for r in batch.requests],
            counts,
            self._step,
            any(r.params.temperature > 0 for r in batch.requests),
        )
        return self._process(batch, result.tokens.tolist())

    def _process(self, batch: ScheduledBatch, tokens: list[int]) -> list[StepOutput]:
        outputs = []
        for request, count, token in zip(
            batch.requests, batch.num_scheduled_tokens, tokens, strict=False
        ):
            request.num_computed_tokens += count
            if token < 0:
                self.pages.free_unreadable(request)
                continue
            if request.num_generated_tokens == 0:
                self._prompt_tokens += request.num_prompt_tokens
            request.token_ids.append(token)
            self._generated_tokens += 1
            reason = self._finish_reason(request, token)
            if reason is None:
                self.pages.free_unreadable(request)
            else:
                del self._requests[request.request_id]
                self.scheduler.finish(request)
            outputs.append(StepOutput(request.request_id, [token], reason))
        return outputs

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        p = request.params
        if token in p.stop_token_ids or (token in self._eos and not p.ignore_eos):
            return FinishReason.STOP
        if request.num_generated_tokens >= p.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.LENGTH if request.num_tokens >= self.max_model_len else None

    # Observation -------------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, float]:
        """Counters and gauges, pages per group included."""
        out: dict[str, float] = {
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting),
            "num_preemptions": self.scheduler.num_preemptions,
            "num_steps": self._step,
            "prompt_tokens": self._prompt_tokens,
            "generation_tokens": self._generated_tokens,
            "num_recompilations": self.programs.compiler.recompilations,
        }
        for name, pool in self.pages.pools.items():
            out[f"pages_used.{name}"] = pool.num_used
            out[f"pages_total.{name}"] = pool.group.num_pages - 1
        return out

    def check_integrity(self) -> None:
        """Compare every page account.

        Raises:
            IntegrityError: a page is leaked, shared or mapped wrongly.
        """
        self.pages.check_integrity(self.scheduler.running)
