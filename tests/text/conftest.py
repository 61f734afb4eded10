from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from v4graph.text.chat import BOS, CHAT_TOKENS, END_THINK, THINK
from v4graph.text.tokenizer import Tokenizer


def build_backend() -> Backend:
    """A byte-level BPE like V4's: real special tokens, `<think>` added but not special."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [token for token in CHAT_TOKENS if token not in (THINK, END_THINK)]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["the quick brown fox jumps over the lazy dog", "hello world, hello there"]
    backend.train_from_iterator(corpus * 20, trainer)
    backend.add_tokens([AddedToken(THINK, special=False), AddedToken(END_THINK, special=False)])
    return backend


@pytest.fixture(scope="session")
def backend() -> Backend:
    return build_backend()


@pytest.fixture(scope="session")
def tokenizer(backend: Backend) -> Tokenizer:
    return Tokenizer(backend, bos_token_id=backend.token_to_id(BOS))
