"""Rules of speculative modes: what may draft, and what one set of stored draft layers can be."""

from __future__ import annotations

from collections.abc import Iterator

from v4graph.spec.model import (
    DenseFfn,
    DsparkSpeculation,
    ModelSpec,
    NgramSpeculation,
    ScoredMoe,
    SlidingAttention,
    Speculation,
    StoredDrafter,
)
from v4graph.spec.source import Path, shown

Findings = Iterator[tuple[Path, str]]
_LAYOUT = ("kind", "attention", "ffn", "num_layers", "target_layer_ids", "markov_rank")
"""What the stored tensors fix: modes that share them cannot differ in it."""


def draft_rules(name: str, mode: Speculation, spec: ModelSpec) -> list[Findings]:
    """The rules of one mode; fields that did not parse stop a rule, not the others."""
    rules = [_layers(name, mode, spec)]
    if isinstance(mode, NgramSpeculation):
        rules.append(_ngram(name, mode))
    if isinstance(mode, DsparkSpeculation):
        rules += [_block(name, mode), _noise(name, mode, spec), _targets(name, mode, spec)]
    return rules


def _ngram(name: str, mode: NgramSpeculation) -> Findings:
    if mode.min_ngram > mode.max_ngram:
        message = f"longer than max_ngram (got {mode.min_ngram}; expected 1..{mode.max_ngram})"
        yield ("speculative", name, "min_ngram"), message


def _layers(name: str, mode: Speculation, spec: ModelSpec) -> Findings:
    if not isinstance(mode, StoredDrafter):
        return
    attention = spec.attention.get(mode.__dict__.get("attention", ""))
    if attention is not None and not isinstance(attention, SlidingAttention):
        got = f"{shown(mode.attention)}, of kind {attention.kind}"
        message = f"not a draft attention (got {got}; expected kind sliding_attention)"
        yield ("speculative", name, "attention"), message
    ffn = spec.ffn.get(mode.__dict__.get("ffn", ""))
    if ffn is not None and not isinstance(ffn, ScoredMoe | DenseFfn):
        got = f"{shown(mode.ffn)}, of kind {ffn.kind}"
        yield (
            ("speculative", name, "ffn"),
            f"not a draft ffn (got {got}; expected kind moe or dense)",
        )


def _block(name: str, mode: DsparkSpeculation) -> Findings:
    if mode.num_draft_tokens > mode.block_size:
        message = (
            f"more than a block drafts (got {mode.num_draft_tokens}; expected at most block_size "
            f"{mode.block_size})"
        )
        yield ("speculative", name, "num_draft_tokens"), message


def _noise(name: str, mode: DsparkSpeculation, spec: ModelSpec) -> Findings:
    if mode.noise_token_id >= spec.vocab_size:
        message = (
            f"not in the vocabulary (got {mode.noise_token_id}; expected below {spec.vocab_size})"
        )
        yield ("speculative", name, "noise_token_id"), message


def _targets(name: str, mode: DsparkSpeculation, spec: ModelSpec) -> Findings:
    here: Path = ("speculative", name, "target_layer_ids")
    ids, count = mode.target_layer_ids, len(spec.layer_kinds)
    if ids != sorted(set(ids)):
        yield here, f"not ascending (got {ids}; expected each layer once, in order)"
    for i, layer in enumerate(ids):
        if layer >= count:
            yield (*here, i), f"no such layer (got {layer}; expected 0..{count - 1})"


def one_draft_layout(spec: ModelSpec) -> Findings:
    """Modes share the checkpoint's draft layers, so they must describe them alike."""
    first: tuple[str, StoredDrafter] | None = None
    for name, mode in spec.speculative.items():
        if not isinstance(mode, StoredDrafter):
            continue
        if first is None:
            first = name, mode
        for key in _LAYOUT:
            mine, theirs = getattr(mode, key, None), getattr(first[1], key, None)
            if mine != theirs:
                expected = f"{shown(theirs)}, as in mode {shown(first[0])}: one set of draft layers"
                message = f"another draft layer (got {shown(mine)}; expected {expected})"
                yield ("speculative", name, key), message
                if key == "kind":
                    break
