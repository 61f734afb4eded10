"""The prepare stages: a step's metadata derived on the device from the request table.

The host states which request slots take part and how many tokens each computes; every other value
that a layer reads is written here, into the static buffers of that mode and bucket, in the same
step that reads it. Nothing survives from another step, mode or request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from v4graph.ops.rope import cos_sin
from v4graph.plan.buffers import closing_ratios, mode_groups, mode_ropes
from v4graph.plan.types import Bucket, GroupPlan, Mode, Plan
from v4graph.program import chain

Tensors = dict[str, Tensor]
MODE_NUMBERS = {mode: i for i, mode in enumerate(Mode)}


@dataclass(frozen=True)
class _Rows:
    """The rows of a step: T tokens of R requests."""

    slots_R: Tensor
    first_R: Tensor
    """Position of each request's first token in this step."""
    lens_R: Tensor
    """Tokens of each request; 0 for padding."""
    offset_T: Tensor
    """Index of each token within its request."""
    req_T: Tensor
    """Place of each token's request in the step."""
    slot_T: Tensor
    """Request-table row of each token; 0 for padding."""
    positions_T: Tensor
    valid_T: Tensor
    last_R: Tensor
    """Row of each request's last token."""


def prepare(
    plan: Plan,
    mode: Mode,
    bucket: Bucket,
    table: Tensors,
    freqs: Tensors,
    host: Tensors,
    buf: Tensors,
    layer: int = 0,
) -> None:
    """Fill every buffer of `buf` from the host's lists and the request table.

    Args:
        table: `RequestTable.tensors()`.
        freqs: rotary frequencies `[dim / 2]` by rope entry.
        host: `slots [R]`, `query_lens [R]` and `step [1]`, int64.
        buf: the static buffers of this mode and bucket by name.
        layer: the draft layer that the stage runs.

    Padded requests have `query_lens` 0 and slot 0; padded tokens sit at position 0 of the null
    request, write to the null row and list no rows.
    """
    buf["stamp"][0] = MODE_NUMBERS[mode]
    buf["stamp"][1:] = host["step"]
    if plan.mode(mode).layers == "none":
        return
    rows = _rows(plan, mode, bucket, table, host, layer)
    buf["is_valid_token"].copy_(rows.valid_T)
    buf["positions"].copy_(rows.positions_T)
    input_ids = _input_ids(plan, mode, rows, table, layer)
    buf["input_ids"].copy_(torch.where(rows.valid_T, input_ids, 0))
    if mode is Mode.TARGET_VERIFY:
        buf["num_drafts"].copy_((rows.lens_R - 1).clamp_min(0))
    if "logits_rows" in buf:
        buf["logits_rows"].copy_(rows.last_R)
    if "do_sample" in buf:
        buf["do_sample"].copy_(_due(mode, rows, table))
    if mode is Mode.DRAFT_CHAIN:
        valid, req, at = rows.valid_T, rows.req_T, rows.positions_T
        chain.prepare_sources(table, host, bucket, layer, req, at, valid, buf)
    drafting = plan.mode(mode).layers == "draft"
    rotated = rows.positions_T + (plan.speculation.position_offset if drafting else 0)
    for rope, _ in mode_ropes(plan, mode):
        cos, sin = cos_sin(rotated, freqs[rope])
        buf[f"rope.{rope}.cos"].copy_(cos)
        buf[f"rope.{rope}.sin"].copy_(sin)
    groups = mode_groups(plan, mode)
    closing = {r: _closings(rows, r, buf) for r in closing_ratios(groups)}
    for g in groups:
        block_table = table[f"block_table.{g.name}"]
        if g.kind == "compressed":
            _compressed_group(g, block_table, closing[g.ratio], rows, buf)
        else:
            read = (rows.positions_T, rows.slot_T)
            if g.kind != "sliding_window":
                read = closing[g.closes_every]
            elif _drafts_block(plan, mode):
                read = (rows.positions_T - rows.offset_T - 1, rows.slot_T)
            _sliding_group(g, block_table, read, rows, buf)


