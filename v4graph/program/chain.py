"""Rows of a chain of MTP layers, and the streams that one layer hands to the next.

Layer i's row t takes layer i - 1's streams at t. In a round layer i begins one row before layer
i - 1 does, at the oldest row that rested on a draft: the streams for that row come from an earlier
round. They are final, and the request table carries them. docs/speculation.md derives all of it.

Axes: T padded rows of this layer, P of the layer before, R padded requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.plan.types import Bucket

Tensors = dict[str, Tensor]


def chain_extent(
    table: Tensors, slots_R: Tensor, taking_part_R: Tensor, layer: int
) -> tuple[Tensor, Tensor]:
    """Position of the first row that a layer computes for each request in this round, and their
    number; read after the round's commit.

    A row is final once its token, `layer + 1` places behind, is known. A round computes what is not
    final yet: up to the newest row where it drafts, else up to the last that becomes final.
    """
    computed, known = table["num_computed_tokens"][slots_R], table["num_tokens"][slots_R]
    computed_before = computed - table["num_committed"][slots_R]
    known_before = known - table["num_appended"][slots_R]
    first = num_final(computed_before, known_before, layer)
    drafting = computed + 1 == known
    end = torch.where(drafting, computed, num_final(computed, known, layer))
    return first, torch.where(taking_part_R, end - first, 0)


def num_final(computed: Tensor, known: Tensor, layer: int) -> Tensor:
    """Rows of a layer that rest on known tokens alone."""
    return torch.minimum(computed, known - 1 - layer).clamp_min(0)


def input_ids(table: Tensors, slot_T: Tensor, positions_T: Tensor, layer: int) -> Tensor:
    """The token `layer + 1` places behind each row: a known one, or a draft of this round."""
    place = positions_T + layer + 1
    known = table["num_tokens"][slot_T]
    last_token, last_draft = table["token_ids"].shape[1] - 1, table["draft_tokens"].shape[1] - 1
    draft = table["draft_tokens"][slot_T, (place - known).clamp(0, last_draft)]
    return torch.where(
        place < known, table["token_ids"][slot_T, place.clamp_max(last_token)], draft
    )


def prepare_sources(
    table: Tensors,
    host: Tensors,
    bucket: Bucket,
    layer: int,
    req_T: Tensor,
    positions_T: Tensor,
    valid_T: Tensor,
    buf: Tensors,
) -> None:
    """Where each row's streams are, and which row is carried to the next round.

    Both index the P rows of the layer before, with the R carried rows behind them. A carried row
    that is still the right one, or that nobody will need, stays what it is.
    """
    slots, taking_part = host["slots"], host["query_lens"] > 0
    before = bucket.widened(-1)
    first, lens = chain_extent(table, slots, taking_part, layer - 1)
    request = torch.arange(bucket.num_reqs, device=slots.device)
    width = before.tokens_per_req
    starts = request * width if width else lens.cumsum(0) - lens
    carried = before.num_tokens + request
    made = starts[req_T] + positions_T - first[req_T]
    rows = torch.where(positions_T >= first[req_T], made, carried[req_T])
    buf["stream_rows"].copy_(torch.where(valid_T, rows, 0))
    computed, known = table["num_computed_tokens"][slots], table["num_tokens"][slots]
    following = num_final(computed, known, layer) - first
    fresh = (following >= 0) & (following < lens)
    buf["carry_rows"].copy_(torch.where(fresh, starts + following, carried))


def hand_over(carried_SND: Tensor, slots_R: Tensor, buf: Tensors, streams_PND: Tensor) -> Tensor:
    """The streams `[T, N, D]` of this layer's rows; what the next round needs is carried."""
    rows = torch.cat((streams_PND, carried_SND[slots_R]))
    carried_SND.index_put_((slots_R,), rows[buf["carry_rows"]])
    return rows[buf["stream_rows"]]
