"""A recorded step: the compiled regions' calls with their inputs bound once.

Every input of a region is either a tensor that lives as long as the program (weights, pools, static
buffers, the request table) or another region's output in the same step. So a step, once run, can be
replayed without Dynamo's guards and argument matching: on a CPU those cost more than the arithmetic
of a small model, and on a GPU this is the sequence that a CUDA graph captures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from v4graph.errors import ProgramError
from v4graph.program.compiler import Call


@dataclass(frozen=True)
class _Output:
    """Output `index` of call `call` of the same step."""

    call: int
    index: int


class Tape:
    """The calls of one step, ready to replay.

    Args:
        calls: the recorded calls, in order.
        results: tensors among the calls' outputs that `replay` returns.
        static: every tensor that outlives the step.

    Raises:
        ProgramError: a region read a tensor that is neither static nor an output of this step.
    """

    def __init__(
        self, calls: list[Call], results: Iterable[Tensor], static: Iterable[Tensor]
    ) -> None:
        lasting = {id(t) for t in static}
        made: dict[int, _Output] = {}
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        for i, call in enumerate(calls):
            bound = []
            for value in call.inputs:
                if id(value) in made:
                    bound.append(made[id(value)])
                elif id(value) in lasting:
                    bound.append(value)
                else:
                    raise ProgramError(
                        f"region {call.region} reads a value that is neither static nor made in "
                        "this step"
                    )
            self._calls.append((call.fn, tuple(bound)))
            made |= {id(t): _Output(i, j) for j, t in enumerate(call.outputs)}
        self._results = [made[id(t)] for t in results]
        self._dead_after = self._last_uses()

    def _last_uses(self) -> list[list[int]]:
        """Calls whose outputs nobody reads after each call, so that memory is given back."""
        last = {ref.call: len(self._calls) for ref in self._results}
        for i, (_, bound) in enumerate(self._calls):
            for ref in bound:
                if isinstance(ref, _Output):
                    last[ref.call] = max(last.get(ref.call, i), i)
        dead: list[list[int]] = [[] for _ in self._calls]
        for call, when in last.items():
            if when < len(self._calls):
                dead[when].append(call)
        return dead

    def __len__(self) -> int:
        """Calls of compiled regions in one step."""
        return len(self._calls)

    def replay(self) -> list[Tensor]:
        """Run the step again; the recorded results, freshly computed."""
        outputs: list[Any] = []
        for (fn, bound), dead in zip(self._calls, self._dead_after, strict=True):
            args = [outputs[a.call][a.index] if type(a) is _Output else a for a in bound]
            outputs.append(fn(*args))
            for call in dead:
                outputs[call] = None
        return [outputs[r.call][r.index] for r in self._results]
