"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from v4graph.server.responses import dump

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class ClientDisconnectedError(Exception):
    """Nobody waits for the answer any more."""


def event(body: BaseModel | dict[str, Any]) -> bytes:
    """One event with a JSON body."""
    data = dump(body) if isinstance(body, BaseModel) else body
    return b"data: %s\n\n" % json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


class EventStream(StreamingResponse):
    """A stream of events that always runs `on_close`, however it ends.

    A client can leave before the first event or while a write blocks; then the event generator is
    not running, and its own `finally` would wait for the garbage collector.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        # Proxies that buffer would turn the stream into one late answer.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers)
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, or cancel it when the client closes the connection.

    Raises:
        ClientDisconnectedError: the client left first.
    """
    job = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({job, watch}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        raise ClientDisconnectedError
    finally:
        for task in (job, watch):
            task.cancel()
        await asyncio.gather(job, watch, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
