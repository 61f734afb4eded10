"""Test-wide settings: few threads, no global randomness, no compile cache outside the test run."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

# Before anything imports Triton (Inductor does): it decides then what `triton.jit` makes.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# One thread a process: two test workers on two cores would otherwise wait for each other's threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
