"""Rules that relate the numbers of a spec: dimensions, ratios, formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from v4graph.spec.model import (
    Attention,
    CacheGroup,
    CompressedGroup,
    CompressorStateGroup,
    DenseFfn,
    Ffn,
    HeavyAttention,
    ModelSpec,
    Rope,
    SparseAttention,
)
from v4graph.spec.source import Path, shown

FP8_DS_GROUP = 64
"""Channels that share a scale in an `fp8_ds` row."""
FP4_GROUP = 32
"""Input channels that share a scale in an `fp4` matrix."""
Findings = Iterator[tuple[Path, str]]


def token_ids(spec: ModelSpec) -> Findings:
    """Token ids name rows of the embedding."""
    eos = spec.__dict__.get("eos_token_id")
    if eos == []:
        yield ("eos_token_id",), "an empty list (expected a token id, a list of them, or no key)"
    given = [(("bos_token_id",), spec.__dict__.get("bos_token_id"))]
    if isinstance(eos, list):
        given += [(("eos_token_id", i), token) for i, token in enumerate(eos)]
    else:
        given += [(("eos_token_id",), eos)]
    for path, token in given:
        if token is not None and token >= spec.vocab_size:
            yield path, f"not in the vocabulary (got {token}; expected below {spec.vocab_size})"


def rope_shapes(name: str, rope: Rope) -> list[Findings]:
    """Pairs of channels rotate; YaRN needs an ordered band of frequencies."""
    here: Path = ("rope", name)

    def even() -> Findings:
        if rope.dim % 2:
            yield (*here, "dim"), f"odd (got {rope.dim}; expected an even number of channels)"

    def theta() -> Findings:
        if rope.theta <= 1:
            yield (*here, "theta"), f"too small (got {rope.theta:g}; expected above 1)"

    def factor() -> Findings:
        if rope.yarn is not None and rope.yarn.factor < 1:
            message = f"shortens the context (got {rope.yarn.factor:g}; expected at least 1)"
            yield (*here, "yarn", "factor"), message

    def band() -> Findings:
        yarn = rope.yarn
        if yarn is not None and yarn.beta_fast <= yarn.beta_slow:
            message = (
                f"not above beta_slow (got {yarn.beta_fast:g} and {yarn.beta_slow:g}; expected "
                "beta_fast > beta_slow)"
            )
            yield (*here, "yarn", "beta_fast"), message

    return [even(), theta(), factor(), band()]


def group_shapes(name: str, group: CacheGroup, spec: ModelSpec) -> list[Findings]:
    """What the readers of a group ask of its rows and pages."""
    here: Path = ("cache_groups", name)

    def pages() -> Findings:
        if isinstance(group, CompressedGroup) and group.page_tokens % group.ratio:
            message = (
                f"not a multiple of the ratio (got {group.page_tokens}; expected a multiple of "
                f"{group.ratio}, so that a page holds whole rows)"
            )
            yield (*here, "page_tokens"), message

    def dims() -> Findings:
        if isinstance(group, CompressorStateGroup):
            return
        wanted: dict[tuple[int, str], list[str]] = {}
        for reader, entry, role in _readers(spec, name):
            if role == "index" and isinstance(entry, SparseAttention):
                key = (_get(lambda e=entry: e.indexer.dim), "indexer.dim")
            else:
                key = (_get(lambda e=entry: e.head_dim), "head_dim")
            if key[0] is not None:
                wanted.setdefault((key[0], key[1]), []).append(reader)
        for (dim, field), readers in wanted.items():
            if dim != group.row.dim:
                why = f"the {field} of attention {', '.join(readers)}"
                message = f"not the width of its readers (got {group.row.dim}; expected {dim}, "
                yield (*here, "row", "dim"), f"{message}{why})"

    def overlap() -> Findings:
        if not isinstance(group, CompressedGroup):
            return
        for reader, entry, role in _readers(spec, name):
            wanted = isinstance(entry, SparseAttention)
            if not wanted and not isinstance(entry, HeavyAttention):
                continue
            if role in ("compressed", "index") and group.overlap != wanted:
                message = (
                    f"wrong for its reader (got {shown(group.overlap)}; expected {shown(wanted)} "
                    f"for attention {reader} of kind {entry.kind})"
                )
                yield (*here, "overlap"), message
                return

    def fp8_ds() -> Findings:
        if isinstance(group, CompressorStateGroup) or group.row.format != "fp8_ds":
            return
        path: Path = (*here, "row", "format")
        readers = list(_readers(spec, name))
        if any(role == "index" for _, _, role in readers):
            yield (
                path,
                "not a format of index rows (got 'fp8_ds'; expected fp8, f32, bf16 or model)",
            )
            return
        ropes = [spec.rope.get(entry.__dict__.get("rope", "")) for _, entry, _ in readers]
        rotated = {rope.dim for rope in ropes if rope is not None}
        if len(rotated) > 1:
            found = " and ".join(map(str, sorted(rotated)))
            message = f"its readers rotate {found} channels (expected one number for fp8_ds rows)"
            yield path, message
        for dim in rotated:
            rest = group.row.dim - dim
            if rest <= 0 or rest % FP8_DS_GROUP:
                message = (
                    f"does not fit the row (got {group.row.dim} channels, {dim} of them rotated; "
                    f"expected a positive multiple of {FP8_DS_GROUP} that are not rotated)"
                )
                yield path, message

    return [pages(), dims(), overlap(), fp8_ds()]


def attention_shapes(name: str, entry: Attention, spec: ModelSpec) -> list[Findings]:
    """The dimensions of one attention entry and of what it names."""
    here: Path = ("attention", name)

    def groups() -> Findings:
        width = entry.heads * entry.head_dim
        if width % entry.o_groups:
            message = (
                f"does not divide heads * head_dim (got {entry.o_groups}; expected a divisor of "
                f"{width})"
            )
            yield (*here, "o_groups"), message

    def rotated() -> Findings:
        rope = spec.rope.get(entry.rope)
        if rope is not None and rope.dim > entry.head_dim:
            message = (
                f"rotates more channels than a head has (got {shown(entry.rope)} of dim "
                f"{rope.dim}; expected at most head_dim {entry.head_dim})"
            )
            yield (*here, "rope"), message

    def rotated_index() -> Findings:
        if not isinstance(entry, SparseAttention):
            return
        rope = spec.rope.get(entry.rope)
        if rope is not None and rope.dim > entry.indexer.dim:
            message = (
                f"too small (got {entry.indexer.dim}; expected at least {rope.dim}, the dim of "
                f"rope {shown(entry.rope)})"
            )
            yield (*here, "indexer", "dim"), message

    def index_ratio() -> Findings:
        if not isinstance(entry, SparseAttention):
            return
        index = spec.cache_groups.get(entry.caches.index)
        rows = spec.cache_groups.get(entry.caches.compressed)
        if not isinstance(index, CompressedGroup) or not isinstance(rows, CompressedGroup):
            return
        if index.ratio != rows.ratio:
            message = (
                f"an index key stands for one compressed row (got {index.ratio}; expected "
                f"{rows.ratio}, the ratio of {shown(entry.caches.compressed)})"
            )
            yield ("cache_groups", entry.caches.index, "ratio"), message

    return [groups(), rotated(), rotated_index(), index_ratio()]


def ffn_shapes(name: str, ffn: Ffn) -> list[Findings]:
    """A token cannot choose more experts than there are."""

    def topk() -> Findings:
        if not isinstance(ffn, DenseFfn) and ffn.topk > ffn.experts:
            message = (
                f"more than there are experts (got {ffn.topk}; expected at most {ffn.experts})"
            )
            yield ("ffn", name, "topk"), message

    return [topk()]


def weight_shapes(spec: ModelSpec) -> Findings:
    """`fp4` shares a scale between 32 values along the input of a matrix."""
    if spec.weights.experts != "fp4":
        return
    widths: list[tuple[Path, int]] = []
    if "hidden_size" in spec.__dict__:
        widths.append((("hidden_size",), spec.hidden_size))
    for name, ffn in spec.ffn.items():
        if not isinstance(ffn, DenseFfn) and "intermediate" in ffn.__dict__:
            widths.append((("ffn", name, "intermediate"), ffn.intermediate))
    for path, width in widths:
        if width % FP4_GROUP:
            message = f"does not fit fp4 experts (got {width}; expected a multiple of {FP4_GROUP})"
            yield path, message


def _readers(spec: ModelSpec, group: str) -> Iterator[tuple[str, Attention, str]]:
    """(attention name, entry, role) of every use of `group`."""
    for name, entry in spec.attention.items():
        caches = entry.__dict__.get("caches")
        for role, used in caches or ():
            if used == group:
                yield name, entry, role


def _get(read: Callable[[], int]) -> int | None:
    """A number of an entry, None where it did not parse."""
    try:
        return read()
    except AttributeError:
        return None