def _drafts_block(plan: Plan, mode: Mode) -> bool:
    """Whether a step drafts a block of tokens behind the newest computed row, which all of its rows
    read up to."""
    return mode is Mode.DRAFT_DECODE and plan.speculation.block_size > 0


def _rows(
    plan: Plan, mode: Mode, bucket: Bucket, table: Tensors, host: Tensors, layer: int
) -> _Rows:
    slots, query_lens = host["slots"], host["query_lens"]
    first, lens = _extent(plan, mode, table, slots, query_lens, layer)
    if mode is Mode.DRAFT_CHAIN:
        query_lens = lens
    index = torch.arange(bucket.num_tokens, device=slots.device)
    if bucket.tokens_per_req:
        starts = torch.arange(bucket.num_reqs, device=slots.device) * bucket.tokens_per_req
        req = index // bucket.tokens_per_req
    else:
        ends = query_lens.cumsum(0)
        starts = ends - query_lens
        req = torch.searchsorted(ends, index, right=True).clamp_max(bucket.num_reqs - 1)
    offset = index - starts[req]
    positions = first[req] + offset
    valid = offset < lens[req]
    if not _drafts_block(plan, mode):  # a block is whole, wherever the sequence ends
        valid &= positions < plan.max_model_len
    return _Rows(
        slots_R=slots,
        first_R=first,
        lens_R=lens,
        offset_T=offset,
        req_T=req,
        slot_T=torch.where(valid, slots[req], 0),
        positions_T=torch.where(valid, positions, 0),
        valid_T=valid,
        # A request without tokens reads a row of padding, or in a full step the last one.
        last_R=(starts + (lens - 1).clamp_min(0)).clamp_max(bucket.num_tokens - 1),
    )


def _extent(
    plan: Plan, mode: Mode, table: Tensors, slots: Tensor, query_lens: Tensor, layer: int
) -> tuple[Tensor, Tensor]:
    """Position of every request's first token in this step, and its number of tokens."""
    computed, known = table["num_computed_tokens"][slots], table["num_tokens"][slots]
    taking_part = query_lens > 0
    if mode is Mode.TARGET_VERIFY:
        # The newest token, then as many drafts as the sequence can still take.
        room = (plan.max_model_len - 1 - known).clamp_min(0)
        drafts = torch.minimum(table["num_drafts"][slots], room)
        return computed, torch.where(taking_part, 1 + drafts, 0)
    if mode is Mode.DRAFT_EXTEND:
        # The rows that the stage before has committed, now that each one's next token is known.
        done = torch.where(taking_part, table["num_committed"][slots], 0)
        return computed - done, done
    if _drafts_block(plan, mode):
        due = taking_part & (computed + 1 == known)
        return computed, torch.where(due, plan.speculation.block_size, 0)
    if mode is Mode.DRAFT_CHAIN:
        return chain.chain_extent(table, slots, taking_part, layer)
    if mode is Mode.DRAFT_DECODE:
        # Each layer has made a draft at the newest computed row; the last one goes on behind it.
        drafts = table["num_drafts"][slots]
        return computed - 1 + drafts - layer, (taking_part & (drafts > 0)).to(torch.int64)
    return computed, query_lens


def _input_ids(plan: Plan, mode: Mode, rows: _Rows, table: Tensors, layer: int) -> Tensor:
    slot, positions = rows.slot_T, rows.positions_T
    if _drafts_block(plan, mode):
        newest = table["token_ids"][slot, (positions - rows.offset_T).clamp_min(0)]
        return torch.where(rows.offset_T == 0, newest, plan.speculation.noise_token_id)
    if mode is Mode.TARGET_VERIFY:
        draft = (rows.offset_T - 1).clamp(0, table["draft_tokens"].shape[1] - 1)
        known = table["token_ids"][slot, positions]
        return torch.where(rows.offset_T == 0, known, table["draft_tokens"][slot, draft])
    if mode is Mode.DRAFT_EXTEND:
        ahead = min(plan.speculation.tokens_ahead, 1)
        return table["token_ids"][slot, positions + ahead]
    if mode is Mode.DRAFT_CHAIN:
        return chain.input_ids(table, slot, positions, layer)
    if mode is Mode.DRAFT_DECODE:
        newest = (table["num_drafts"][slot] - 1).clamp_min(0)
        return table["draft_tokens"][slot, newest]
    return table["token_ids"][slot, positions]


