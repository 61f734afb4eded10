"""Ranges of numbers in a request body: one message that tells both ends, and what float32 holds.

Each is metadata of an annotation: the bounds for the schema behind the check that words the error.
"""

from __future__ import annotations

from typing import Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from v4graph.plan.rules import float32_keeps


def integer(low: int, high: int) -> tuple[Any, ...]:
    """Metadata of an integer of `low` to `high`."""

    def check(value: Any) -> Any:
        # Other types are told by pydantic.
        if type(value) is int and not low <= value <= high:
            raise PydanticCustomError(
                "out_of_range",
                "must be an integer of {low} to {high}, got {value}",
                {"low": str(low), "high": str(high), "value": str(value)},
            )
        return value

    return BeforeValidator(check), Field(ge=low, le=high)


def number(low: float, high: float, above: bool = False) -> tuple[Any, ...]:
    """Metadata of a number of `low` to `high`, of a size that float32 holds.

    Args:
        above: `low` itself is out of range.
    """
    wanted = f"above {low:g}, at most {high:g}" if above else f"of {low:g} to {high:g}"

    def check(value: Any) -> Any:
        if type(value) not in (int, float):
            return value
        # False for NaN as well.
        if not low <= value <= high or (above and value == low):
            raise PydanticCustomError(
                "out_of_range",
                "must be a number {wanted}, got {value}",
                {"wanted": wanted, "value": str(value)},
            )
        if not float32_keeps(value):
            raise PydanticCustomError(
                "out_of_range",
                "must be 0 or of a size that float32 holds, at least 1.2e-38, got {value}",
                {"value": str(value)},
            )
        return value

    limit = Field(gt=low, le=high) if above else Field(ge=low, le=high)
    return BeforeValidator(check), limit
