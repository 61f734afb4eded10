"""What attention does with its paged caches, by registered operators.

They read and write pools of every row format, and are Triton kernels on a GPU. The contract is
`paged.PagedRows`.

Shape suffixes: T tokens, C closing windows, H heads, E channels, K chosen rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.model.paged import (
    COMPRESSOR,
    STATE,
    AttentionCaches,
    FusedRows,
    PagedRows,
    Rope,
    Tensors,
)
from v4graph.ops.custom import attention, compressor, heads, index, rows
from v4graph.ops.rows import empty_page
from v4graph.spec.model import (
    CompressedGroup,
    CompressorStateGroup,
    ModelSpec,
    SlidingAttention,
)

PACKED = ("fp8_ds", "fp8")
"""Row formats that only operators read and write."""


def paged_rows(spec: ModelSpec, name: str, operators: bool) -> PagedRows:
    """The implementation for attention entry `name`; packed row formats need operators."""
    packed = any(
        not isinstance(group := spec.cache_groups[g], CompressorStateGroup)
        and group.row.format in PACKED
        for g in dict(spec.attention[name].caches).values()
    )
    return (OperatorRows if operators or packed else FusedRows)(spec, name)


class OperatorRows(AttentionCaches):
    """The registered operators; see `PagedRows`."""

    def __init__(self, spec: ModelSpec, name: str) -> None:
        super().__init__(spec, name)
        self.rope_dim = spec.rope[self.config.rope].dim
        self.page_rows: dict[str, int] = {}
        for role, group_name in self.caches.items():
            group = spec.cache_groups[group_name]
            ratio = group.ratio if isinstance(group, CompressedGroup) else 1
            self.page_rows[role] = group.page_tokens // ratio

    def enter(
        self,
        queries_TQ: Tensor,
        kv_TE: Tensor,
        norm: Tensor,
        rope: Rope,
        pools: Tensors,
        m: Tensors,
    ) -> tuple[Tensor, Tensor]:
        slots = self.buffer("window", "slot_mapping", m)
        into = slots, pools["window"], self.page_rows["window"]
        return self._qkv_rows(queries_TQ, kv_TE, norm, rope, into)

    def _qkv_rows(
        self,
        queries: Tensor,
        kv: Tensor,
        norm: Tensor,
        rope: Rope,
        into: tuple[Tensor, Tensor, int],
    ) -> tuple[Tensor, Tensor]:
        slots, pool, page_rows = into
        return heads.qkv_rows(
            queries,
            kv,
            norm,
            *rope,
            slots,
            pool,
            heads=self.config.heads,
            index_heads=self.indexer.heads if self.indexer is not None else 0,
            index_dim=self.indexer.dim if self.indexer is not None else 0,
            eps=self.eps,
            rope_dim=self.rope_dim,
            page_rows=page_rows,
        )

    def write_window(
        self, kv_TE: Tensor, norm: Tensor, rope: Rope, pools: Tensors, m: Tensors
    ) -> None:
        rows.write_kv_rows(
            kv_TE,
            norm,
            *rope,
            self.buffer("window", "slot_mapping", m),
            pools["window"],
            eps=self.eps,
            rope_dim=self.rope_dim,
            page_rows=self.page_rows["window"],
        )

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
        compressor.close_windows(
            projected,
            w[f"{p}.ape"],
            m["positions"],
            self.buffer(state, "slot_mapping", m),
            pools[state],
            self.buffer(state, "read_slots", m),
            m[f"closing_positions.{group.ratio}"],
            m[f"freqs.{self.config.rope}"],
            w[f"{p}.norm.weight"],
            self.buffer(role, "slot_mapping", m),
            pools[role],
            overlap=group.overlap,
            eps=self.eps,
            row_format=group.row.format,
            page_rows=self.page_rows[role],
            dtype=dtype,
        )

    def attend(
        self,
        q_THE: Tensor,
        sink_H: Tensor,
        index: tuple[Tensor, Tensor] | None,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        if isinstance(self.config, SlidingAttention):
            return self._attend(q_THE, None, None, 1, sink_H, pools, m)
        slots = self.buffer("compressed", "read_slots", m)
        if index is not None:
            slots = self._choose(*index, slots, pools, m)
        page_rows = self.page_rows["compressed"]
        return self._attend(q_THE, pools["compressed"], slots, page_rows, sink_H, pools, m)

    def _choose(
        self, q: Tensor, weights: Tensor, slots: Tensor, pools: Tensors, m: Tensors
    ) -> Tensor:
        """The compressed rows that each token attends to: of `slots [T, C]` the best, `[T, K]`."""
        assert self.indexer is not None  # noqa: S101 (the caller has its queries)
        scores = index.paged_index_scores(
            q,
            pools["index"],
            self.buffer("index", "read_slots", m),
            weights,
            page_rows=self.page_rows["index"],
        )
        entries = self.buffer("index", "num_entries", m)
        return index.select_rows(scores, entries, slots, topk=self.indexer.topk)

    def _attend(
        self,
        q: Tensor,
        pool: Tensor | None,
        slots: Tensor | None,
        page_rows: int,
        sink: Tensor,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        return attention.sparse_attention(
            q,
            pools["window"],
            self.buffer("window", "read_slots", m),
            pool,
            slots,
            sink,
            self.scale,
            rope_dim=self.rope_dim,
            window_page_rows=self.page_rows["window"],
            compressed_page_rows=page_rows,
        )

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
        # A page of the window's own format for the step's rows, behind a null row.
        page_rows = len(kv_TE) + 1
        page = empty_page(pools["window"], page_rows, kv_TE.shape[1], self.rope_dim)
        slots = torch.arange(1, page_rows, device=kv_TE.device)
        q, _ = self._qkv_rows(queries_TQ, kv_TE, norm, rope, (slots, page, page_rows))
        return self._attend(q, page, block_TB + 1, page_rows, sink_H, pools, m)

    def leave(self, out_THE: Tensor, rope: Rope) -> Tensor:
        heads.unrope(out_THE, *rope)
        return out_THE
