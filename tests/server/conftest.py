from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fake_server import FakeEngine, Server, StartServer, serve
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from v4graph.text.chat import BOS, CHAT_TOKENS, END_THINK, THINK
from v4graph.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def backend() -> Backend:
    built = Backend(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[token for token in CHAT_TOKENS if token not in (THINK, END_THINK)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 20, trainer)
    built.add_tokens([AddedToken(THINK, special=False), AddedToken(END_THINK, special=False)])
    return built


@pytest.fixture(scope="session")
def tokenizer(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, bos_token_id=backend.token_to_id(BOS))


@pytest.fixture
def start_server(tokenizer: Tokenizer) -> Iterator[StartServer]:
    """Start servers that a test may break."""
    yield from serve(tokenizer)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


@pytest.fixture(scope="session")
def shared_server(tokenizer: Tokenizer) -> Iterator[Server]:
    servers = serve(tokenizer)
    yield next(servers)(FakeEngine(tokenizer))
    next(servers, None)


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The shared server with its engine as new; counters of the server itself go on."""
    shared_server.engine.reset()
    yield shared_server
    shared_server.engine.hold.clear()
    end = time.monotonic() + 2  # aborts are carried out by the engine thread
    while shared_server.engine.running:
        assert time.monotonic() < end, "a request was left behind"
        time.sleep(0.005)
