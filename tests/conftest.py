"""Test-wide settings: few threads, no global randomness, no compile cache outside the test run."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
import torch

# One thread a process: two test workers on two cores would otherwise wait for each other's threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