def _due(mode: Mode, rows: _Rows, table: Tensors) -> Tensor:
    """Requests whose next token this step decides: `[R]` bool."""
    some = rows.lens_R > 0
    if mode in (Mode.TARGET_VERIFY, Mode.DRAFT_DECODE):
        return some
    known = table["num_tokens"][rows.slots_R]
    # The main model decides the token behind the last known one, draft layers further ones.
    behind = 1 if mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_CHAIN) else 0
    return some & (rows.first_R + rows.lens_R + behind == known)


def _closings(rows: _Rows, ratio: int, buf: Tensors) -> tuple[Tensor, Tensor]:
    """(position, request slot) of every window that closes in this step; (-1, 0) beyond them."""
    out = buf[f"closing_positions.{ratio}"]
    opened = rows.first_R // ratio
    counts = (rows.first_R + rows.lens_R) // ratio - opened
    ends = counts.cumsum(0)
    index = torch.arange(out.shape[0], device=out.device)
    req = torch.searchsorted(ends, index, right=True).clamp_max(rows.slots_R.shape[0] - 1)
    valid = index < ends[-1]
    entry = opened[req] + index - (ends - counts)[req]
    position = torch.where(valid, (entry + 1) * ratio - 1, -1)
    out.copy_(position)
    return position, torch.where(valid, rows.slots_R[req], 0)


def _sliding_group(
    g: GroupPlan, block_table: Tensor, read: tuple[Tensor, Tensor], rows: _Rows, buf: Tensors
) -> None:
    """Where each token's row goes, and the `span` rows up to each position in `read`."""
    if f"{g.name}.slot_mapping" in buf:
        written = _row_slots(g, block_table, rows.slot_T, rows.positions_T)
        buf[f"{g.name}.slot_mapping"].copy_(torch.where(rows.valid_T, written, 0))
    if f"{g.name}.read_slots" not in buf:
        return
    last, slot = read
    steps = torch.arange(g.span, device=last.device)
    listed = last[:, None] - (g.span - 1) + steps
    found = _row_slots(g, block_table, slot[:, None], listed.clamp_min(0))
    seen = (listed >= 0) & (slot > 0)[:, None]
    buf[f"{g.name}.read_slots"].copy_(torch.where(seen, found, -1))


def _compressed_group(
    g: GroupPlan, block_table: Tensor, closing: tuple[Tensor, Tensor], rows: _Rows, buf: Tensors
) -> None:
    """Where each closing window's row goes, and every token's visible rows."""
    position, slot = closing
    written = _row_slots(g, block_table, slot, position.clamp_min(0))
    buf[f"{g.name}.slot_mapping"].copy_(torch.where(position >= 0, written, 0))
    # A row is visible from its window's last token on: its own, not the sequence's, length counts.
    entries = torch.where(rows.valid_T, (rows.positions_T + 1) // g.ratio, 0)
    if f"{g.name}.num_entries" in buf:
        buf[f"{g.name}.num_entries"].copy_(entries)
    entry = torch.arange(g.max_entries, device=position.device)
    found = _row_slots(g, block_table, rows.slot_T[:, None], entry * g.ratio)
    buf[f"{g.name}.read_slots"].copy_(torch.where(entry < entries[:, None], found, -1))


def _row_slots(g: GroupPlan, block_table: Tensor, slot: Tensor, positions: Tensor) -> Tensor:
    """Row id in the pool of the row that stands for `positions`: page x rows + offset, int64."""
    page = block_table[slot, (positions // g.page_tokens) % g.table_width]
    return page * g.page_rows + positions % g.page_tokens // g.ratio
