"""The engine: requests in, tokens out, one step program at a time. Not thread safe, text-free."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from v4graph.engine.admission import check_params
from v4graph.engine.config import EngineConfig
from v4graph.engine.pages import PageManager
from v4graph.engine.prefix_salt import identity
from v4graph.engine.request import FinishReason, Request, SamplingParams, StepOutput
from v4graph.engine.rounds import (
    DraftCounts,
    Injector,
    Readback,
    Recorder,
    Round,
    RoundRecord,
    RowLogprobs,
)
from v4graph.engine.scheduler import ScheduledBatch, Scheduler
from v4graph.errors import PlanError, ProgramError, RequestError
from v4graph.model.loader import load_params, load_quantised
from v4graph.model.projections import StoredParam, tensors_of
from v4graph.plan.budget import fit
from v4graph.plan.lower import lower
from v4graph.plan.types import Mode, Plan
from v4graph.program.build import ProgramSet, Progress, build_state
from v4graph.program.compiler import Compiler
from v4graph.program.warm_up import warm_up
from v4graph.spec.model import ModelSpec
from v4graph.words import counted


class LLMEngine:
    """Continuous batching over the step programs of one model."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        programs: ProgramSet,
        seed: int = 0,
        prefix_salt: bytes | None = None,
    ) -> None:
        """`prefix_salt` turns the prefix cache on; it tells the model from any other."""
        self.spec, self.plan, self.programs = spec, plan, programs
        state = programs.state
        poison = state.poison_pages if programs.checked else None
        self.pages = PageManager(plan, state.table, poison, salt=prefix_salt, copy=state.copy_pages)
        self.scheduler = Scheduler(plan, self.pages)
        self.max_model_len = plan.max_model_len
        self._requests: dict[str, Request] = {}
        self._seeds = random.Random(seed)
        self._eos = frozenset(spec.eos_token_ids)
        self._step = 0
        self._arrivals = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._num_faults = 0
        self._unread: Round | None = None
        self.draft_counts = DraftCounts()
        self.recorder: Recorder | None = None
        """Called for every verification, in order; reads drafts back, so it costs a wait."""
        self.draft_injector: Injector | None = None
        """Asked before every verification; needs an engine without overlap."""

    @classmethod
    def from_params(
        cls,
        spec: ModelSpec,
        params: Mapping[str, StoredParam],
        config: EngineConfig,
        progress: Progress | None = None,
    ) -> LLMEngine:
        """Build an engine around parameters in memory (see `v4graph.model.params`): decoded, or as
        stored if some are `Fp8Block` or `Fp4`."""
        operators = config.use_operators(spec)
        device = config.torch_device()
        stored = any(not isinstance(p, torch.Tensor) for p in params.values())
        limits = replace(config.limits(), stored_weights=stored)
        if device.type == "cuda":
            # Parameters that lie on the device already are free of charge.
            placed = sum(t.nbytes for p in params.values() for t in tensors_of(p) if t.is_cuda)
            plan = fit(spec, limits, torch.cuda.mem_get_info(device)[0] + placed)
        else:
            plan = lower(spec, limits)
        state = build_state(spec, plan, params, device, config.checked, operators)
        programs = ProgramSet(
            state, Compiler(config.compile), config.checked, cuda_graphs=config.cuda_graphs
        )
        warm_up(programs, progress)
        salt = identity(spec, plan, params) if config.prefix_cache else None
        return cls(spec, plan, programs, config.seed, salt)

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
            progress: called with (stage, done, total) while loading, and while compiling with the
                next program too.

        Raises:
            WeightsError, PlanError: the checkpoint or the limits do not fit the spec.
        """
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(config.dtype)
        if dtype is None:
            raise PlanError(f"dtype {config.dtype!r}: expected 'float32' or 'bfloat16'")
        speculative = config.speculative or next(iter(spec.speculative), "none")
        if config.keep_stored(spec):
            device = config.torch_device()
            params = load_quantised(
                spec, weights, dtype, progress, device, speculative, config.allow_nonfinite
            )
        else:
            plain = load_params(spec, weights, dtype, progress, speculative, config.allow_nonfinite)
            return cls.from_params(spec, plain, config, progress)
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
        check_params(params, self.plan.limits, self.spec.vocab_size, self._eos)
        if not prompt_ids:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        for token in prompt_ids:
            if not isinstance(token, int) or not 0 <= token < self.spec.vocab_size:
                raise RequestError(
                    f"token id {token!r} is not in 0..{self.spec.vocab_size - 1}", "prompt"
                )
        if len(prompt_ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {counted(len(prompt_ids), 'token')}; the context of "
                f"{self.max_model_len} leaves no room to generate",
                "prompt",
            )
        longest = min(len(prompt_ids) + params.max_tokens, self.max_model_len)
        if not self.pages.fits_alone(longest):
            raise RequestError(
                f"{counted(longest, 'token needs', 'tokens need')} more cache pages than the pools "
                "hold",
                "max_tokens",
            )
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(62)
        rules = params.rules(len(prompt_ids), self._eos)
        request = Request(
            request_id, list(prompt_ids), len(prompt_ids), params, seed, self._arrivals, rules
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
        return bool(self._requests) or self._unread is not None

    # Steps -------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        """Launch a round and read one: the same, or with overlap the one before.

        Returns [] when there was nothing to do or no token came out.
        """
        batch = self.scheduler.schedule()
        launched = self._launch(batch) if batch is not None else None
        if not self.plan.limits.overlap:
            return [] if launched is None else self._read(launched)
        unread, self._unread = self._unread, launched
        if unread is None:
            return []
        if launched is None:
            self._step += 1
            self.programs.dispatch(Mode.IDLE, 0, 0).run([], [], self._step, False)
        return self._read(unread)

    def _launch(self, batch: ScheduledBatch) -> Round:
        self._step += 1
        counts = batch.num_scheduled_tokens
        program = self.programs.dispatch(batch.mode, sum(counts), len(counts))
        verifying = batch.mode is Mode.TARGET_VERIFY
        if verifying and self.draft_injector is not None:
            self._inject(batch.requests)
        drafts = self._drafts(batch.requests) if verifying and self.recorder else []
        result = program.run(
            [r.slot for r in batch.requests],
            counts,
            self._step,
            any(r.params.temperature > 0 for r in batch.requests),
            any(r.rules is not None for r in batch.requests),
            any(r.params.logprobs is not None for r in batch.requests),
        )
        preemptions = [r.num_preemptions for r in batch.requests]
        readback = Readback(result.tokens, result.num_drafts, result.logprobs)
        return Round(batch, readback, preemptions, drafts)

    def _inject(self, requests: list[Request]) -> None:
        assert self.draft_injector is not None  # noqa: S101 (the caller asked)
        if self.plan.limits.overlap:
            raise PlanError("drafts can be injected only with overlap off: they follow the tokens")
        for request in requests:
            forced = self.draft_injector(request)
            if forced is not None:
                self.programs.state.table.force_drafts(request.slot, forced)

    def _drafts(self, requests: list[Request]) -> list[list[int]]:
        table = self.programs.state.table
        slots = torch.tensor([r.slot for r in requests], device=table.device)
        room = (self.max_model_len - 1 - table.scalars["num_tokens"][slots]).clamp_min(0)
        counts = torch.minimum(table.scalars["num_drafts"][slots], room).tolist()
        rows = table.draft_tokens[slots].tolist()
        return [row[:n] for row, n in zip(rows, counts, strict=True)]

    def _read(self, done: Round) -> list[StepOutput]:
        outputs = []
        verifying = done.batch.mode is Mode.TARGET_VERIFY
        rows, num_drafts, faults = done.tokens.wait()
        told = done.tokens.logprobs()
        for i, (request, count) in enumerate(
            zip(done.batch.requests, done.batch.num_scheduled_tokens, strict=True)
        ):
            request.num_unread_rounds -= 1
            if self._requests.get(request.request_id) is not request:
                continue  # aborted, or it ended in the round before
            tokens = rows[i]
            # A round with a fault is the request's last: its counts serve nobody.
            if verifying and not faults[i]:
                if not tokens:
                    raise ProgramError(
                        f"{request.request_id}: a verification that committed no token"
                    )
                self._count_round(request, (count - 1, num_drafts[i]), tokens, done, i)
            logprobs = None if told is None else told[i]
            output = self._append(request, tokens, logprobs, faults[i])
            if output is not None:
                outputs.append(output)
            if output is None or output.finish_reason is None:
                self.pages.free_unreadable(request)
        return outputs

    def _count_round(
        self,
        request: Request,
        num_drafts: tuple[int, int],
        tokens: list[int],
        done: Round,
        index: int,
    ) -> None:
        """`num_drafts`: those that there was room for, and those that were verified."""
        room, verified = num_drafts
        if request.num_preemptions == done.preemptions[index]:
            request.num_computed_tokens += len(tokens) - 1
            request.num_unread_drafts -= room
        self.draft_counts.add(verified, len(tokens) - 1)
        if self.recorder is not None:
            known = request.num_tokens
            self.recorder(RoundRecord(request.request_id, known, done.drafts[index], tokens))

    def _append(
        self, request: Request, tokens: list[int], told: RowLogprobs | None, faulty: bool
    ) -> StepOutput | None:
        """Give a request its new tokens, up to one that ends it; None when there are none.

        `faulty`: the logits behind them were not finite, which ends it unless a token did.
        """
        if tokens and request.num_generated_tokens == 0:
            self._prompt_tokens += request.num_prompt_tokens
        kept: list[int] = []
        reason = None
        for token in tokens:
            request.token_ids.append(token)
            kept.append(token)
            reason = self._finish_reason(request, token)
            if reason is not None:
                break
        self._generated_tokens += len(kept)
        if faulty and reason is None:
            # Its newest rows may hold what is no number: they are published no more.
            reason = FinishReason.ERROR
            self._num_faults += 1
        else:
            self.pages.publish(request, reason is not None)
        if reason is not None:
            del self._requests[request.request_id]
            self.scheduler.finish(request)
        if not kept and reason is None:
            return None
        count = request.params.logprobs
        logprobs = None if told is None or count is None else told.tell(kept, count)
        return StepOutput(request.request_id, kept, reason, logprobs, request.num_cached_tokens)

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
            "num_rounds": self.draft_counts.rounds,
            "draft_tokens": self.draft_counts.drafts,
            "accepted_draft_tokens": self.draft_counts.accepted,
            "num_nonfinite_requests": self._num_faults,
            "num_recompilations": self.programs.compiler.recompilations,
        }
        if self.pages.prefix is not None:
            out |= self.pages.prefix.metrics
        for name, pool in self.pages.pools.items():
            out[f"pages_used.{name}"] = pool.num_used
            out[f"pages_cached.{name}"] = pool.num_cached
            out[f"pages_total.{name}"] = pool.group.num_pages - 1
        return out

    def check_integrity(self) -> None:
        """Compare every page account.

        Raises:
            IntegrityError: a page is leaked, shared or mapped wrongly.
        """
        self.pages.check_integrity(self.scheduler.running)
