"""Rules that span several fields of a spec: names that resolve, and names that are used.

Every rule is a small generator over models that may lack the fields that did not parse. A rule
that needs such a field stops there; the others go on, so that one fault hides no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from v4graph.spec.check_drafts import draft_rules, one_draft_layout
from v4graph.spec.check_shapes import (
    attention_shapes,
    ffn_shapes,
    group_shapes,
    rope_shapes,
    token_ids,
    weight_shapes,
)
from v4graph.spec.model import (
    Attention,
    CompressedGroup,
    CompressorStateGroup,
    LayerPattern,
    ModelSpec,
    NoSpeculation,
    SlidingWindowGroup,
    Speculation,
    StoredDrafter,
)
from v4graph.spec.source import Path, closest, did_you_mean, shown
from v4graph.words import counted

MAX_LAYERS = 1000
BLOCKS = ("rope", "cache_groups", "attention", "ffn")
Finding = tuple[Path, str]
Findings = Iterator[Finding]

_ENTRY_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_NOUNS = {
    "rope": "rope entry",
    "cache_groups": "cache group",
    "attention": "attention entry",
    "ffn": "ffn entry",
}
_ROLE_KINDS = {
    "window": (SlidingWindowGroup, "sliding_window"),
    "compressed": (CompressedGroup, "compressed"),
    "index": (CompressedGroup, "compressed"),
    "state": (CompressorStateGroup, "compressor_state"),
    "index_state": (CompressorStateGroup, "compressor_state"),
}
_FEEDS = {"state": "compressed", "index_state": "index"}
# Fields that name nothing: a fault in one of them cannot make an entry look unused.
_NAMELESS = {
    "layers": {"count"},
    "speculative": {
        *("num_draft_tokens", "num_layers", "mask_position_zero", "position_offset"),
        *("min_ngram", "max_ngram"),
        *("block_size", "target_layer_ids", "noise_token_id", "markov_rank"),
    },
    "attention": {"heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank", "indexer"},
}


@dataclass(frozen=True)
class Names:
    """The names that a spec defines, block by block, also of entries that did not parse."""

    by_block: Mapping[str, Sequence[str]]
    """A block that is absent or no mapping is left out, and references to it are not judged."""
    faulty: Sequence[Path] = ()
    """Paths of the faults found so far."""

    def obscured(self, *blocks: str) -> bool:
        """Whether a fault may hide a reference that `blocks` make."""
        return any(
            path[0] in blocks and not (len(path) > 2 and path[2] in _NAMELESS[str(path[0])])
            for path in self.faulty
            if path
        )


def check(spec: ModelSpec, names: Names) -> list[Finding]:
    """Every broken rule of `spec`, as the path of the fault and a message.

    Args:
        spec: a whole model, or one that lacks the fields at `names.faulty`.
        names: what references may name.
    """
    rules: list[Findings] = [_entry_names(names), token_ids(spec), _total_layers(spec)]
    rules += [_layer(i, p, names) for i, p in enumerate(_of(spec, "layers", []))]
    rules += [weight_shapes(spec)]
    for name, rope in _of(spec, "rope", {}).items():
        rules += rope_shapes(name, rope)
    for name, group in _of(spec, "cache_groups", {}).items():
        rules += [_state(name, group, spec, names), *group_shapes(name, group, spec)]
    for name, entry in _of(spec, "attention", {}).items():
        rules += [_attention(name, entry, names), _caches(name, entry, spec, names)]
        rules += [_feeds(name, entry, spec), *attention_shapes(name, entry, spec)]
    for name, ffn in _of(spec, "ffn", {}).items():
        rules += ffn_shapes(name, ffn)
    for name, mode in _of(spec, "speculative", {}).items():
        rules += [_mode(name, mode, names), *draft_rules(name, mode, spec)]
    rules += [one_draft_layout(spec), _unused_entries(spec, names), _unused_parts(spec, names)]
    return [finding for rule in rules for finding in _sheltered(rule, bool(names.faulty))]


def _of(spec: ModelSpec, block: str, empty: Any) -> Any:
    """A block of a model that may lack it."""
    return spec.__dict__.get(block, empty)


def _sheltered(rule: Findings, partial: bool) -> Findings:
    """What a rule finds before it meets a field that did not parse."""
    try:
        yield from rule
    except AttributeError:
        if not partial:
            raise


def _reference(path: Path, block: str, name: Any, names: Names) -> Findings:
    known = names.by_block.get(block)
    if known is None or not isinstance(name, str) or name in known:
        return
    expected = f"expected one of {', '.join(known)}" if known else f"`{block}` is empty"
    hint = did_you_mean(name, known)
    yield path, f"no such {_NOUNS[block]} (got {shown(name)}; {expected}){hint}"


def _entry_names(names: Names) -> Findings:
    for block in BLOCKS:
        for name in names.by_block.get(block, ()):
            if not _ENTRY_NAME.fullmatch(name):
                expected = "a letter, then letters, digits, '_' and '-'"
                yield (block, name), f"not a valid name (got {shown(name)}; expected {expected})"


def _as_list(names: Any) -> list[Any]:
    return names if isinstance(names, list) else [names]


def _layer(index: int, pattern: LayerPattern, names: Names) -> Findings:
    here: Path = ("layers", index)
    for block in ("attention", "ffn"):
        given = pattern.__dict__.get(block)
        if given == []:
            yield (*here, block), "an empty list (expected a name or a non-empty list of names)"
        for i, name in enumerate(_as_list(given)):
            path = (*here, block, i) if isinstance(given, list) else (*here, block)
            yield from _reference(path, block, name, names)
    attention, ffn = pattern.attention, pattern.ffn
    if isinstance(attention, list) and isinstance(ffn, list) and len(attention) != len(ffn):
        message = (
            f"lists of different lengths (got {counted(len(attention), 'attention name')} and "
            f"{counted(len(ffn), 'ffn name')}; "
            "expected equal lengths, or one name for all)"
        )
        yield (*here, "ffn"), message


def _total_layers(spec: ModelSpec) -> Findings:
    total = sum(
        max(len(_as_list(p.attention)), len(_as_list(p.ffn))) * p.count for p in spec.layers
    )
    if total > MAX_LAYERS:
        yield ("layers",), f"too many layers (got {total}; expected at most {MAX_LAYERS})"


def _attention(name: str, entry: Attention, names: Names) -> Findings:
    yield from _reference(("attention", name, "rope"), "rope", entry.rope, names)


def _caches(name: str, entry: Attention, spec: ModelSpec, names: Names) -> Findings:
    role_of: dict[str, str] = {}
    for role, group_name in entry.caches:
        path: Path = ("attention", name, "caches", role)
        yield from _reference(path, "cache_groups", group_name, names)
        wanted, kind = _ROLE_KINDS[role]
        group = spec.cache_groups.get(group_name)
        if group is not None and not isinstance(group, wanted):
            found = f"{shown(group_name)}, of kind {group.kind}"
            yield path, f"a group of the wrong kind (got {found}; expected kind {kind})"
        elif group_name in role_of and group is not None:
            other = role_of[group_name]
            yield path, f"the same group as caches.{other} (got {shown(group_name)})"
        role_of.setdefault(group_name, role)


def _feeds(name: str, entry: Attention, spec: ModelSpec) -> Findings:
    """A state group keeps the open windows of one compressed group: the entry's own."""
    for role, target in _FEEDS.items():
        state_name = entry.caches.__dict__.get(role)
        fed = entry.caches.__dict__.get(target)
        state = spec.cache_groups.get(state_name or "")
        if not isinstance(state, CompressorStateGroup) or not fed or state.of == fed:
            continue
        if isinstance(spec.cache_groups.get(state.of), CompressedGroup):  # else `of` is at fault
            path: Path = ("attention", name, "caches", role)
            got = f"{shown(state_name)}, which is of {shown(state.of)}"
            expected = f"a state group of {shown(fed)}, the entry's caches.{target}"
            yield path, f"the state of another group (got {got}; expected {expected})"


