"""Triton kernels of v4graph's operators; they know tensors and integers only, never v4graph.

This package imports without Triton and without a GPU. Its modules need Triton; `load` is the one
way to them that says so clearly. With `TRITON_INTERPRET=1` in the environment before Triton is
first imported, every kernel runs on CPU tensors in Triton's interpreter.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


class KernelUnavailableError(RuntimeError):
    """A Triton kernel was asked for on a machine without Triton."""


def load(name: str) -> ModuleType:
    """The kernel module `name` of this package, such as `cache_rows`.

    Raises:
        KernelUnavailableError: Triton is not installed.
    """
    if find_spec("triton") is None:
        raise KernelUnavailableError(
            f"kernel module {name!r} needs Triton, which is not installed; install v4graph[kernels]"
            " (Linux), or choose the reference operators"
        )
    return import_module(f"{__name__}.{name}")
