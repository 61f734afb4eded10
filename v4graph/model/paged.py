"""How attention writes, selects and reads paged cache rows: two implementations of one contract.

`FusedRows` are plain functions over `[rows, dim]` pools, which the compiler fuses with their
neighbours: right for a CPU and the reference everywhere. `OperatorRows` call the registered
operators, which read pools of every row format and are Triton kernels on a GPU. A layer's is
chosen once, when its program is built.

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
from v4graph.ops.custom import attention as attention_operators
from v4graph.ops.custom import index as index_operators
from v4graph.ops.custom import rows as row_operators
from v4graph.ops.indexer import index_scores, select_topk
from v4graph.ops.norm import rms_norm
from v4graph.ops.rope import rotate
from v4graph.ops.rows import empty_page
from v4graph.spec.model import (
    CacheGroup,
    CompressedGroup,
    CompressorStateGroup,
    ModelSpec,
    SlidingAttention,
    SparseAttention,
)

Tensors = dict[str, Tensor]
PACKED = ("fp8_ds", "fp8")


class PagedRows(Protocol):
    """What an attention sublayer asks of its caches."""

    def write_window(
        self, kv_TE: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, pools: Tensors, m: Tensors
    ) -> None:
        """Normalise and rotate the step's rows, and write them into the window."""

    def write_compressed(self, role: str, rows_CE: Tensor, pools: Tensors, m: Tensors) -> None:
        """Write the finished rows of closing windows; `role` is `compressed` or `index`."""

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
        q_THE: Tensor,
        kv_TE: Tensor,
        norm: Tensor,
        rope: tuple[Tensor, Tensor],
        block_TB: Tensor,
        sink_H: Tensor,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        """Attention to the window and to rows that stay in no cache: row `block[t, i]` of the
        step's own, normalised and rotated here."""
        ...


def paged_rows(spec: ModelSpec, name: str, operators: bool) -> PagedRows:
    """The implementation for attention entry `name`; packed row formats need operators."""
    caches = dict(spec.attention[name].caches).values()
    packed = any(_row_format(spec.cache_groups[c]) in PACKED for c in caches)
    return (OperatorRows if operators or packed else FusedRows)(spec, name)


def _row_format(group: CacheGroup) -> str:
    return "f32" if isinstance(group, CompressorStateGroup) else group.row.format


class _Rows:
    def __init__(self, spec: ModelSpec, name: str) -> None:
        self.config = spec.attention[name]
        self.eps = spec.norm_eps
        self.caches: dict[str, str] = dict(self.config.caches)
        self.scale = self.config.head_dim**-0.5
        self.topk = self.config.indexer.topk if isinstance(self.config, SparseAttention) else 0

    def slots(self, role: str, field: str, m: Tensors) -> Tensor:
        return m[f"{self.caches[role]}.{field}"]


