"""Compile regions with torch.compile and count what the compiler did.

One code object per region and program, so that a second compilation of any of them is a fault that
can be seen, not a guard that quietly grows.
"""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from v4graph.errors import ProgramError
from v4graph.program.compile_cache import CompileCache, compile_cache

# A step's small loops cost less than waking a second thread for them (measured on 2 cores: 20
# Sinkhorn iterations over 128 tokens take 16.7 ms with the default of 512 and 0.34 ms with this).
_INDUCTOR: dict[str, Any] = {"cpp.min_chunk_size": 16384}
# One token leaves little to vectorise; scalar loops compile in three quarters of the time.
_INDUCTOR_ONE_TOKEN: dict[str, Any] = {**_INDUCTOR, "cpp.simdlen": 1}


@dataclass
class RegionStats:
    """How often a region was compiled (1 after warm-up), its graph's size and compile seconds."""

    compilations: int = 0
    num_ops: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Call:
    """One run of a compiled region: the flat inputs and outputs behind Dynamo's guards."""

    region: str
    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclass
class Compiler:
    """Builds regions: compiled (`enabled`) or eager; after `seal` a compilation is an error."""

    enabled: bool = True
    stats: dict[str, RegionStats] = field(default_factory=dict)
    sealed: bool = False
    calls: list[Call] | None = None
    """While a list, every run of a compiled region is appended to it."""
    _cache: CompileCache | None = None

    def region(self, name: str, fn: Callable[..., Any], num_tokens: int) -> Callable[..., Any]:
        """`fn` as a region called `name` for `num_tokens` tokens: full graph, static shapes."""
        if not self.enabled:
            return fn
        cache = self._use_cache()
        config = _INDUCTOR_ONE_TOKEN if num_tokens == 1 else _INDUCTOR
        stats = self.stats.setdefault(name, RegionStats())

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            if self.sealed:
                raise ProgramError(f"region {name} recompiled while serving")
            from torch._inductor.compile_fx import compile_fx

            begin = time.perf_counter()
            compiled: Any = cache.compile(lambda: compile_fx(gm, inputs, config_patches=config))
            stats.compilations += 1
            stats.num_ops = sum(n.op.startswith("call") for n in gm.graph.nodes)
            stats.seconds += time.perf_counter() - begin

            def run(*args: Any) -> Any:
                outputs = compiled(*args)
                if self.calls is not None:
                    self.calls.append(Call(name, compiled, args, tuple(outputs)))
                return outputs

            return run

        return torch.compile(_own_code(fn), fullgraph=True, dynamic=False, backend=backend)

    def keep(self) -> None:
        """List what was compiled so far in the cache, where a later start finds it."""
        if self._cache is not None:
            self._cache.record()

    def seal(self) -> None:
        """End of warm-up: from here on every program must already exist."""
        self.sealed = True
        if self._cache is not None:
            self._cache.release()
            self._cache = None

    def _use_cache(self) -> CompileCache:
        if self._cache is None:
            self._cache = compile_cache()
            self._cache.acquire()
        return self._cache

    @property
    def recompilations(self) -> int:
        """Compilations beyond the first of each region."""
        return sum(max(s.compilations - 1, 0) for s in self.stats.values())


def _own_code(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` behind a function with a code object of its own: Dynamo caches by code object."""

    def call(*args: Any) -> Any:
        return fn(*args)

    return types.FunctionType(
        call.__code__.replace(),
        call.__globals__,
        call.__name__,
        call.__defaults__,
        call.__closure__,
    )
