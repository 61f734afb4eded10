"""Run the engine in one thread and serve its steps to coroutines.

The engine is not thread safe: only its thread touches it. Coroutines send commands through a
queue and receive their request's steps on their own event loop.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from v4graph.engine.request import FinishReason, SamplingParams, StepOutput
from v4graph.errors import RequestError

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine thread has ended (a fault of ours, or shutdown); no request can be served."""


class StepEngine(Protocol):
    """What `AsyncEngine` needs of `LLMEngine`."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    def add_request(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams
    ) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def has_unfinished(self) -> bool: ...


class RequestStream:
    """The steps of one accepted request, in order; `close` it when done with it."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop, engine: AsyncEngine):
        self.request_id = request_id
        self._loop = loop
        self._engine = engine
        self._queue: asyncio.Queue[StepOutput | EngineDeadError] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> AsyncIterator[StepOutput]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[StepOutput]:
        try:
            while True:
                item = await self._queue.get()
                if isinstance(item, EngineDeadError):
                    # A fresh one: the engine fails all its streams with the same object.
                    raise EngineDeadError(str(item))
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self.close()

    def close(self) -> None:
        """Abort the request unless the engine has already finished it; idempotent."""
        # `_ended` is set on the event loop when the last step arrives, read or not: leaving after
        # a normal end must not look like a cancellation.
        if not self._ended:
            self._ended = True
            self._engine._abort(self.request_id)

    def _deliver(self, item: StepOutput | EngineDeadError) -> None:
        if isinstance(item, EngineDeadError) or item.finish_reason is not None:
            self._ended = True
        self._queue.put_nowait(item)


@dataclass(frozen=True)
class _Add:
    stream: RequestStream
    prompt_ids: list[int]
    params: SamplingParams
    accepted: asyncio.Future[None]


@dataclass(frozen=True)
class _Abort:
    request_id: str


@dataclass(frozen=True)
class _Stop:
    pass


class AsyncEngine:
    """Owns an engine and its thread; all methods are for event-loop code."""

    def __init__(self, engine: StepEngine) -> None:
        self.max_model_len = engine.max_model_len
        self.metrics: dict[str, float] = dict(engine.metrics)
        """The engine's counters after its latest step."""
        self._engine = engine
        self._commands: queue.SimpleQueue[_Add | _Abort | _Stop] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}  # touched by the engine thread only
        self._lock = threading.Lock()  # guards what follows
        self._num_requests = 0
        self._idle = threading.Event()
        self._idle.set()
        self._draining = False
        self._error: EngineDeadError | None = None
        self._thread = threading.Thread(target=self._run, name="v4graph-engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread; once."""
        self._thread.start()

    @property
    def error(self) -> EngineDeadError | None:
        """Why the engine is not running; None while it is."""
        if self._error is None and not self._thread.is_alive():
            return EngineDeadError("the engine thread is not running")
        return self._error

    async def submit(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams
    ) -> RequestStream:
        """Hand a request to the engine and wait until it is accepted.

        Raises:
            RequestError: the engine refuses the request.
            EngineDeadError: the engine has stopped or is stopping.
        """
        loop = asyncio.get_running_loop()
        stream = RequestStream(request_id, loop, self)
        accepted: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self._draining:
                raise EngineDeadError("the engine is shutting down")
            if (error := self.error) is not None:
                raise error
            # Under the lock: a dying engine either sees this command or is seen here.
            self._num_requests += 1
            self._idle.clear()
            self._commands.put(_Add(stream, prompt_ids, params, accepted))
        try:
            await accepted
        except asyncio.CancelledError:
            stream.close()
            raise
        return stream

    async def generate(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams
    ) -> AsyncIterator[StepOutput]:
        """Yield the steps of one request; leaving the loop early aborts it."""
        stream = await self.submit(request_id, prompt_ids, params)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the running ones; False when time ran out."""
        with self._lock:
            self._draining = True
        return await asyncio.to_thread(self._idle.wait, timeout)

    async def shutdown(self, timeout: float = 30.0) -> None:
        """Stop after the current step, failing what still runs; idempotent."""
        with self._lock:
            self._draining = True
            self._commands.put(_Stop())
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, timeout)

    def _abort(self, request_id: str) -> None:
        self._commands.put(_Abort(request_id))

    # From here on: the engine thread.

    def _run(self) -> None:
        try:
            while self._handle_commands():
                outputs = self._engine.step()
                self.metrics = dict(self._engine.metrics)
                for output in outputs:
                    self._route(output)
            for request_id in self._streams:
                self._engine.abort(request_id)
            self._fail(EngineDeadError("the engine is shutting down"))
        except BaseException as error:
            logger.exception("the engine thread died")
            self._fail(EngineDeadError(f"the engine failed: {type(error).__name__}: {error}"))

    def _handle_commands(self) -> bool:
        """Carry out waiting commands; block while there is no work. False means stop."""
        while True:
            wait = not self._engine.has_unfinished()
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if isinstance(command, _Stop):
                return False
            if isinstance(command, _Add):
                self._add(command)
            elif self._forget(command.request_id) is not None:
                self._engine.abort(command.request_id)
            self.metrics = dict(self._engine.metrics)

    def _add(self, command: _Add) -> None:
        stream, accepted = command.stream, command.accepted
        try:
            self._engine.add_request(stream.request_id, command.prompt_ids, command.params)
        except RequestError as error:
            self._release()
            self._post(stream, _set_exception, accepted, error)
            return
        except BaseException as error:
            dead = EngineDeadError(f"the engine failed: {type(error).__name__}: {error}")
            self._post(stream, _set_exception, accepted, dead)
            raise
        self._streams[stream.request_id] = stream
        self._post(stream, _set_result, accepted)

    def _route(self, output: StepOutput) -> None:
        finished = output.finish_reason is not None
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # aborted while the step ran
        if output.finish_reason is FinishReason.ABORT:
            item: StepOutput | EngineDeadError = EngineDeadError("the engine aborted the request")
        else:
            item = output
        if not self._post(stream, stream._deliver, item) and not finished:
            self._engine.abort(output.request_id)
            finished = True
        if finished:
            self._forget(output.request_id)

    def _forget(self, request_id: str) -> RequestStream | None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._release()
        return stream

    def _release(self) -> None:
        with self._lock:
            self._num_requests -= 1
            if self._num_requests == 0:
                self._idle.set()

    def _post(self, stream: RequestStream, call: Callable[..., None], *args: object) -> bool:
        """Run a call on the request's event loop; False when that loop is gone."""
        try:
            stream._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            return False
        return True

    def _fail(self, error: EngineDeadError) -> None:
        with self._lock:
            self._error = error
        for stream in self._streams.values():
            self._post(stream, stream._deliver, error)
        self._streams.clear()
        self._idle.set()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, _Add):
                self._post(command.stream, _set_exception, command.accepted, error)


def _set_result(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _set_exception(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
