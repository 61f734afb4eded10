"""Kernels run in Triton's interpreter where there is no GPU; `gpu` tests run the compiled ones.

`tests/conftest.py` turns the interpreter on.
"""

import os

import pytest
import torch

# One configuration a kernel: tests have many shapes, and each would be compiled in all of them.
os.environ.setdefault("V4GRAPH_TUNE_KERNELS", "0")


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """`cpu`: the kernel in the interpreter. `cuda`: the compiled kernel, on a GPU."""
    pytest.importorskip("triton", reason="kernels need Triton: pip install v4graph[kernels]")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("compiled kernels are tested on this machine")
    return request.param
