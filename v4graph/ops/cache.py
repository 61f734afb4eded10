"""Writing rows into a page pool."""

from __future__ import annotations

from torch import Tensor


def write_rows(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """`pool[slots] = rows` in place: `pool [R, dim]`, `slots [T]` int64, `rows [T, dim]`.

    Slot 0 is the null row; padded tokens share it, so its contents are arbitrary. The rows are
    cast to the pool's dtype.
    """
    pool.index_copy_(0, slots, rows.to(pool.dtype))
