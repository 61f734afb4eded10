"""A fast engine with the API of LLMEngine, and a real uvicorn server around it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import uvicorn

from v4graph.engine.async_engine import AsyncEngine
from v4graph.engine.request import FinishReason, SamplingParams, StepOutput, TokenLogprobs
from v4graph.errors import RequestError
from v4graph.server.app import create_app
from v4graph.text.chat import EOS
from v4graph.text.tokenizer import Tokenizer

MODEL = "fake-model"
DEFAULT_ANSWER = "the quick brown fox"


@dataclass
class FakeRequest:
    prompt_ids: list[int]
    params: SamplingParams
    answer: list[int]
    num_generated: int = 0


@dataclass
class FakeEngine:
    """Answers every prompt with the tokens of `answer` (text and an EOS), in steps."""

    tokenizer: Tokenizer
    answer: str = DEFAULT_ANSWER
    tokens_per_step: int = 1
    step_seconds: float = 0.0
    endless: bool = False
    """Repeat the answer until max_tokens; no EOS."""
    fail_after_steps: int | None = None
    faulty_prompt: list[int] | None = None
    """Its request ends with a fault of the logits behind its second token."""
    max_model_len: int = 256
    num_steps: int = 0
    num_aborts: int = 0
    max_batch: int = 0
    params: list[SamplingParams] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    running: dict[str, FakeRequest] = field(default_factory=dict)
    hold: threading.Event = field(default_factory=threading.Event)
    """While set, steps bring nothing."""

    def reset(self) -> None:
        """Back to the defaults."""
        for name, value in vars(FakeEngine(self.tokenizer)).items():
            setattr(self, name, value)

    @property
    def metrics(self) -> dict[str, Any]:
        return {
            "num_running": len(self.running),
            "num_waiting": 0,
            "pages_used.window": 3,
            "pages_total.window": 12,
        }

    def add_request(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        vocab_size = self.tokenizer.vocab_size
        if not prompt_ids:
            raise RequestError("prompt: must have at least one token", "prompt")
        if not all(0 <= i < vocab_size for i in prompt_ids):
            raise RequestError(f"prompt: token ids must be below {vocab_size}", "prompt")
        assert len(prompt_ids) + params.max_tokens <= self.max_model_len
        assert request_id not in self.running
        answer = self.tokenizer.encode(self.answer)
        if self.endless:
            answer = answer * self.max_model_len
        else:
            answer = [*answer, self.tokenizer.encode(EOS)[0]]
        self.params.append(params)
        self.prompts.append(prompt_ids)
        self.running[request_id] = FakeRequest(prompt_ids, params, answer)

    def abort(self, request_id: str) -> None:
        self.num_aborts += 1
        self.running.pop(request_id, None)

    def has_unfinished(self) -> bool:
        return bool(self.running)

    def step(self) -> list[StepOutput]:
        if not self.running:
            return []
        self.num_steps += 1
        if self.fail_after_steps is not None and self.num_steps > self.fail_after_steps:
            raise RuntimeError("planted fault")
        time.sleep(0.001 if self.hold.is_set() else self.step_seconds)
        if self.hold.is_set():
            return []
        self.max_batch = max(self.max_batch, len(self.running))
        return [self._advance(request_id) for request_id in list(self.running)]

    def _advance(self, request_id: str) -> StepOutput:
        request = self.running[request_id]
        start = request.num_generated
        room = request.params.max_tokens - start
        new = request.answer[start : start + min(self.tokens_per_step, room)]
        request.num_generated += len(new)
        finish = None
        if request.num_generated == len(request.answer):
            finish = FinishReason.STOP
        elif request.num_generated == request.params.max_tokens:
            finish = FinishReason.LENGTH
        if request.prompt_ids == self.faulty_prompt and request.num_generated >= 2:
            finish = FinishReason.ERROR
        if finish is not None:
            del self.running[request_id]
        told = None
        if request.params.logprobs is not None:
            told = [self.told(token, request.params.logprobs) for token in new]
        return StepOutput(request_id, new, finish, told)

    def told(self, token: int, count: int) -> TokenLogprobs:
        """Made up: an id is e times less likely than the one before."""
        top = [(token + i, -1.0 - i) for i in range(count)]
        return TokenLogprobs(token, -1.0, top)


@dataclass
class Server:
    """A running server with clients for it."""

    engine: FakeEngine
    url: str
    port: int
    client: openai.OpenAI
    http: httpx.Client
    uvicorn: uvicorn.Server

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


StartServer = Callable[[FakeEngine], Server]


def serve(tokenizer: Tokenizer) -> Iterator[StartServer]:
    running: list[tuple[uvicorn.Server, threading.Thread, openai.OpenAI, httpx.Client]] = []

    def start(engine: FakeEngine) -> Server:
        app = create_app(AsyncEngine(engine), tokenizer, MODEL)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        config = uvicorn.Config(
            app, port=port, log_level="warning", timeout_graceful_shutdown=1, lifespan="on"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        url = f"http://127.0.0.1:{port}"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10)
        http = httpx.Client(base_url=url, timeout=10)
        running.append((server, thread, client, http))
        return Server(engine, url, port, client, http, server)

    yield start
    for server, thread, client, http in running:
        client.close()
        http.close()
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
