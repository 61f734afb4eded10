"""The cache account: bytes of every row and page, how many layers hold them and for how long.

This is arithmetic on the spec alone; pools, block tables and budgets follow in `lower.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

from v4graph.errors import PlanError
from v4graph.spec.model import (
    Attention,
    CacheGroup,
    CompressedGroup,
    CompressorStateGroup,
    ModelSpec,
    MtpSpeculation,
    RowFormat,
    SlidingWindowGroup,
    SparseAttention,
)

FP8_DS_GROUP = 64
"""Channels that share one e8m0 scale byte of an `fp8_ds` row."""
FP8_DS_SCALE_ALIGN = 8
"""The scale bytes of a row are padded to a multiple of this."""
FP8_DS_PAGE_ALIGN = 576
"""Pages of `fp8_ds` rows are padded to a multiple of the 576 data bytes of a 512-channel row, so
that a pool is addressable in whole rows (FlashMLA's paged layout, as vLLM and SGLang use it)."""
FP8_SCALE_BYTES = 4
"""One f32 scale a row."""
ROW_FORMATS: tuple[str, ...] = get_args(RowFormat)


@dataclass(frozen=True)
class CacheGroupAccount:
    """Bytes of one cache group for one sequence; `row_bytes` and `page_bytes` are of one layer."""

    name: str
    kind: Literal["sliding_window", "compressed", "compressor_state"]
    row_format: str
    """Format after the override; `model` stays `model`."""
    row_dim: int
    row_bytes: int
    page_tokens: int
    page_rows: int
    page_bytes: int
    """Page with its alignment, which may exceed `page_rows * row_bytes`."""
    ratio: int
    """Tokens that a row stands for; 1 for window and state rows."""
    main_layers: int
    draft_layers: int
    """Draft layers that hold rows; 0 in an account without speculation."""
    kept_tokens: int
    """Trailing tokens whose rows must stay; 0 keeps the whole sequence."""

    @property
    def num_layers(self) -> int:
        """Layers with a pool in this group, draft layers included."""
        return self.main_layers + self.draft_layers

    @property
    def bytes_per_token(self) -> float:
        """Growth with the sequence over all layers, padding left out; 0 for a sliding group."""
        return 0.0 if self.kept_tokens else self.row_bytes * self.num_layers / self.ratio

    def rows(self, tokens: int) -> int:
        """Rows of one layer that a sequence of `tokens` needs; an open window has no row yet."""
        return min(tokens, self.kept_tokens) if self.kept_tokens else tokens // self.ratio

    def pages(self, tokens: int) -> int:
        """Most pages of one layer that a resting sequence of `tokens` holds.

        A kept range may begin on the last token of a page, hence the page more.
        """
        covering = ceil(tokens / self.page_tokens)
        if not self.kept_tokens:
            return covering
        return min(covering, ceil((self.kept_tokens - 1) / self.page_tokens) + 1)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of the rows of a sequence of `tokens`, over all layers of the group."""
        return self.rows(tokens) * self.row_bytes * self.num_layers

    def sequence_page_bytes(self, tokens: int) -> int:
        """Bytes of the pages that hold those rows, over all layers of the group."""
        return self.pages(tokens) * self.page_bytes * self.num_layers


@dataclass(frozen=True)
class CacheAccount:
    """All cache groups of a model for one sequence of `tokens`."""

    spec_name: str
    tokens: int
    num_draft_tokens: int
    dtype_bytes: int
    """Bytes of an element of a `model` row."""
    groups: tuple[CacheGroupAccount, ...]

    def group(self, name: str) -> CacheGroupAccount:
        """The group called `name`; KeyError if there is none."""
        for g in self.groups:
            if g.name == name:
                return g
        raise KeyError(name)

    @property
    def history(self) -> tuple[CacheGroupAccount, ...]:
        """Groups that grow with the sequence: compressed key-value and index rows."""
        return tuple(g for g in self.groups if not g.kept_tokens)

    @property
    def sliding(self) -> tuple[CacheGroupAccount, ...]:
        """Groups of a constant size: window rows and compressor states."""
        return tuple(g for g in self.groups if g.kept_tokens)

    @property
    def bytes_per_token(self) -> float:
        """Growth of a sequence by one token, in bytes, page padding left out."""
        return sum(g.bytes_per_token for g in self.history)

    @property
    def history_bytes(self) -> int:
        """Bytes of the history rows of the sequence."""
        return sum(g.sequence_bytes(self.tokens) for g in self.history)

    @property
    def kv_bytes(self) -> int:
        """Bytes of window, compressed and index rows; states and page padding left out.

        This is what public figures count, such as 9.62 GiB for Pro in bf16 at 1,048,576 tokens
        (vLLM blog, 2026-04-24).
        """
        window = (g for g in self.sliding if g.kind == "sliding_window")
        return self.history_bytes + sum(g.sequence_bytes(self.tokens) for g in window)

    @property
    def history_page_bytes(self) -> int:
        """Bytes of the pages that hold the history rows."""
        return sum(g.sequence_page_bytes(self.tokens) for g in self.history)

    @property
    def constant_bytes(self) -> int:
        """Bytes of the rows of sliding groups once the sequence is longer than their range."""
        return sum(g.sequence_bytes(g.kept_tokens) for g in self.sliding)

    @property
    def constant_page_bytes(self) -> int:
        """Bytes of the pages of sliding groups for such a sequence."""
        return sum(g.sequence_page_bytes(g.kept_tokens + g.page_tokens) for g in self.sliding)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of all rows of the sequence."""
        return sum(g.sequence_bytes(self.tokens) for g in self.groups)

    @property
    def sequence_page_bytes(self) -> int:
        """Bytes of all pages of the sequence."""
        return sum(g.sequence_page_bytes(self.tokens) for g in self.groups)


def cache_account(
    spec: ModelSpec,
    tokens: int,
    row_format_override: str | None = None,
    num_draft_tokens: int = 0,
    dtype_bytes: int = 2,
) -> CacheAccount:
    """Account for one sequence of `tokens`.

    Args:
        row_format_override: format of all window, key-value and index rows instead of the spec's.
            With `fp8_ds` index rows become `fp8`, for they are quantised whole.
        num_draft_tokens: k; sliding groups keep the rows that a rejection of k drafts lays open.
        dtype_bytes: 2 or 4, element size of `model` rows.

    Raises:
        PlanError: an argument out of range, or a format that does not fit a group.
    """
    if tokens < 0:
        raise PlanError(f"tokens {tokens}: expected 0 or more")
    if num_draft_tokens < 0:
        raise PlanError(f"num_draft_tokens {num_draft_tokens}: expected 0 or more")
    if dtype_bytes not in (2, 4):
        raise PlanError(f"dtype_bytes {dtype_bytes}: expected 2 (bfloat16) or 4 (float32)")
    if row_format_override is not None and row_format_override not in ROW_FORMATS:
        raise PlanError(
            f"row format {row_format_override!r}: expected one of {', '.join(ROW_FORMATS)}"
        )
    groups = tuple(
        _group_account(spec, name, group, row_format_override, num_draft_tokens + 1, dtype_bytes)
        for name, group in spec.cache_groups.items()
    )
    return CacheAccount(spec.name, tokens, num_draft_tokens, dtype_bytes, groups)


def row_bytes(row_format: str, dim: int, rope_dim: int = 0, dtype_bytes: int = 2) -> int:
    """Bytes of a row of `dim` channels, of which `fp8_ds` keeps `rope_dim` in bf16."""
    if row_format == "model":
        return dim * dtype_bytes
    if row_format == "f32":
        return dim * 4
    if row_format == "bf16":
        return dim * 2
    if row_format == "fp8":
        return dim + FP8_SCALE_BYTES
    if row_format == "fp8_ds":
        if not 0 <= rope_dim < dim:
            raise PlanError(f"fp8_ds row of {dim} channels: {rope_dim} rotated ones do not fit")
        quantised = dim - rope_dim
        scales = ceil(quantised / FP8_DS_GROUP)
        return quantised + 2 * rope_dim + _aligned(scales, FP8_DS_SCALE_ALIGN)
    raise PlanError(f"row format {row_format!r}: expected one of {', '.join(ROW_FORMATS)}")


def page_bytes(
    row_format: str, page_rows: int, dim: int, rope_dim: int = 0, dtype_bytes: int = 2
) -> int:
    """Bytes of a page of such rows (see `row_bytes`), padded as its format wants."""
    size = page_rows * row_bytes(row_format, dim, rope_dim, dtype_bytes)
    return _aligned(size, FP8_DS_PAGE_ALIGN) if row_format == "fp8_ds" else size


def _group_account(
    spec: ModelSpec,
    name: str,
    group: CacheGroup,
    override: str | None,
    verify_width: int,
    dtype_bytes: int,
) -> CacheGroupAccount:
    # A range of n rows plus the verify width less one survives any rejection: see docs/cache.md.
    ratio, kept, rope_dim = 1, 0, 0
    if isinstance(group, CompressorStateGroup):
        fed = _fed_group(spec, name, group)
        halves = 2 if fed.overlap else 1
        kept = fed.ratio * halves + verify_width - 1
        # A (kv, score) pair, in both the Ca and the Cb half when windows overlap.
        dim, row_format = 2 * fed.row.dim * halves, "f32"
        size = row_bytes(row_format, dim)
    else:
        if isinstance(group, SlidingWindowGroup):
            kept = group.window + verify_width - 1 + _rows_back(spec, name, verify_width)
        else:
            ratio = group.ratio
        dim = group.row.dim
        row_format = override or group.row.format
        if override == "fp8_ds" and is_index(spec, name):
            row_format = "fp8"
        rope_dim = rotated_channels(spec, name) if row_format == "fp8_ds" else 0
        size = row_bytes(row_format, dim, rope_dim, dtype_bytes)
    page_rows, rest = divmod(group.page_tokens, ratio)
    if rest:
        raise PlanError(
            f"cache group {name!r}: page_tokens {group.page_tokens} is not a multiple of the "
            f"ratio {ratio}; a page must hold whole rows"
        )
    page_size = page_bytes(row_format, page_rows, dim, rope_dim, dtype_bytes)
    main = [attention for attention, _ in spec.layer_kinds]
    draft = _draft_attentions(spec) if verify_width > 1 else []
    return CacheGroupAccount(
        name=name,
        kind=group.kind,
        row_format=row_format,
        row_dim=dim,
        row_bytes=size,
        page_tokens=group.page_tokens,
        page_rows=page_rows,
        page_bytes=page_size,
        ratio=ratio,
        main_layers=sum(name in _groups_of(spec.attention[a]) for a in main),
        draft_layers=sum(name in _groups_of(spec.attention[a]) for a in draft),
        kept_tokens=kept,
    )


def _fed_group(spec: ModelSpec, name: str, state: CompressorStateGroup) -> CompressedGroup:
    fed = spec.cache_groups.get(state.of)
    if not isinstance(fed, CompressedGroup):
        raise PlanError(f"cache group {name!r}: of {state.of!r} is not a compressed group")
    return fed


def _groups_of(attention: Attention) -> tuple[str, ...]:
    return tuple(dict(attention.caches).values())


def _draft_attentions(spec: ModelSpec) -> list[str]:
    for mode in spec.speculative.values():
        if isinstance(mode, MtpSpeculation):  # modes share the checkpoint's draft layers
            return [mode.attention] * mode.num_layers
    return []


def _rows_back(spec: ModelSpec, name: str, verify_width: int) -> int:
    """Rows by which the last of a chain of draft layers begins before the main model."""
    used = [name in _groups_of(spec.attention[a]) for a in _draft_attentions(spec)]
    return max(sum(used[: verify_width - 1]) - 1, 0)


def _readers(spec: ModelSpec, name: str) -> Iterator[Attention]:
    return (a for a in spec.attention.values() if name in _groups_of(a))


def is_index(spec: ModelSpec, name: str) -> bool:
    """Whether an indexer scores the rows of group `name`."""
    return any(
        isinstance(a, SparseAttention) and a.caches.index == name for a in _readers(spec, name)
    )


def rotated_channels(spec: ModelSpec, name: str) -> int:
    """Channels that the attention entries of group `name` rotate.

    Raises:
        PlanError: they differ, or there is no such entry.
    """
    dims = {spec.rope[a.rope].dim for a in _readers(spec, name)}
    if len(dims) != 1:
        raise PlanError(
            f"cache group {name!r}: fp8_ds rows keep the rotated channels in bf16, so the "
            f"attention entries that use it must rotate one number of channels; found "
            f"{sorted(dims) or 'no such entry'}"
        )
    return dims.pop()


def _aligned(size: int, multiple: int) -> int:
    return ceil(size / multiple) * multiple
