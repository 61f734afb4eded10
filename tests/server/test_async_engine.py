from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from fake_server import FakeEngine

from v4graph.engine.async_engine import AsyncEngine, EngineDeadError
from v4graph.engine.request import FinishReason, SamplingParams
from v4graph.errors import RequestError

LONG = SamplingParams(max_tokens=200)
Body = Callable[[AsyncEngine], Awaitable[None]]


def run(engine: FakeEngine, body: Body) -> None:
    async def main() -> None:
        async_engine = AsyncEngine(engine)
        async_engine.start()
        try:
            await body(async_engine)
        finally:
            await async_engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 20))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_generate(engine: FakeEngine) -> None:
    async def body(async_engine: AsyncEngine) -> None:
        steps = [s async for s in async_engine.generate("a", [5], SamplingParams())]
        assert [len(s.token_ids) for s in steps] == [1] * 5
        assert [s.finish_reason for s in steps] == [None] * 4 + [FinishReason.STOP]

    run(engine, body)
    assert engine.num_aborts == 0


def test_leaving_the_loop_aborts(engine: FakeEngine) -> None:
    engine.endless = True
    engine.step_seconds = 0.002

    async def body(async_engine: AsyncEngine) -> None:
        stream = await async_engine.submit("a", [5], LONG)
        async for _ in stream:
            break
        stream.close()
        stream.close()
        await until(lambda: not engine.running)

    run(engine, body)
    assert engine.num_aborts == 1


def test_cancelling_aborts(engine: FakeEngine) -> None:
    engine.hold.set()

    async def body(async_engine: AsyncEngine) -> None:
        async def consume() -> None:
            async for _ in async_engine.generate("a", [5], LONG):
                pass

        task = asyncio.create_task(consume())
        await until(lambda: bool(engine.running))
        task.cancel()
        await until(lambda: not engine.running)

    run(engine, body)
    assert engine.num_aborts == 1


def test_closing_after_an_unread_end_is_no_abort(engine: FakeEngine) -> None:
    async def body(async_engine: AsyncEngine) -> None:
        stream = await async_engine.submit("a", [5], SamplingParams(max_tokens=2))
        await until(lambda: not engine.running)
        await asyncio.sleep(0.01)
        stream.close()

    run(engine, body)
    assert engine.num_aborts == 0


def test_refused_request(engine: FakeEngine) -> None:
    async def body(async_engine: AsyncEngine) -> None:
        with pytest.raises(RequestError) as caught:
            await async_engine.submit("a", [], SamplingParams())
        assert caught.value.field == "prompt"
        assert async_engine.error is None
        assert await async_engine.drain(timeout=1)

    run(engine, body)


def test_a_fault_fails_every_request_and_the_next(engine: FakeEngine) -> None:
    engine.hold.set()

    async def body(async_engine: AsyncEngine) -> None:
        streams = [await async_engine.submit(str(i), [5], LONG) for i in range(3)]
        start = time.monotonic()
        engine.fail_after_steps = 0
        for stream in streams:
            with pytest.raises(EngineDeadError, match="planted fault"):
                async for _ in stream:
                    pass
        assert time.monotonic() - start < 1
        with pytest.raises(EngineDeadError, match="planted fault"):
            await async_engine.submit("x", [5], LONG)
        assert async_engine.error is not None

    run(engine, body)


def test_a_fault_in_add_request(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def add_request(*args: object) -> None:
        raise RuntimeError("planted fault")

    monkeypatch.setattr(engine, "add_request", add_request)

    async def body(async_engine: AsyncEngine) -> None:
        with pytest.raises(EngineDeadError, match="planted fault"):
            await async_engine.submit("a", [5], LONG)
        await until(lambda: async_engine.error is not None)

    run(engine, body)


def test_drain_lets_running_requests_end(engine: FakeEngine) -> None:
    engine.step_seconds = 0.01

    async def body(async_engine: AsyncEngine) -> None:
        stream = await async_engine.submit("a", [5], LONG)
        assert not await async_engine.drain(timeout=0.001)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await async_engine.submit("b", [5], LONG)
        assert await async_engine.drain(timeout=5)
        steps = [step async for step in stream]
        assert steps[-1].finish_reason is FinishReason.STOP

    run(engine, body)
    assert engine.num_aborts == 0


def test_shutdown_fails_what_still_runs(engine: FakeEngine) -> None:
    engine.hold.set()

    async def body(async_engine: AsyncEngine) -> None:
        stream = await async_engine.submit("a", [5], LONG)
        await async_engine.shutdown()
        with pytest.raises(EngineDeadError, match="shutting down"):
            async for _ in stream:
                pass

    run(engine, body)
    assert engine.num_aborts == 1
    assert not engine.running


def test_requests_before_start_are_refused(engine: FakeEngine) -> None:
    async def main() -> None:
        with pytest.raises(EngineDeadError):
            await AsyncEngine(engine).submit("a", [5], LONG)

    asyncio.run(main())


def test_a_closed_event_loop_does_not_stop_the_engine(engine: FakeEngine) -> None:
    # The loop of a request ends without closing its stream; others are still served.
    engine.endless = True
    engine.step_seconds = 0.002
    async_engine = AsyncEngine(engine)
    async_engine.start()

    async def leave() -> None:
        await async_engine.submit("a", [5], LONG)

    async def use() -> int:
        stream = await async_engine.submit("b", [5], SamplingParams(max_tokens=3))
        return len([step async for step in stream])

    asyncio.run(leave())
    assert asyncio.run(use()) == 3
    assert "a" not in engine.running
    asyncio.run(async_engine.shutdown())