def _state(name: str, group: Any, spec: ModelSpec, names: Names) -> Findings:
    if not isinstance(group, CompressorStateGroup):
        return
    path: Path = ("cache_groups", name, "of")
    yield from _reference(path, "cache_groups", group.of, names)
    fed = spec.cache_groups.get(group.of)
    if fed is not None and not isinstance(fed, CompressedGroup):
        found = f"{shown(group.of)}, of kind {fed.kind}"
        yield path, f"a group of the wrong kind (got {found}; expected kind compressed)"


def _mode(name: str, mode: Speculation, names: Names) -> Findings:
    if name == "none" and not isinstance(mode, NoSpeculation):
        yield ("speculative", name), "the mode called `none` must be of kind none"
    if isinstance(mode, StoredDrafter):
        for block in ("attention", "ffn"):
            path: Path = ("speculative", name, block)
            yield from _reference(path, block, mode.__dict__.get(block), names)


def _unused(block: str, used: Iterable[str], names: Names, by: str) -> Findings:
    known = names.by_block.get(block, ())
    seen = {name for name in used if isinstance(name, str)}
    # A misspelt reference is reported itself; what it meant is not unused.
    seen |= {closest(name, known) or name for name in seen if name not in known}
    for name in known:
        if name not in seen:
            yield (block, name), f"unused: no {by} names it; use it or remove it"


def _unused_entries(spec: ModelSpec, names: Names) -> Findings:
    if names.obscured("layers", "speculative"):
        return
    drafts = [m for m in spec.speculative.values() if isinstance(m, StoredDrafter)]
    for block in ("attention", "ffn"):
        used = [n for p in spec.layers for n in _as_list(getattr(p, block))]
        used += [getattr(m, block) for m in drafts]
        yield from _unused(block, used, names, "layer or draft mode")


def _unused_parts(spec: ModelSpec, names: Names) -> Findings:
    """An attention entry that names a group both reads and writes it, so one use is enough."""
    if names.obscured("attention"):
        return
    entries = spec.attention.values()
    yield from _unused("rope", [a.rope for a in entries], names, "attention entry")
    groups = [group for a in entries for _, group in a.caches]
    yield from _unused("cache_groups", groups, names, "attention entry")
