"""Clients that leave, engines that die, and the status endpoints."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable

import openai
import pytest
from fake_server import DEFAULT_ANSWER, MODEL, FakeEngine, Server, StartServer


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


def send(server: Server, **body: object) -> socket.socket:
    """Send a completion request by hand; the answer stays unread."""
    content = json.dumps({"prompt": "hi", "max_tokens": 200, **body}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + content)
    return connection


def reset(connection: socket.socket) -> None:
    """Close with RST rather than FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.fixture
def own_server(start_server: StartServer, engine: FakeEngine) -> Server:
    """A server whose counters start at zero."""
    return start_server(engine)


def finished(server: Server, reason: str) -> float:
    line = f'v4graph:request_success_total{{finished_reason="{reason}",model_name="{MODEL}"}} '
    for row in server.http.get("/metrics").text.splitlines():
        if row.startswith(line):
            return float(row.removeprefix(line))
    return 0.0


@pytest.mark.parametrize("stream", [False, True])
def test_normal_ends_abort_nothing(own_server: Server, stream: bool) -> None:
    # E9: teardown must tell finished from cancelled.
    async def run() -> None:
        async with own_server.async_client() as client:

            async def one() -> None:
                if not stream:
                    await client.completions.create(model=MODEL, prompt="hi")
                    return
                async for _ in await client.completions.create(
                    model=MODEL, prompt="hi", stream=True
                ):
                    pass

            await asyncio.gather(*(one() for _ in range(100)))

    asyncio.run(run())
    assert own_server.engine.num_aborts == 0
    assert len(own_server.engine.params) == 100
    assert finished(own_server, "stop") == 100
    assert finished(own_server, "abort") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hard", [False, True])
def test_a_client_that_leaves_aborts_its_request(
    own_server: Server, stream: bool, hard: bool
) -> None:
    own_server.engine.endless = True
    own_server.engine.step_seconds = 0.02
    connection = send(own_server, stream=stream)
    wait_for(lambda: bool(own_server.engine.running))
    if stream:
        connection.recv(100)
    reset(connection) if hard else connection.close()
    wait_for(lambda: not own_server.engine.running)
    assert own_server.engine.num_aborts == 1
    assert finished(own_server, "abort") == 1


def test_a_client_that_leaves_before_the_first_token(server: Server) -> None:
    server.engine.hold.set()
    connection = send(server, stream=True)
    wait_for(lambda: bool(server.engine.running))
    connection.close()
    wait_for(lambda: not server.engine.running)
    assert server.engine.num_aborts == 1


def test_all_choices_are_aborted(server: Server) -> None:
    server.engine.hold.set()
    connection = send(server, prompt=["a", "b", "c"], stream=True)
    wait_for(lambda: len(server.engine.running) == 3)
    connection.close()
    wait_for(lambda: not server.engine.running)
    assert server.engine.num_aborts == 3


def test_hard_resets_leave_others_alone(server: Server) -> None:
    # E10: RST in the middle of a stream, 50 times, while another request decodes.
    server.engine.endless = True
    server.engine.step_seconds = 0.002
    texts: list[str] = []

    def decode() -> None:
        answer = server.client.completions.create(model=MODEL, prompt="hi", max_tokens=200)
        texts.append(answer.choices[0].text)

    thread = threading.Thread(target=decode)
    thread.start()
    for _ in range(50):
        connection = send(server, stream=True)
        connection.recv(100)
        reset(connection)
    thread.join(10)
    assert len(texts[0].split()) > 100
    wait_for(lambda: not server.engine.running)
    assert server.engine.num_aborts == 50
    assert server.http.get("/health").status_code == 200
    assert server.client.completions.create(model=MODEL, prompt="hi", max_tokens=1).choices


def test_dead_engine(start_server: StartServer, engine: FakeEngine) -> None:
    # E24: /health tells, waiting requests fail promptly, new ones at once.
    server = start_server(engine)
    assert server.http.get("/health").status_code == 200
    engine.hold.set()
    errors: list[openai.APIStatusError] = []

    def wait() -> None:
        try:
            server.client.completions.create(model=MODEL, prompt="hi")
        except openai.APIStatusError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(engine.running) == 3)
    start = time.monotonic()
    engine.fail_after_steps = 0
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - start < 5
    assert [error.status_code for error in errors] == [503] * 3
    answer = server.http.get("/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError, match="planted fault"):
            server.client.completions.create(model=MODEL, prompt="hi", stream=stream)
    metrics = server.http.get("/metrics").text
    assert f'v4graph:engine_healthy{{model_name="{MODEL}"}} 0.0' in metrics


def test_openai_client_sees_an_error_event(start_server: StartServer, engine: FakeEngine) -> None:
    engine.fail_after_steps = 1
    server = start_server(engine)
    stream = server.client.completions.create(model=MODEL, prompt="hi", stream=True)
    with pytest.raises(openai.APIError, match="planted fault"):
        list(stream)


def test_shutdown_ends_open_streams(start_server: StartServer, engine: FakeEngine) -> None:
    engine.hold.set()
    server = start_server(engine)
    connection = send(server, stream=True)
    wait_for(lambda: bool(engine.running))
    server.uvicorn.should_exit = True
    wait_for(lambda: not engine.running)  # after the grace period of one second
    connection.close()


def test_models(server: Server) -> None:
    (model,) = server.client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "v4graph")
    assert server.client.models.retrieve(MODEL).id == MODEL


def test_version_and_openapi(server: Server) -> None:
    assert server.http.get("/version").json()["version"]
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/health"} <= set(paths)


def test_metrics(own_server: Server) -> None:
    own_server.client.completions.create(model=MODEL, prompt="the fox", max_tokens=2)
    own_server.client.completions.create(model=MODEL, prompt="the fox", stop="brown")
    text = own_server.http.get("/metrics").text
    label = f'{{model_name="{MODEL}"}}'
    for row in [
        f"v4graph:prompt_tokens_total{label} 6.0",
        f"v4graph:generation_tokens_total{label} 5.0",
        f"v4graph:time_to_first_token_seconds_count{label} 2.0",
        f"v4graph:e2e_request_latency_seconds_count{label} 2.0",
        f"v4graph:num_requests_running{label} 0.0",
        f'v4graph:engine_pages_used{{group="window",model_name="{MODEL}"}} 3.0',
        f'v4graph:kv_cache_usage_perc{{group="window",model_name="{MODEL}"}} 0.25',
        f"v4graph:engine_healthy{label} 1.0",
    ]:
        assert row in text
    assert finished(own_server, "length") == finished(own_server, "stop") == 1


def test_text_after_a_lost_client_is_right(server: Server) -> None:
    connection = send(server, stream=True)
    connection.recv(10)
    reset(connection)
    answer = server.client.completions.create(model=MODEL, prompt="hi")
    assert answer.choices[0].text == DEFAULT_ANSWER
