"""What attention does with its paged caches, as plain functions that the compiler fuses.

`FusedRows` reads and writes `[rows, dim]` pools: right for a CPU, and the reference everywhere.
`paged_operators.OperatorRows` keeps the same contract by registered operators. A layer's is chosen
once, when its program is built.

Shape suffixes: T tokens, C closing windows, H heads, E channels, K chosen rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from v4graph.ops.attention import gather_rows, paged_attention
from v4graph.ops.blocks import (
    BLOCK_TOKENS,
    Blocks,
    block_attention,
    block_index_scores,
    token_blocks,
)
from v4graph.ops.cache import write_rows
from v4graph.ops.compress import pool_windows, state_rows
from v4graph.ops.indexer import index_scores, select_topk
from v4graph.ops.norm import rms_norm
from v4graph.ops.rope import cos_sin, rotate
from v4graph.spec.model import (
    CompressedGroup,
    ModelSpec,
    SlidingAttention,
    SparseAttention,
)

Tensors = dict[str, Tensor]
Rope = tuple[Tensor, Tensor]
"""Cosines and sines of the step's tokens, float32 `[T, rope_dim / 2]` each."""
STATE = {"compressed": "state", "index": "index_state"}
"""The cache role of the compressor states that feed each role."""
COMPRESSOR = {"compressed": "attn.compressor", "index": "attn.indexer.compressor"}


