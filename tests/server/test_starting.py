"""Until the model is ready the socket is open and says so."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
import uvicorn
from fake_server import MODEL, FakeEngine

from v4graph.engine.async_engine import AsyncEngine
from v4graph.errors import ServeError
from v4graph.server.app import create_app
from v4graph.server.run import _Server
from v4graph.server.starting import Starting, listen
from v4graph.text.tokenizer import Tokenizer


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    opened = listen("127.0.0.1", 0)
    yield opened
    for sock in opened:
        sock.close()


@pytest.fixture
def starting(sockets: list[socket.socket]) -> Iterator[Starting]:
    made = Starting(sockets)
    yield made
    made.stop()


@pytest.fixture
def url(sockets: list[socket.socket]) -> str:
    return f"http://127.0.0.1:{sockets[0].getsockname()[1]}"


def test_health_counts_programs(starting: Starting, url: str) -> None:
    answers = [httpx.get(f"{url}/health")]
    starting.progress("load", 3, 30)
    answers.append(httpx.get(f"{url}/health?probe=1"))
    starting.progress("compile", 2, 7, "decode")
    answers.append(httpx.get(f"{url}/health"))
    assert [a.status_code for a in answers] == [503] * 3
    told = [(0, 0), (0, 0), (2, 7)]
    assert [a.json() for a in answers] == [
        {"status": "compiling", "done": done, "of": of} for done, of in told
    ]


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/nothing"])
def test_other_paths_ask_to_come_back(starting: Starting, url: str, path: str) -> None:
    answer = httpx.get(url + path)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "starting", None)


def test_an_openai_client_is_told_why(starting: Starting, url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with client, pytest.raises(openai.InternalServerError, match="loaded and compiled") as caught:
        client.completions.create(model=MODEL, prompt="a long prompt " * 100_000)
    assert caught.value.code == "starting"


def test_no_connection_is_refused_on_the_way_to_ready(
    sockets: list[socket.socket], starting: Starting, url: str, tokenizer: Tokenizer
) -> None:
    """A client that asks all the time sees 503, then 200, and nothing else."""
    seen: list[int] = []
    stop = threading.Event()

    def probe() -> None:
        while not stop.is_set():
            seen.append(httpx.get(f"{url}/health", timeout=10).status_code)

    prober = threading.Thread(target=probe)
    prober.start()
    app = create_app(AsyncEngine(FakeEngine(tokenizer)), tokenizer, MODEL)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    server = _Server(config, MODEL)
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    while 503 not in seen:
        time.sleep(0.01)
    starting.stop()
    thread.start()
    end = time.monotonic() + 20
    while 200 not in seen and time.monotonic() < end:
        time.sleep(0.01)
    stop.set()
    prober.join(20)
    server.should_exit = True
    thread.join(20)
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {503, 200}


def test_a_port_in_use_is_told(sockets: list[socket.socket]) -> None:
    port = sockets[0].getsockname()[1]
    with pytest.raises(ServeError, match=rf"127\.0\.0\.1:{port}: cannot listen \(.*--port"):
        listen("127.0.0.1", port)