class FusedRows(_Rows):
    """Plain functions over `[rows, dim]` pools; see `PagedRows`."""

    def row(self, kv: Tensor, norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(rms_norm(kv, norm, self.eps), cos, sin)

    def write_window(
        self, kv_TE: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, pools: Tensors, m: Tensors
    ) -> None:
        row = self.row(kv_TE, norm, cos, sin)
        write_rows(pools["window"], self.slots("window", "slot_mapping", m), row)

    def write_compressed(self, role: str, rows_CE: Tensor, pools: Tensors, m: Tensors) -> None:
        write_rows(pools[role], self.slots(role, "slot_mapping", m), rows_CE)

    def attend(
        self,
        q_THE: Tensor,
        sink_H: Tensor,
        index: tuple[Tensor, Tensor] | None,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        near, window = self.slots("window", "read_slots", m), pools["window"]
        blocks = self._blocks(near, m)
        rows = slots = chosen = None
        if not isinstance(self.config, SlidingAttention):
            rows, slots = pools["compressed"], self.slots("compressed", "read_slots", m)
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
        slots = self.slots("index", "read_slots", m)
        if blocks is None:
            scores = index_scores(q, gather_rows(pools["index"], slots), weights)
        else:
            scores = block_index_scores(q, pools["index"], slots, weights, blocks)
        return select_topk(scores, self.slots("index", "num_entries", m), self.topk)

    def attend_block(
        self,
        q_THE: Tensor,
        kv_TE: Tensor,
        norm: Tensor,
        rope: tuple[Tensor, Tensor],
        block_TB: Tensor,
        sink_H: Tensor,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        near, window = self.slots("window", "read_slots", m), pools["window"]
        row = self.row(kv_TE, norm, *rope).to(window.dtype)
        return paged_attention(q_THE, window, near, row, block_TB, sink_H, self.scale)


class OperatorRows(_Rows):
    """The registered operators, over pools of every row format; see `PagedRows`."""

    def __init__(self, spec: ModelSpec, name: str) -> None:
        super().__init__(spec, name)
        self.rope_dim = spec.rope[self.config.rope].dim
        self.page_rows: dict[str, int] = {}
        for role, group_name in self.caches.items():
            group = spec.cache_groups[group_name]
            ratio = group.ratio if isinstance(group, CompressedGroup) else 1
            self.page_rows[role] = group.page_tokens // ratio

    def write_window(
        self, kv_TE: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, pools: Tensors, m: Tensors
    ) -> None:
        slots = self.slots("window", "slot_mapping", m)
        self._write(kv_TE, norm, cos, sin, slots, pools["window"], self.page_rows["window"])

    def _write(
        self,
        kv: Tensor,
        norm: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        slots: Tensor,
        pool: Tensor,
        page_rows: int,
    ) -> None:
        row_operators.write_kv_rows(
            kv, norm, cos, sin, slots, pool, eps=self.eps, rope_dim=self.rope_dim,
            page_rows=page_rows,
        )  # fmt: skip

    def write_compressed(self, role: str, rows_CE: Tensor, pools: Tensors, m: Tensors) -> None:
        slots, page_rows = self.slots(role, "slot_mapping", m), self.page_rows[role]
        if role == "index":
            row_operators.write_index_rows(rows_CE, slots, pools[role], page_rows=page_rows)
        else:
            self._write(rows_CE, None, None, None, slots, pools[role], page_rows)

    def attend(
        self,
        q_THE: Tensor,
        sink_H: Tensor,
        index: tuple[Tensor, Tensor] | None,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        rows = slots = None
        if not isinstance(self.config, SlidingAttention):
            rows, slots = pools["compressed"], self.slots("compressed", "read_slots", m)
        if index is not None:
            scores = index_operators.paged_index_scores(
                index[0],
                pools["index"],
                self.slots("index", "read_slots", m),
                index[1],
                page_rows=self.page_rows["index"],
            )
            entries = self.slots("index", "num_entries", m)
            slots = index_operators.select_rows(scores, entries, slots, topk=self.topk)
        page_rows = self.page_rows.get("compressed", 1)
        return self._attend(q_THE, rows, slots, sink_H, page_rows, pools, m)

    def _attend(
        self,
        q: Tensor,
        rows: Tensor | None,
        slots: Tensor | None,
        sink: Tensor,
        page_rows: int,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        return attention_operators.sparse_attention(
            q,
            pools["window"],
            self.slots("window", "read_slots", m),
            rows,
            slots,
            sink,
            self.scale,
            rope_dim=self.rope_dim,
            window_page_rows=self.page_rows["window"],
            compressed_page_rows=page_rows,
        )

    def attend_block(
        self,
        q_THE: Tensor,
        kv_TE: Tensor,
        norm: Tensor,
        rope: tuple[Tensor, Tensor],
        block_TB: Tensor,
        sink_H: Tensor,
        pools: Tensors,
        m: Tensors,
    ) -> Tensor:
        # A page of the window's own format for the step's rows, behind a null row.
        page_rows = len(kv_TE) + 1
        page = empty_page(pools["window"], page_rows, kv_TE.shape[1], self.rope_dim)
        slots = torch.arange(1, page_rows, device=kv_TE.device)
        self._write(kv_TE, norm, *rope, slots, page, page_rows)
        return self._attend(q_THE, page, block_TB + 1, sink_H, page_rows, pools, m)
