"""A recorded round as one CUDA graph: the host launches it with one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from v4graph.program.tape import Tape

_WARM_UPS = 2


class CapturedTape:
    """A tape whose replay is a single graph launch.

    The tape must have been recorded over padding, and is captured so: what a round reads lies in
    static buffers, the request table and page pools, whose addresses the graph keeps.
    """

    def __init__(self, tape: Tape, pool: Any) -> None:
        """`pool` (`torch.cuda.graph_pool_handle()`) is shared by all graphs: they run one after
        another and may use the same memory; what a replay returns lasts until the next replay of
        any of them."""
        self._num_calls = len(tape)
        # Lazy initialisations (libraries' workspaces, kernels' modules) must not be captured.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                tape.replay()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._results = tape.replay()

    def __len__(self) -> int:
        """Calls of compiled regions in one round."""
        return self._num_calls

    def replay(self) -> list[Tensor]:
        """Launch the graph; its outputs, always the same tensors."""
        self._graph.replay()
        return self._results
