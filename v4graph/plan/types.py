"""The plan: every shape, dtype and byte of a model under given limits, as frozen values.

Nothing here imports torch; dtypes are the strings of `DTYPES`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from math import prod
from typing import Any, Literal

DTYPES = {"float32": 4, "bfloat16": 2, "int64": 8, "bool": 1, "uint8": 1}
NULL_PAGE = 0
"""Page and row 0 of every group: padding writes there, real data never does."""


class Mode(str, Enum):
    """What a step does; stated by the scheduler, never inferred from a shape."""

    PREFILL = "prefill"
    DECODE = "decode"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    DRAFT_CHAIN = "draft_chain"
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
    speculative: str = ""
    """An entry of the spec's `speculative`; empty stands for the first one, "none" needs no
    entry."""
    num_draft_tokens: int = 0
    """Draft tokens a round; 0 stands for the speculative mode's own."""
    overlap: bool = True
    """Plan for a round that is launched before the tokens of the last one are known."""
    decode_buckets: tuple[int, ...] = ()
    """Batch sizes with a decode program; empty stands for 1 and max_num_seqs."""
    prefill_buckets: tuple[tuple[int, int], ...] = ()
    """(tokens, requests) with a prefill program; empty stands for the plan's own choice."""
    greedy_only: bool = False
    """Leave out the programs that sample; every request must have temperature 0."""
    cached_boundaries: int = 0
    """Places at which the prefix cache can let sequences start, beyond those of running requests:
    each takes the pages of sliding groups before it. All together take at most an eighth of the
    memory."""
    logits_processing: bool = False
    """Have programs for penalties, biases, banned tokens and `min_tokens`."""
    stored_weights: bool = False
    """Weights stay in the checkpoint's formats; otherwise they are decoded to `dtype`."""
    max_logprobs: int = 0
    """Most alternatives whose log-probabilities a request may ask for; 0 leaves these programs
    out."""


GroupKind = Literal["sliding_window", "compressed", "compressor_state"]


@dataclass(frozen=True)
class GroupPlan:
    """One cache group: a block table and, per layer that uses it, a page pool."""

    name: str
    kind: GroupKind
    layers: tuple[int, ...]
    """Main-model layers with a pool in this group."""
    draft_layers: tuple[int, ...]
    """Draft layers with a pool in this group."""
    row_dim: int
    row_format: str
    """How a row is stored: `f32`, `bf16`, `fp8_ds` or `fp8` (docs/cache.md)."""
    rope_dim: int
    """Channels at the end of an `fp8_ds` row that are rotated, and so kept in bf16; else 0."""
    layer_page_bytes: int
    """Bytes of one page of one layer, its padding included."""
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
    """Trailing tokens, the newest included, whose rows a query may read; 0 keeps the whole
    sequence."""
    draft_ahead: int
    """Tokens behind those of a step whose rows the drafting of the same round writes, as guesses
    that later rounds write again."""
    table_width: int
    """Columns of the block table; a sliding group's is a ring over its pages."""
    pages_per_seq: int
    """Most pages that one sequence holds, a step in flight included."""
    num_pages: int
    """Pages of a pool, the null page included."""

    @property
    def row_dtype(self) -> str:
        """Dtype of a pool: that of its rows' channels, or `uint8` where rows are packed."""
        return {"f32": "float32", "bf16": "bfloat16"}.get(self.row_format, "uint8")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers of the group."""
        return self.draft_page_bytes + self.layer_page_bytes * len(self.layers)

    @property
    def draft_page_bytes(self) -> int:
        """The part of `page_bytes` that draft layers hold."""
        return self.layer_page_bytes * len(self.draft_layers)

    @property
    def pool_shape(self) -> tuple[int, int]:
        """Shape of a layer's pool: `[rows, row_dim]`, or `[pages, bytes]` where rows are packed."""
        if self.row_dtype == "uint8":
            return self.num_pages, self.layer_page_bytes
        return self.num_pages * self.page_rows, self.row_dim

    @property
    def max_entries(self) -> int:
        """Rows that a full-length sequence's table can address (history groups)."""
        return self.table_width * self.page_rows

    @property
    def carried_tokens(self) -> int:
        """Tokens before a place where all compression windows close whose rows tokens behind it
        read; 0 for history groups. Of the next closing window that is an overlapping half."""
        return max(self.span - self.closes_every, 0)

    def touched_pages(self, num_tokens: int) -> int:
        """Most pages that so many consecutive tokens lie in, at the worst alignment."""
        return (num_tokens + self.page_tokens - 2) // self.page_tokens + 1

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
    tokens_per_req: int = 0
    """Rows that every request owns, used or not; 0 packs requests of any length densely."""

    def widened(self, rows: int) -> Bucket:
        """Sizes for so many more rows of every request."""
        width = self.tokens_per_req and self.tokens_per_req + rows
        return Bucket(self.num_tokens + rows * self.num_reqs, self.num_reqs, width)


