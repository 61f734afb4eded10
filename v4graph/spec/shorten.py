"""The first layers of a spec as a spec: the same model, but smaller."""

from __future__ import annotations

from v4graph.errors import SpecError
from v4graph.spec.model import CompressorStateGroup, LayerPattern, ModelSpec, MtpSpeculation


def first_layers(spec: ModelSpec, count: int) -> ModelSpec:
    """`spec` with its first `count` layers, its draft layers, and only what these use.

    Raises:
        SpecError: `count` is not between 1 and the number of layers.
    """
    kinds = spec.layer_kinds
    if not 1 <= count <= len(kinds):
        raise SpecError(f"{spec.name}: {count} layers; expected 1 to {len(kinds)}, all it has")
    kept = kinds[:count]
    drafts = [m for m in spec.speculative.values() if isinstance(m, MtpSpeculation)]
    attention = {a for a, _ in kept} | {m.attention for m in drafts}
    ffn = {f for _, f in kept} | {m.ffn for m in drafts}
    entries = {k: a for k, a in spec.attention.items() if k in attention}
    groups = {name for a in entries.values() for _, name in a.caches}
    return spec.model_copy(
        update={
            "name": f"{spec.name}-first{count}",
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