class PagedRows(Protocol):
    """What an attention sublayer asks of its caches; `m` are a step's static buffers."""

    def enter(
        self,
        queries_TQ: Tensor,
        kv_TE: Tensor,
        norm: Tensor,
        rope: Rope,
        pools: Tensors,
        m: Tensors,
    ) -> tuple[Tensor, Tensor]:
        """Write the window's rows, normalised and rotated; return the heads' queries `[T, H, E]`,
        normalised and rotated, and the indexer's `[T, H', E']`, rotated (H' is 0 without one)."""
        ...

    def write_window(
        self, kv_TE: Tensor, norm: Tensor, rope: Rope, pools: Tensors, m: Tensors
    ) -> None:
        """Write the window's rows, normalised and rotated."""
        ...

    def close_windows(
        self,
        role: str,
        projected: Tensor,
        dtype: torch.dtype,
        w: Tensors,
        pools: Tensors,
        m: Tensors,
    ) -> None:
        """Write the step's compressor states, then the rows of the windows that they close.

        Args:
            role: `compressed` or `index`.
            projected: (kv, score) of each token, float32 `[T, 2 width]`.
            dtype: what a pooled row is rounded to before its norm.
        """
        ...

    def attend(
        self,
        q_THE: Tensor,
        sink_H: Tensor,
        index: tuple[Tensor, Tensor] | None,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        """`[T, H, E]`: attention to the window and to compressed rows, where the layer has them.

        `index` are the indexer's rotated queries `[T, H', E']` and head weights `[T, H']` of a
        sparse layer, which choose among the compressed rows.
        """
        ...

    def attend_block(
        self,
        queries_TQ: Tensor,
        kv_TE: Tensor,
        norm: Tensor,
        rope: Rope,
        block_TB: Tensor,
        sink_H: Tensor,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        """Attention to the window and to rows that stay in no cache: row `block[t, i]` of the
        step's own, normalised and rotated here like the queries."""
        ...

    def leave(self, out_THE: Tensor, rope: Rope) -> Tensor:
        """The heads' outputs with their rotation undone; may be done in place."""
        ...


class AttentionCaches:
    """What every implementation knows of an attention entry."""

    def __init__(self, spec: ModelSpec, name: str) -> None:
        self.config = spec.attention[name]
        self.eps = spec.norm_eps
        self.caches: dict[str, str] = dict(self.config.caches)
        self.scale = self.config.head_dim**-0.5
        self.indexer = self.config.indexer if isinstance(self.config, SparseAttention) else None
        self.compressed: dict[str, CompressedGroup] = {
            role: group
            for role, group_name in self.caches.items()
            if isinstance(group := spec.cache_groups[group_name], CompressedGroup)
        }

    def buffer(self, role: str, field: str, m: Tensors) -> Tensor:
        """A static buffer of the group that has a role, such as `slot_mapping`."""
        return m[f"{self.caches[role]}.{field}"]


class FusedRows(AttentionCaches):
    """Plain functions over `[rows, dim]` pools; see `PagedRows`."""

    def enter(
        self,
        queries_TQ: Tensor,
        kv_TE: Tensor,
        norm: Tensor,
        rope: Rope,
        pools: Tensors,
        m: Tensors,
    ) -> tuple[Tensor, Tensor]:
        self.write_window(kv_TE, norm, rope, pools, m)
        width = self.config.heads * self.config.head_dim
        heads, dim = (self.indexer.heads, self.indexer.dim) if self.indexer is not None else (0, 1)
        index = queries_TQ[:, width:].unflatten(-1, (heads, dim))
        index = rotate(index, *_by_head(rope)) if heads else index
        return self._queries(queries_TQ[:, :width], rope), index

    def _queries(self, queries: Tensor, rope: Rope) -> Tensor:
        q = queries.unflatten(-1, (self.config.heads, self.config.head_dim))
        return rotate(rms_norm(q, None, self.eps), *_by_head(rope))

    def write_window(
        self, kv_TE: Tensor, norm: Tensor, rope: Rope, pools: Tensors, m: Tensors
    ) -> None:
        row = rotate(rms_norm(kv_TE, norm, self.eps), *rope)
        write_rows(pools["window"], self.buffer("window", "slot_mapping", m), row)

    def close_windows(
        self,
        role: str,
        projected: Tensor,
        dtype: torch.dtype,
        w: Tensors,
        pools: Tensors,
        m: Tensors,
    ) -> None:
        p, group, state = COMPRESSOR[role], self.compressed[role], STATE[role]
        kv, score = projected.chunk(2, dim=-1)
        new = state_rows(kv, score, w[f"{p}.ape"], m["positions"])
        write_rows(pools[state], self.buffer(state, "slot_mapping", m), new)
        read = self.buffer(state, "read_slots", m)
        last = m[f"closing_positions.{group.ratio}"]
        start = (last - (group.ratio - 1)).clamp_min(0)
        pooled = pool_windows(
            gather_rows(pools[state], read),
            read >= 0,
            w[f"{p}.norm.weight"],
            *cos_sin(start, m[f"freqs.{self.config.rope}"]),
            overlap=group.overlap,
            norm_eps=self.eps,
            dtype=dtype,
        )
        write_rows(pools[role], self.buffer(role, "slot_mapping", m), pooled)

    def attend(
        self,
        q_THE: Tensor,
        sink_H: Tensor,
        index: tuple[Tensor, Tensor] | None,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        near, window = self.buffer("window", "read_slots", m), pools["window"]
        blocks = self._blocks(near, m)
        rows = slots = chosen = None
        if not isinstance(self.config, SlidingAttention):
            rows, slots = pools["compressed"], self.buffer("compressed", "read_slots", m)
        if index is not None:
            chosen = self._choose(*index, blocks, pools, m)
        # A block multiplies every visible row, so it pays only while most of them are chosen.
        sparse = chosen is not None and slots is not None and slots.shape[1] > 4 * chosen.shape[1]
        if blocks is not None and not sparse:
            mask = None
            if chosen is not None and slots is not None:
                beyond = slots.shape[1]
                mask = torch.zeros(len(slots), beyond + 1, dtype=torch.bool, device=slots.device)
                mask = mask.scatter(1, torch.where(chosen < 0, beyond, chosen), True)[:, :beyond]
            return block_attention(
                q_THE, window, near, rows, slots, mask, sink_H, self.scale, blocks
            )
        if chosen is not None and slots is not None:
            slots = torch.where(chosen >= 0, slots.gather(1, chosen.clamp_min(0)), -1)
        return paged_attention(q_THE, window, near, rows, slots, sink_H, self.scale)

    def _blocks(self, near: Tensor, m: Tensors) -> Blocks | None:
        """Blocks of neighbouring tokens, where a step has many tokens of few requests."""
        if "logits_rows" not in m or near.shape[1] < 2:
            return None
        num_requests = m["logits_rows"].shape[0]
        few = num_requests * BLOCK_TOKENS <= near.shape[0]
        return token_blocks(near, num_requests) if few else None

    def _choose(
        self, q: Tensor, weights: Tensor, blocks: Blocks | None, pools: Tensors, m: Tensors
    ) -> Tensor:
        """Which of its visible compressed rows each token attends to, `[T, K]`, -1 where fewer."""
        assert self.indexer is not None  # noqa: S101 (the caller has its queries)
        slots = self.buffer("index", "read_slots", m)
        if blocks is None:
            scores = index_scores(q, gather_rows(pools["index"], slots), weights)
        else:
            scores = block_index_scores(q, pools["index"], slots, weights, blocks)
        return select_topk(scores, self.buffer("index", "num_entries", m), self.indexer.topk)

    def attend_block(
        self,
        queries_TQ: Tensor,
        kv_TE: Tensor,
        norm: Tensor,
        rope: Rope,
        block_TB: Tensor,
        sink_H: Tensor,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        near, window = self.buffer("window", "read_slots", m), pools["window"]
        row = rotate(rms_norm(kv_TE, norm, self.eps), *rope).to(window.dtype)
        q = self._queries(queries_TQ, rope)
        return paged_attention(q, window, near, row, block_TB, sink_H, self.scale)

    def leave(self, out_THE: Tensor, rope: Rope) -> Tensor:
        cos, sin = _by_head(rope)
        return rotate(out_THE, cos, -sin)


def _by_head(rope: Rope) -> Rope:
    return rope[0][:, None], rope[1][:, None]
