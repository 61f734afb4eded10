"""The layer list of a config.json: which attention and which feed-forward each layer has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from v4graph.spec.hf_fields import Fields
from v4graph.words import counted

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
_ATTENTION = {"sliding_attention": "swa", CSA: "csa", HCA: "hca"}
_FFN = {"hash_moe": "hash", "moe": "routed"}
HASH_LAYERS = 3
"""What transformers takes for an absent `num_hash_layers`."""
_WINDOW_ONLY = (0, 1)
"""Both ratios mean a layer without compressed rows: the official files write 0, some engines 1."""


@dataclass(frozen=True)
class LayerList:
    """Attention and feed-forward names of the main layers."""

    attention: tuple[str, ...]
    ffn: tuple[str, ...]
    csa_ratio: int
    hca_ratio: int
    draft_ratios: tuple[int, ...]
    """Entries of `compress_ratios` past the main layers."""
    source: str
    """The config keys that decided."""


def layer_plan(fields: Fields, notes: list[str]) -> LayerList:
    """Read either form; faults go to `fields.errors`."""
    layers = fields.integer("num_hidden_layers")
    csa_ratio, hca_ratio, rates_given = _rates(fields)
    ratios = _ratios(fields, layers)
    if fields.has("layer_types"):
        attention = _names(fields, "layer_types", _ATTENTION, layers)
        source = "layer_types, compress_rates"
        if ratios:
            expected = _from_ratios(ratios[:layers], csa_ratio)
            if expected != attention:
                fields.fail(
                    "layer_types", "the kinds that compress_ratios lists, for both are given"
                )
    elif ratios:
        others = sorted({r for r in ratios[:layers] if r not in (*_WINDOW_ONLY, csa_ratio)})
        if len(others) > 1 or (rates_given and others not in ([], [hca_ratio])):
            heavy = str(hca_ratio) if rates_given else "a single other ratio"
            fields.fail(
                "compress_ratios",
                f"0 or 1 (window only), {csa_ratio} (compressed sparse) and {heavy} (heavily "
                f"compressed); found also {', '.join(map(str, others))}",
            )
        hca_ratio = others[0] if others else hca_ratio
        attention = _from_ratios(ratios[:layers], csa_ratio)
        source = "compress_ratios"
    elif fields.has("compress_ratios"):  # faulty
        attention, source = ("swa",) * layers, ""
    else:
        attention, source = _default_pattern(layers), "transformers' default"
        notes.append(
            "config.json has no layer_types and no compress_ratios: transformers' default, two "
            "layers of heavily compressed attention, then this and compressed sparse in turn"
        )
    if fields.has("mlp_layer_types"):
        ffn = _names(fields, "mlp_layer_types", _FFN, layers)
        source += ", mlp_layer_types"
        hashed = fields.integer("num_hash_layers", least=0, default=-1)
        if hashed >= 0 and ffn != _first_hash(hashed, layers):
            fields.fail("num_hash_layers", "what mlp_layer_types lists, for both are given")
    else:
        if not fields.has("num_hash_layers"):
            notes.append(
                "config.json has no mlp_layer_types and no num_hash_layers: transformers' default, "
                f"the first {HASH_LAYERS} have hash routing"
            )
        count = fields.integer("num_hash_layers", least=0, default=HASH_LAYERS)
        ffn = _first_hash(count, layers)
        source += ", num_hash_layers"
    return LayerList(attention, ffn, csa_ratio, hca_ratio, ratios[layers:], source)


def draft_kind(fields: Fields, plan: LayerList) -> str:
    """The attention of the draft layers: window only in every published checkpoint."""
    if any(r not in _WINDOW_ONLY for r in plan.draft_ratios):
        fields.fail("compress_ratios", "0 or 1 past num_hidden_layers: a window-only draft layer")
    return "swa"


def layer_patterns(plan: LayerList) -> list[dict[str, Any]]:
    """The shortest greedy cover by runs and by repeated pairs, broken where the ffn changes."""
    out: list[dict[str, Any]] = []
    start = 0
    for ffn, run in groupby(plan.ffn):
        stop = start + len(list(run))
        while start < stop:
            single = _repeats(plan.attention[start:stop], 1)
            pairs = _repeats(plan.attention[start:stop], 2)
            entry: dict[str, Any] = {"attention": plan.attention[start], "ffn": ffn}
            count, step = single, single
            if pairs > 1 and 2 * pairs > single:
                entry["attention"] = list(plan.attention[start : start + 2])
                count, step = pairs, 2 * pairs
            if count > 1:
                entry["count"] = count
            out.append(entry)
            start += step
    return out


def _repeats(kinds: tuple[str, ...], width: int) -> int:
    count = 1
    while kinds[count * width : (count + 1) * width] == kinds[:width]:
        count += 1
    return count


def _rates(fields: Fields) -> tuple[int, int, bool]:
    rates = fields.block("compress_rates")
    old = [fields.any(key) for key in ("compress_rate_csa", "compress_rate_hca")]
    csa, hca = 4, 128
    if rates is not None:
        csa, hca = rates.integer(CSA, least=2, default=csa), rates.integer(HCA, 2, default=hca)
        rates.any("sliding_attention")
        rates.finish()
    if old[0] is not None:
        csa = fields.integer("compress_rate_csa", least=2)
    if old[1] is not None:
        hca = fields.integer("compress_rate_hca", least=2)
    return csa, hca, rates is not None or old[1] is not None


def _ratios(fields: Fields, layers: int) -> tuple[int, ...]:
    ratios = fields.any("compress_ratios")
    if ratios is None:
        return ()
    if not isinstance(ratios, list) or any(
        isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in ratios
    ):
        fields.fail("compress_ratios", "a list of integers of at least 0")
        return ()
    if len(ratios) < layers:
        fields.fail(
            "compress_ratios",
            f"{counted(layers, 'entry', 'entries')} (num_hidden_layers), and one more for each "
            f"draft layer; found {len(ratios)}",
        )
        return ()
    return tuple(ratios)


def _from_ratios(ratios: tuple[int, ...], csa_ratio: int) -> tuple[str, ...]:
    names = {0: "swa", 1: "swa", csa_ratio: "csa"}
    return tuple(names.get(r, "hca") for r in ratios)


def _default_pattern(layers: int) -> tuple[str, ...]:
    """What transformers fills in: hca, hca, then hca and csa in turn."""
    return tuple("csa" if i > 1 and i % 2 else "hca" for i in range(layers))


def _names(fields: Fields, key: str, names: dict[str, str], layers: int) -> tuple[str, ...]:
    values = fields.any(key)
    if not isinstance(values, list) or len(values) != layers:
        fields.fail(key, f"a list of {counted(layers, 'entry', 'entries')} (num_hidden_layers)")
        return (next(iter(names.values())),) * layers
    values = [str(value) for value in values]
    unknown = sorted({value for value in values if value not in names})
    if unknown:
        fields.fail(key, f"entries among {', '.join(names)}; found {', '.join(unknown)}")
    fallback = next(iter(names.values()))
    return tuple(names.get(value, fallback) for value in values)


def _first_hash(count: int, layers: int) -> tuple[str, ...]:
    return tuple("hash" if i < count else "routed" for i in range(layers))
