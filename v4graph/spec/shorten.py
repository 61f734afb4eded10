"""The first layers of a spec as a spec: the same model, but smaller."""

from __future__ import annotations

from v4graph.errors import SpecError
from v4graph.spec.model import (
    CompressorStateGroup,
    DsparkSpeculation,
    LayerPattern,
    ModelSpec,
    Speculation,
    StoredDrafter,
)
from v4graph.words import counted


def first_layers(spec: ModelSpec, count: int) -> ModelSpec:
    """`spec` with its first `count` layers, its draft layers, and only what these use.

    DSpark's target layers move down by what is left out, so that the last ones stay the last.

    Raises:
        SpecError: `count` is not between 1 and the number of layers.
    """
    kinds = spec.layer_kinds
    if not 1 <= count <= len(kinds):
        raise SpecError(
            f"{spec.name}: {counted(count, 'layer')}; expected 1 to {len(kinds)}, all it has"
        )
    kept = kinds[:count]
    drafts = [m for m in spec.speculative.values() if isinstance(m, StoredDrafter)]
    attention = {a for a, _ in kept} | {m.attention for m in drafts}
    ffn = {f for _, f in kept} | {m.ffn for m in drafts}
    entries = {k: a for k, a in spec.attention.items() if k in attention}
    groups = {name for a in entries.values() for _, name in a.caches}
    return spec.model_copy(
        update={
            "name": f"{spec.name}-first{count}",
            "speculative": {k: _shortened(m, count, spec) for k, m in spec.speculative.items()},
            "layers": [LayerPattern(attention=a, ffn=f) for a, f in kept],
            "attention": entries,
            "ffn": {k: f for k, f in spec.ffn.items() if k in ffn},
            "rope": {k: r for k, r in spec.rope.items() if k in {a.rope for a in entries.values()}},
            "cache_groups": {
                k: g
                for k, g in spec.cache_groups.items()
                if k in groups or (isinstance(g, CompressorStateGroup) and g.of in groups)
            },
        }
    )


def _shortened(mode: Speculation, count: int, spec: ModelSpec) -> Speculation:
    if not isinstance(mode, DsparkSpeculation):
        return mode
    first, last = mode.target_layer_ids[0], mode.target_layer_ids[-1]
    down = max(last - (count - 1), 0)
    if down > first:
        raise SpecError(
            f"{spec.name}: {counted(count, 'layer')}; expected at least {last - first + 1} for "
            f"target_layer_ids {mode.target_layer_ids}"
        )
    return mode.model_copy(update={"target_layer_ids": [i - down for i in mode.target_layer_ids]})
