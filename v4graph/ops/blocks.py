"""Attention of many tokens at once: blocks of neighbouring tokens read their rows together.

The lists of a request's consecutive tokens overlap almost wholly: a window moves by one row a
token, and compressed rows only ever join. So a block gathers the union once and multiplies once,
where `paged_attention` gathers and multiplies for every token. The result is the same.

Shape suffixes: T tokens, N blocks of B tokens, H heads, E head_dim, L window, C compressed rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.ops.attention import attend, gather_rows

BLOCK_TOKENS = 32

Blocks = tuple[Tensor, Tensor, Tensor]


def token_blocks(window_slots_TL: Tensor, num_requests: int) -> Blocks:
    """Cut a step's tokens into blocks, each of one request's consecutive tokens.

    Args:
        window_slots_TL: row ids of consecutive positions up to the token's own, -1 where there is
            none; all -1 for padding, which is in no block.
        num_requests: most requests in the step; each one's tokens are neighbours.

    Returns:
        `token [N, B]` at each place, the block's last token behind it; `is_used [N, B]`; and
        `place [T]` of each token, 0 for padding.
    """
    T, B = window_slots_TL.shape[0], BLOCK_TOKENS
    N = (T + num_requests * (B - 1)) // B
    own, before = window_slots_TL[:, -1], window_slots_TL[:, -2]
    index = torch.arange(T, device=own.device)
    is_valid = own >= 0
    # A token goes on where its neighbour stopped if that one's row is the last but one of its own.
    starts = (before < 0) | (before != own.roll(1)) | (index == 0)
    first = torch.where(starts, index, 0).cummax(0).values
    offset = index - first
    block = (is_valid & (offset % B == 0)).to(torch.int64).cumsum(0) - 1
    place = torch.where(is_valid, block * B + offset % B, N * B)
    token = torch.full((N * B + 1,), -1, device=own.device).scatter(0, place, index)[:-1]
    token = token.view(N, B)
    is_used = token >= 0
    token = torch.where(is_used, token, token.amax(1, keepdim=True)).clamp_min(0)
    return token, is_used, torch.where(is_valid, place, 0)


def window_union(window_slots_TL: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Row ids that a block's windows cover, `[N, L + B - 1]`, and which each token sees.

    The union is the first token's list, then the own rows of the others; token i of a block sees
    places i to i + L - 1 of it.
    """
    token, is_used, _ = blocks
    L, B = window_slots_TL.shape[1], token.shape[1]
    own = torch.where(is_used[:, 1:], window_slots_TL[:, -1][token[:, 1:]], -1)
    slots = torch.cat((window_slots_TL[token[:, 0]], own), dim=1)
    slots = torch.where(is_used[:, :1], slots, -1)
    ahead = (
        torch.arange(L + B - 1, device=slots.device) - torch.arange(B, device=slots.device)[:, None]
    )
    return slots, (ahead >= 0) & (ahead < L) & (slots >= 0)[:, None]


def block_attention(
    q_THE: Tensor,
    window_pool: Tensor,
    window_slots_TL: Tensor,
    compressed_pool: Tensor | None,
    compressed_slots_TC: Tensor | None,
    chosen_TC: Tensor | None,
    sink_H: Tensor,
    softmax_scale: float,
    blocks: Blocks,
) -> Tensor:
    """`paged_attention` of every token, a block at a time; arguments as there.

    Args:
        compressed_slots_TC: the visible compressed rows of each token's request, in order, -1
            behind them.
        chosen_TC: bool, those of them that the token attends to; all if left out.
        blocks: what `token_blocks` made of the same step.
    """
    token, is_used, place = blocks
    slots, seen = window_union(window_slots_TL, blocks)
    keys = gather_rows(window_pool, slots)
    if compressed_pool is not None and compressed_slots_TC is not None:
        # The last token of a block sees what any of its tokens sees.
        keys = torch.cat((keys, gather_rows(compressed_pool, compressed_slots_TC[token[:, -1]])), 1)
        visible = compressed_slots_TC >= 0
        visible = visible if chosen_TC is None else visible & chosen_TC
        seen = torch.cat((seen, visible[token]), dim=2)
    H = q_THE.shape[1]
    q = q_THE[token].flatten(1, 2)
    seen = (seen & is_used[..., None]).repeat_interleave(H, 1)
    out = attend(q, keys.to(q.dtype), seen, sink_H.repeat(token.shape[1]), softmax_scale)
    out = out.unflatten(1, (token.shape[1], H)).flatten(0, 1)[place]
    return torch.where((window_slots_TL[:, -1] >= 0)[:, None, None], out, 0.0).to(q.dtype)


def block_index_scores(
    q_THE: Tensor, pool: Tensor, slots_TC: Tensor, weights_TH: Tensor, blocks: Blocks
) -> Tensor:
    """`index_scores` against the rows of `pool` at `slots`, float32 `[T, C]`; padding gets any."""
    token, _, place = blocks
    keys = gather_rows(pool, slots_TC[token[:, -1]]).float()
    scores = torch.bmm(q_THE.float()[token].flatten(1, 2), keys.transpose(1, 2)).relu()
    scores = scores.unflatten(1, (token.shape[1], -1)) * weights_TH[token][..., None]
    return scores.sum(2).flatten(0, 1)[place]