@dataclass(frozen=True)
class ModePlan:
    """One forward mode: its programs' sizes and what a step reads, writes and keeps."""

    mode: Mode
    layers: Literal["main", "draft", "none"]
    """Which layers a step of this mode runs."""
    tokens_per_request: int
    """Rows of a request; 0 when the requests of a step may differ."""
    buckets: tuple[Bucket, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    logits: Literal["last_token", "all", "none"]
    streams: Literal["last_token", "all", "none"]
    """Residual streams that a later stage of the same round takes over."""


@dataclass(frozen=True)
class LayerPlan:
    """A layer by the names of its spec entries; equal names share a compiled region."""

    index: int
    attention: str
    ffn: str


@dataclass(frozen=True)
class SpeculationPlan:
    """The speculative mode that the plan was made for."""

    name: str
    kind: Literal["none", "mtp", "dspark", "ngram"]
    num_draft_tokens: int
    """Drafts of a round; 0 for `none`."""
    layers: tuple[LayerPlan, ...] = ()
    """Draft layers that run, by their own index: no more than there are drafts to make."""
    ngram: tuple[int, int] = (0, 0)
    """Shortest and longest n-gram of `ngram`."""
    block_size: int = 0
    """Rows of the block that `dspark` drafts at once; 0 elsewhere."""
    noise_token_id: int = 0
    """What the rows of a block behind the newest token hold."""
    target_layers: tuple[int, ...] = ()
    """Main-model layers whose outputs the draft layers take over (`dspark`)."""
    position_offset: int = 0
    """Added to a draft row's position for rotation; its place in the cache stays."""
    stream_shape: tuple[int, int] = (0, 0)
    """Residual streams of a row, and channels of each, which draft layers hand on."""

    @property
    def tokens_ahead(self) -> int:
        """Tokens behind its own that a stored draft row depends on."""
        return 1 + self.num_chained if self.kind == "mtp" else 0

    @property
    def verify_width(self) -> int:
        """Tokens of a request that a round computes: the newest one and the drafts."""
        return self.num_draft_tokens + 1

    @property
    def num_chained(self) -> int:
        """Draft layers behind the first: each makes one draft from the streams of the layer before,
        and begins a round one row further back."""
        return max(len(self.layers) - 1, 0) if self.kind == "mtp" else 0

    @property
    def draft_ahead(self) -> int:
        """Rows behind those of a round that its drafting writes: one for every draft that the last
        layer makes from its own streams. A block keeps no rows."""
        drafting = self.layers and self.kind == "mtp"
        return max(self.num_draft_tokens - len(self.layers), 0) if drafting else 0


@dataclass(frozen=True)
class StagePlan:
    """One forward inside a round."""

    mode: Mode
    bucket: Bucket
    repeat: int = 1
    layer: int = 0
    """Draft layer that it runs; the main model's stages run all of theirs."""


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
    speculation: SpeculationPlan
    rope_dims: tuple[tuple[str, int], ...]
    """(rope entry, rotated channels) of every rope that a layer uses."""
    draft_rope_dims: tuple[tuple[str, int], ...]
    """The same of the draft layers."""
    groups: tuple[GroupPlan, ...]
    index_groups: tuple[str, ...]
    """Compressed groups that an indexer scores."""
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

    @property
    def decode_mode(self) -> Mode:
        """How requests whose prompt is computed go on."""
        return Mode.TARGET_VERIFY if self.speculation.num_draft_tokens else Mode.DECODE

    @property
    def unknown_tokens(self) -> int:
        """Tokens by which a request may be further than the host knows when it places a round."""
        return unknown_tokens(self.limits, self.speculation)

    def rounds(self) -> tuple[tuple[Mode, Bucket], ...]:
        """What the scheduler may dispatch: the first stage of every round, smallest first."""
        modes = (Mode.PREFILL, self.decode_mode, Mode.IDLE)
        return tuple((m.mode, b) for m in self.modes if m.mode in modes for b in m.buckets)

    def stages(self, mode: Mode, bucket: Bucket) -> tuple[StagePlan, ...]:
        """The forwards of the round that begins with `mode` at `bucket`, in order.

        Draft layers follow the main model over the same rows, so that their caches never lag.
        """
        first = StagePlan(mode, bucket)
        if mode is Mode.IDLE or not self.speculation.layers:
            return (first,)
        out = [first, StagePlan(Mode.DRAFT_EXTEND, bucket)]
        if width := self.speculation.block_size:
            block = Bucket(bucket.num_reqs * width, bucket.num_reqs, width)
            return (*out, StagePlan(Mode.DRAFT_DECODE, block))
        last = self.speculation.num_chained
        chained = range(1, last + 1)
        out += [StagePlan(Mode.DRAFT_CHAIN, bucket.widened(i), layer=i) for i in chained]
        if more := self.speculation.draft_ahead:
            drafting = Bucket(bucket.num_reqs, bucket.num_reqs, 1)
            out.append(StagePlan(Mode.DRAFT_DECODE, drafting, more, last))
        return tuple(out)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return asdict(self)


def unknown_tokens(limits: Limits, speculation: SpeculationPlan) -> int:
    """Accepted drafts of a round in flight, which the host has not read yet: at most this many."""
    return speculation.num_draft_tokens if limits.overlap else 0


def ring_tokens(group: GroupPlan, limits: Limits, speculation: SpeculationPlan) -> int:
    """Consecutive tokens whose rows a sliding group must be able to hold at once.

    From the oldest row that the next query reads (`kept_tokens - 1` before it) to the last row
    that a step can write: a chunk of a prompt, or the width of a verification, placed by a host
    that may not know yet how many of the last round's tokens were accepted; then the guesses of
    drafting. A rejected token can so never overwrite a row that is still read.
    """
    width = speculation.verify_width + unknown_tokens(limits, speculation)
    written = max(limits.max_num_batched_tokens, width) + group.draft_ahead
    return group.kept_tokens - 1 + written
