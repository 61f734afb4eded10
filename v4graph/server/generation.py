"""Run the prompts of one HTTP request through the engine and give back their text."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from v4graph.engine.async_engine import AsyncEngine, RequestStream
from v4graph.engine.request import FinishReason, SamplingParams, TokenLogprobs
from v4graph.errors import NonFiniteLogitsError
from v4graph.server.metrics import RequestTimer, ServerMetrics
from v4graph.server.protocol import GenerationRequest
from v4graph.server.responses import FinishName, Usage
from v4graph.text.output import OutputText
from v4graph.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChoiceDelta:
    """New text of one choice; the last one of a choice has a finish reason."""

    index: int
    text: str
    reasoning: str
    finish_reason: FinishName | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the tokens since the last delta, if the request asked for them."""


@dataclass(frozen=True)
class Serving:
    """What every request needs."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    metrics: ServerMetrics
    model_name: str
    created: int


class Generation:
    """The choices of one HTTP request, one for each prompt; `close` it when done."""

    def __init__(
        self, serving: Serving, body: GenerationRequest, kind: str, thinking: bool = False
    ) -> None:
        self.id = f"{kind}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._serving = serving
        self._body = body
        self._thinking = thinking
        self._bad_words = serving.tokenizer.banned_sequences(body.bad_words)
        self._arrival = time.perf_counter()
        self._streams: list[RequestStream] = []
        self._timers: list[RequestTimer] = []
        self._open: set[int] = set()
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}

    async def submit(self, prompts: Sequence[list[int]]) -> None:
        """Submit all prompts (token ids of each choice) at once; if one is refused, none runs.

        Raises:
            RequestError: a prompt or a parameter is refused.
            EngineDeadError: the engine is not running.
        """
        engine = self._serving.engine
        tasks = [
            asyncio.create_task(engine.submit(f"{self.id}-{index}", ids, self._params(len(ids))))
            for index, ids in enumerate(prompts)
        ]
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            # gather cancels only what still waits.
            for task in tasks:
                if task.done() and not task.cancelled() and task.exception() is None:
                    task.result().close()
            raise
        self._streams = [r for r in results if isinstance(r, RequestStream)]
        for result in results:
            if isinstance(result, BaseException):
                self.close()
                raise result
        self._num_prompt_tokens = sum(map(len, prompts))
        self._timers = [self._serving.metrics.timer(len(ids), self._arrival) for ids in prompts]
        self._open = set(range(len(prompts)))

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage.of(
            self._num_prompt_tokens,
            self._num_completion_tokens,
            sum(self._num_cached_tokens.values()),
        )

    def close(self) -> None:
        """Abort what still runs; idempotent."""
        for stream in self._streams:
            stream.close()
        for index in sorted(self._open):
            self._end(index, "abort")

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """Text of all choices in the order of its arrival.

        Raises:
            EngineDeadError: the engine died; the choices stay unfinished.
            NonFiniteLogitsError: a choice cannot go on; the others are aborted.
        """
        merged: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue()

        async def pump(index: int, stream: RequestStream) -> None:
            try:
                async for delta in self._choice(index, stream):
                    merged.put_nowait(delta)
            except Exception as error:
                self._end(index, "error")
                merged.put_nowait(error)

        pumps = [asyncio.create_task(pump(i, s)) for i, s in enumerate(self._streams)]
        unfinished = len(pumps)
        try:
            while unfinished:
                item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            for task in pumps:
                task.cancel()
            self.close()

    async def _choice(self, index: int, stream: RequestStream) -> AsyncIterator[ChoiceDelta]:
        body = self._body
        output = OutputText(self._serving.tokenizer, body.stop, self._thinking, body.min_tokens)
        told: list[TokenLogprobs] = []
        num_tokens_so_far = 0
        async for step in stream:
            self._num_cached_tokens[index] = step.num_cached_tokens
            # The token that ended the text is counted, but has no text of its own.
            ended = step.finish_reason is FinishReason.STOP
            faulty = step.finish_reason is FinishReason.ERROR
            num_tokens_so_far += len(step.token_ids)
            delta = output.push(step.token_ids[:-1] if ended else step.token_ids)
            num_tokens = delta.num_tokens if delta.stopped else len(step.token_ids)
            self._num_completion_tokens += num_tokens
            self._timers[index].tokens(num_tokens)
            told += (step.logprobs or [])[:num_tokens]
            text, reasoning, finish = delta.text, delta.reasoning, None
            if delta.stopped:
                stream.close()
                finish = "stop"
            elif step.finish_reason is not None and not faulty:
                tail = output.flush()
                text, reasoning = text + tail.text, reasoning + tail.reasoning
                finish = "stop" if ended or tail.stopped else "length"
            if finish is not None:
                self._end(index, finish)
            if text or reasoning or finish is not None:
                yield ChoiceDelta(index, text, reasoning, finish, tuple(told))
                told.clear()
            if finish is not None:
                return
            if faulty:
                raise NonFiniteLogitsError.after(num_tokens_so_far)

    def _end(self, index: int, reason: str) -> None:
        if index in self._open:
            self._open.remove(index)
            self._timers[index].end(reason)

    def _params(self, num_prompt_tokens: int) -> SamplingParams:
        body = self._body
        room = self._serving.engine.max_model_len - num_prompt_tokens
        # A prompt without room is refused by `check_room` before this.
        cap = max(1, room if body.cap is None else min(body.cap, room))
        return SamplingParams(
            max_tokens=cap,
            min_tokens=min(body.min_tokens, cap),
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=body.logit_bias,
            bad_words=self._bad_words,
            logprobs=body.num_alternatives,
            seed=body.seed,
            stop_token_ids=tuple(body.stop_token_ids),
            ignore_eos=body.ignore_eos,
        )
