"""Numbers in messages."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "", form: str = "d") -> str:
    """`1 tensor`, `2 tensors`: a count and what it counts, in the number that goes with it.

    Args:
        one: what stands behind 1.
        many: what stands behind every other count; `one` with an `s` if left out.
        form: format of the count, such as `,`.
    """
    return f"{count:{form}} {one if count == 1 else many or one + 's'}"
