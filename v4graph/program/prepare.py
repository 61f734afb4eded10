"""The prepare and commit stages: step metadata derived on the device from the request table.

The host states which request slots take part and how many tokens each computes; every other value
that a layer reads is written here, into the program's own static buffers, in the same step that
reads it. Nothing survives from another step, mode or request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.ops.rope import cos_sin
from v4graph.plan.buffers import closing_ratios
from v4graph.plan.types import Bucket, GroupPlan, Plan


def prepare(
    plan: Plan,
    bucket: Bucket,
    table: dict[str, Tensor],
    freqs: dict[str, Tensor],
    buf: dict[str, Tensor],
) -> None:
    """Fill every prepare-owned buffer of `buf` from `slots`, `query_lens` and the table.

    Args:
        table: `RequestTable.tensors()`.
        freqs: rotary frequencies `[dim / 2]` by rope entry.
        buf: the program's static buffers by name.

    Padded requests have `query_lens` 0 and slot 0; padded tokens sit at position 0 of the null
    request, write to the null row and list no rows.
    """
    slots, query_lens = buf["slots"], buf["query_lens"]
    first = table["num_computed_tokens"][slots]
    ends = query_lens.cumsum(0)
    index = torch.arange(bucket.num_tokens, device=slots.device)
    req = torch.searchsorted(ends, index, right=True).clamp_max(bucket.num_reqs - 1)
    valid = index < ends[-1]
    token_slot = torch.where(valid, slots[req], 0)
    offset = index - (ends - query_lens)[req]
    positions = torch.where(valid, first[req] + offset, 0)

    buf["stamp"].copy_(buf["step_stamp"])
    buf["token_to_req"].copy_(req)
    buf["is_valid_token"].copy_(valid)
    buf["positions"].copy_(positions)
    buf["input_ids"].copy_(torch.where(valid, table["token_ids"][token_slot, positions], 0))
    buf["logits_rows"].copy_((ends - 1).clamp_min(0))
    known = table["num_tokens"][slots]
    buf["do_sample"].copy_((query_lens > 0) & (first + query_lens == known))
    for rope, _ in plan.rope_dims:
        cos, sin = cos_sin(positions, freqs[rope])
        buf[f"rope.{rope}.cos"].copy_(cos)
        buf[f"rope.{rope}.sin"].copy_(sin)

    closing = {r: _closings(first, query_lens, slots, r, buf) for r in closing_ratios(plan)}
    for g in plan.groups:
        block_table = table[f"block_table.{g.name}"]
        if g.kind == "compressed":
            _compressed_group(g, block_table, closing[g.ratio], token_slot, positions, valid, buf)
        else:
            written = _row_slots(g, block_table, token_slot, positions)
            buf[f"{g.name}.slot_mapping"].copy_(torch.where(valid, written, 0))
            last, slot = (
                (positions, token_slot) if g.kind == "sliding_window" else closing[g.closes_every]
            )
            steps = torch.arange(g.span, device=slots.device)
            listed = last[:, None] - (g.span - 1) + steps
            rows = _row_slots(g, block_table, slot[:, None], listed.clamp_min(0))
            seen = (listed >= 0) & (slot > 0)[:, None]
            buf[f"{g.name}.read_slots"].copy_(torch.where(seen, rows, -1))


def _closings(
    first: Tensor, query_lens: Tensor, slots: Tensor, ratio: int, buf: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """(position, request slot) of every window that closes in this step; (-1, 0) beyond them."""
    out = buf[f"closing_positions.{ratio}"]
    opened = first // ratio
    counts = (first + query_lens) // ratio - opened
    ends = counts.cumsum(0)
    index = torch.arange(out.shape[0], device=out.device)
    req = torch.searchsorted(ends, index, right=True).clamp_max(slots.shape[0] - 1)
    valid = index < ends[-1]
    entry = opened[req] + index - (ends - counts)[req]
    position = torch.where(valid, (entry + 1) * ratio - 1, -1)
    out.copy_(position)
    return position, torch.where(valid, slots[req], 0)


def _compressed_group(
    g: GroupPlan,
    block_table: Tensor,
    closing: tuple[Tensor, Tensor],
    token_slot: Tensor,
    positions: Tensor,
    valid: Tensor,
    buf: dict[str, Tensor],
) -> None:
    position, slot = closing
    written = _row_slots(g, block_table, slot, position.clamp_min(0))
    buf[f"{g.name}.slot_mapping"].copy_(torch.where(position >= 0, written, 0))
    # A row is visible from its window's last token on: its own, not the sequence's, length counts.
    entries = torch.where(valid, (positions + 1) // g.ratio, 0)
    buf[f"{g.name}.num_entries"].copy_(entries)
    entry = torch.arange(g.max_entries, device=positions.device)
    rows = _row_slots(g, block_table, token_slot[:, None], entry * g.ratio)
    buf[f"{g.name}.read_slots"].copy_(torch.where(entry < entries[:, None], rows, -1))


def _row_slots(g: GroupPlan, block_table: Tensor, slot: Tensor, positions: Tensor) -> Tensor:
    """Row id in the pool of the row that stands for `positions`: page x rows + offset, int64."""
    page = block_table[slot, (positions // g.page_tokens) % g.table_width]
    return page * g.page_rows + positions % g.page_tokens // g.ratio


def commit(table: dict[str, Tensor], buf: dict[str, Tensor], sampled: Tensor) -> Tensor:
    """Advance the table after a step: computed lengths, and the sampled tokens where one is due.

    Returns the tokens `[R]`, -1 for requests that sampled none (padding, unfinished prompts).
    """
    slots, due = buf["slots"], buf["do_sample"]
    end = table["num_tokens"][slots]
    # Requests with nothing due rewrite the null request's first token.
    where = torch.where(due, slots, 0)
    table["token_ids"].index_put_((where, torch.where(due, end, 0)), torch.where(due, sampled, 0))
    table["num_computed_tokens"].index_put_((slots,), buf["query_lens"], accumulate=True)
    table["num_tokens"].index_put_((slots,), due.to(torch.int64), accumulate=True)
    return torch.where(due, sampled, -1)
