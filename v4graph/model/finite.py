"""Tell values of weights that are no numbers: NaN and infinities, and the codes that mean them.

Two passes. Every parameter is reduced to one flag where it lies, without a copy of it and without
waiting for the device; what is flagged is counted, a piece at a time, for the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from v4graph.ops.quantised import scale_values

PIECE = 1 << 22
"""Elements whose temporary values exist at once."""
_INTEGERS = (torch.uint8, torch.int8, torch.int64)


def any_nonfinite(parts: Iterable[Tensor]) -> Tensor | None:
    """A flag `[]` bool on the parts' device: whether any of them holds what is no finite number.

    Args:
        parts: a plain tensor, or codes and scales; each contiguous. Packed e2m1 codes and integers
            are always numbers.

    Returns:
        None where there is nothing to look at.
    """
    flags = [f for part in parts if part.numel() and not part.is_meta for f in _flags(part)]
    return torch.stack(flags).any() if flags else None


def _flags(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.dtype in _INTEGERS:
        return
    if tensor.dtype is torch.float8_e8m0fnu:
        yield tensor.view(torch.uint8).amax() == 0xFF
    elif tensor.dtype is torch.float8_e4m3fn:
        for piece in tensor.view(torch.uint8).view(-1).split(PIECE):
            yield (piece & 0x7F).amax() == 0x7F
    else:
        # Both are NaN if any element is.
        low, high = tensor.aminmax()
        yield ~(low.isfinite() & high.isfinite())


def count_nonfinite(tensor: Tensor) -> int:
    """Elements of a plain tensor, e4m3 codes or scales that are NaN or infinite."""
    if tensor.dtype in _INTEGERS:
        return 0
    return sum(int(_is_nonfinite(p).sum()) for p in tensor.reshape(-1).split(PIECE))


def _is_nonfinite(piece: Tensor) -> Tensor:
    if piece.dtype is torch.float8_e4m3fn:
        return (piece.view(torch.uint8) & 0x7F) == 0x7F
    return ~scale_values(piece).isfinite()
