"""Registration of operators in `torch.ops.v4graph`: one schema, a fake, and two implementations.

On a CPU an operator is its reference; on a GPU it is its Triton kernel, loaded at the first call.
The tensors' device chooses, and nothing falls back: without Triton a GPU call is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from v4graph.errors import ProgramError

NAMESPACE = "v4graph"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(
    schema: str, *, reference: Callable, fake: Callable, kernel: tuple[str, str]
) -> torch._ops.OpOverload:
    """Define `v4graph::<schema>` and return it.

    Args:
        schema: name, arguments and results; `Tensor(a!)` marks what is written in place.
        reference: the implementation on a CPU; its results never alias its arguments.
        fake: shapes and dtypes of the results, for tracing.
        kernel: (module of `v4graph_kernels`, launcher in it); it takes the same arguments.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, reference, "CPU")
    _LIBRARY.impl(name, _launcher(name, *kernel), "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _launcher(name: str, module: str, function: str) -> Callable:
    found: list[Callable] = []

    def launch(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(getattr(load_kernels(module), function))
        return found[0](*args, **kwargs)

    launch.__name__ = name
    return launch


def load_kernels(module: str) -> Any:
    """The module of `v4graph_kernels` with that name.

    Raises:
        ProgramError: the kernels, or Triton, are not installed.
    """
    try:
        package = import_module("v4graph_kernels")
    except ModuleNotFoundError as error:
        raise ProgramError(
            "package v4graph_kernels is not importable: install v4graph from its folder or wheel"
        ) from error
    try:
        return package.load(module)
    except package.KernelUnavailableError as error:
        raise ProgramError(str(error)) from error
