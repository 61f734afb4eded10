"""One exception class per kind of user fault; the CLI prints them without a traceback."""

from __future__ import annotations

from v4graph.words import counted


class V4GraphError(Exception):
    """Base of every fault that a user can cause and repair."""


class SpecError(V4GraphError):
    """A YAML spec is malformed or inconsistent; the message lists every fault found."""


class PlanError(V4GraphError):
    """A valid spec cannot be lowered with the given limits (memory, buckets, formats)."""


class WeightsError(V4GraphError):
    """A checkpoint does not hold exactly the tensors that the plan lists."""


class NonFiniteWeightsError(WeightsError):
    """A checkpoint holds NaN or infinite values; the message names tensors and counts."""


class ProgramError(V4GraphError):
    """A step program broke its contract (stale stamp, moved buffer, recompilation)."""


class CacheError(V4GraphError):
    """The directory of compiled programs cannot be written: read-only, or the disk is full."""


class ServeError(V4GraphError):
    """The server cannot listen where it was told to."""


class NonFiniteLogitsError(V4GraphError):
    """A request ended because the model's logits became NaN or infinite."""

    @classmethod
    def after(cls, num_tokens: int) -> NonFiniteLogitsError:
        """What a request is told that had so many tokens generated."""
        return cls(
            f"the model's logits became NaN or infinite after "
            f"{counted(num_tokens, 'generated token')}: its weights are faulty or its arithmetic "
            "overflowed, and no token can be chosen"
        )


class RequestError(V4GraphError):
    """A request cannot be served as asked; `field` names the offending request field."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
