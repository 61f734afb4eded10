"""Chains of MTP layers: the mode in which each layer behind the first runs over a round's rows.

Layer i takes the streams of layer i - 1 at t and the token at t + i + 1, so the newest i of its
rows rest on drafts; every round computes them again. docs/speculation.md derives the rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from v4graph.plan.types import DTYPES, Bucket, Mode, ModePlan, SpeculationPlan
from v4graph.spec.model import HyperConnections, ModelSpec


def chain_mode(
    speculation: SpeculationPlan, rounds: Iterable[Bucket], groups: tuple[str, ...]
) -> list[ModePlan]:
    """The mode of layers behind the first, none if there is no such layer.

    Args:
        rounds: buckets that rounds begin with. groups: cache groups of the draft layers.
    """
    chained = range(1, speculation.num_chained + 1)
    buckets = {b.widened(i): None for i in chained for b in rounds}
    if not buckets:
        return []
    mode = Mode.DRAFT_CHAIN
    return [ModePlan(mode, "draft", 0, tuple(buckets), groups, groups, "last_token", "all")]


def stream_shape(spec: ModelSpec) -> tuple[int, int]:
    """Residual streams of a row, and channels of each."""
    r = spec.residual
    return (r.streams if isinstance(r, HyperConnections) else 1), spec.hidden_size


def carried_bytes(speculation: SpeculationPlan, dtype: str) -> int:
    """Bytes of a request's carried streams: one row for each layer behind the first."""
    streams, channels = speculation.stream_shape
    return speculation.num_chained * streams * channels * DTYPES[dtype]
