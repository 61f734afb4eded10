"""The plan: every shape, dtype and byte of a model under given limits, as frozen values.

Nothing here imports torch; dtypes are the strings of `DTYPES`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from math import prod
from typing import Any, Literal

DTYPES = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1}
NULL_PAGE = 0
"""Page and row 0 of every group: padding writes there, real data never does."""


class Mode(str, Enum):
    """What a step does; stated by the scheduler, never inferred from a shape."""

    PREFILL = "prefill"
    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    DRAFT_DECODE = "draft_decode"
    IDLE = "idle"


@dataclass(frozen=True)
class Limits:
    """What the user allows; the plan sizes everything from it."""

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    max_model_len: int = 0
    """Longest sequence in tokens; 0 stands for the spec's `max_position_embeddings`."""
    kv_memory_bytes: int = 0
    """Bytes for page pools; 0 stands for what `max_num_seqs` full-length sequences need."""
    dtype: str = "float32"
    num_draft_tokens: int = 0
    decode_buckets: tuple[int, ...] = ()
    """Batch sizes with a decode program; empty stands for 1 and max_num_seqs."""
    prefill_buckets: tuple[tuple[int, int], ...] = ()
    """(tokens, requests) with a prefill program; empty stands for the plan's own choice."""
    greedy_only: bool = False
    """Leave out the programs that sample; every request must have temperature 0."""


GroupKind = Literal["sliding_window", "compressed", "compressor_state"]


@dataclass(frozen=True)
class GroupPlan:
    """One cache group: a block table and, per layer that uses it, a page pool."""

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    """Main-model layers with a pool in this group."""
    row_dim: int
    row_dtype: str
    ratio: int
    """Tokens a row stands for; 1 for window and state rows."""
    closes_every: int
    """Tokens between two closing windows: the ratio of the compressed rows that this group holds
    or feeds; 1 for window rows."""
    span: int
    """Rows that one read takes: the window, a closing window's state rows, or 0 (history)."""
    page_tokens: int
    page_rows: int
    kept_tokens: int
    """Trailing tokens whose rows must stay; 0 keeps the whole sequence."""
    table_width: int
    """Columns of the block table; a sliding group's is a ring over its pages."""
    pages_per_seq: int
    """Most pages that one sequence holds, a step in flight included."""
    num_pages: int
    """Pages of a pool, the null page included."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of the group."""
        return self.page_rows * self.row_dim * DTYPES[self.row_dtype] * len(self.layers)

    @property
    def max_entries(self) -> int:
        """Rows that a full-length sequence's table can address (history groups)."""
        return self.table_width * self.page_rows

    def pages_for(self, num_tokens: int) -> int:
        """Pages that cover `num_tokens` of history, or of the kept range of a sliding group."""
        return -(-num_tokens // self.page_tokens)


@dataclass(frozen=True)
class BufferPlan:
    """A static buffer of one program: fixed shape, one producer, fixed address."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    producer: Literal["host", "prepare"]
    group: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return prod(self.shape) * DTYPES[self.dtype]


@dataclass(frozen=True)
class Bucket:
    """Padded sizes of one program."""

    num_tokens: int
    num_reqs: int


@dataclass(frozen=True)
class ModePlan:
    """One forward mode: its programs' sizes and what a step reads, writes and keeps."""

    mode: Mode
    tokens_per_request: int
    """0 when the requests of a step may differ."""
    buckets: tuple[Bucket, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    logits: Literal["last_token", "none"]


@dataclass(frozen=True)
class LayerPlan:
    """A layer by the names of its spec entries; equal names share a compiled region."""

    index: int
    attention: str
    ffn: str


@dataclass(frozen=True)
class MemoryLine:
    """One line of the memory account."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """Everything that follows from a spec and limits."""

    name: str
    limits: Limits
    max_model_len: int
    layers: tuple[LayerPlan, ...]
    rope_dims: tuple[tuple[str, int], ...]
    """(rope entry, rotated channels) of every rope that a layer uses."""
    groups: tuple[GroupPlan, ...]
    modes: tuple[ModePlan, ...]
    memory: tuple[MemoryLine, ...]
    num_tensors: int
    weight_bytes: int

    def group(self, name: str) -> GroupPlan:
        """The group called `name`; KeyError if there is none."""
        for g in self.groups:
            if g.name == name:
                return g
        raise KeyError(name)

    def mode(self, mode: Mode) -> ModePlan:
        """The plan of `mode`; KeyError if the plan has none."""
        for m in self.modes:
            if m.mode is mode:
                return m
        raise KeyError(mode.value)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return asdict(self)
