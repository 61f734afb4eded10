"""The operator `v4graph::close_windows`: a compressor's state rows, and the windows they close."""

from __future__ import annotations

import torch
from torch import Tensor

from v4graph.ops.attention import gather_rows
from v4graph.ops.cache import write_rows
from v4graph.ops.compress import pool_windows, state_rows
from v4graph.ops.custom.library import register
from v4graph.ops.rope import cos_sin
from v4graph.ops.rows import write_fp8_ds_rows, write_fp8_rows


def _close_windows(
    projected: Tensor,
    ape: Tensor,
    positions: Tensor,
    state_slots: Tensor,
    state_pool: Tensor,
    read_slots: Tensor,
    closing_positions: Tensor,
    freqs: Tensor,
    norm_weight: Tensor,
    slots: Tensor,
    pool: Tensor,
    *,
    overlap: bool,
    eps: float,
    row_format: str,
    page_rows: int,
    dtype: torch.dtype,
) -> None:
    kv, score = projected.chunk(2, dim=-1)
    write_rows(state_pool, state_slots.clamp_min(0), state_rows(kv, score, ape, positions))
    first = (closing_positions - (ape.shape[0] - 1)).clamp_min(0)
    pooled = pool_windows(
        gather_rows(state_pool, read_slots),
        read_slots >= 0,
        norm_weight,
        *cos_sin(first, freqs),
        overlap=overlap,
        norm_eps=eps,
        dtype=dtype,
    )
    if pool.dtype is not torch.uint8:
        write_rows(pool, slots.clamp_min(0), pooled)
    elif row_format == "fp8":
        write_fp8_rows(pool, slots, pooled, page_rows)
    else:
        write_fp8_ds_rows(pool, slots, pooled, 2 * freqs.shape[0], page_rows)


close_windows = register(
    "close_windows(Tensor projected, Tensor ape, Tensor positions, Tensor state_slots,"
    " Tensor(a!) state_pool, Tensor read_slots, Tensor closing_positions, Tensor freqs,"
    " Tensor norm_weight, Tensor slots, Tensor(b!) pool, *, bool overlap, float eps,"
    " str row_format, int page_rows, ScalarType dtype) -> ()",
    reference=_close_windows,
    fake=lambda *args, **kwargs: None,
    kernel=("compressor", "close_windows"),
)
"""Write a step's state rows, then the compressed rows of the windows that it closes.

`projected [T, 2 W]` holds (kv, score) of each token, float32; `ape [ratio, W]`; `positions` and
`state_slots [T]`; `state_pool [rows, 2 W]` float32. `read_slots [C, S]` lists the state rows of
each closing window, oldest first, -1 before the start of the sequence; `closing_positions [C]` are
the windows' last positions. Windows are pooled, rounded to `dtype`, normalised and rotated at their
first position (`ops/compress.py`), and written to `pool` at `slots [C]`: `[rows, dim]`, or uint8
pages of `row_format` (`fp8_ds`, `fp8`; `ops/rows.py`), which `page_rows` describes. Slot 0 and
negative ones are padding: no real row changes.
"""
