"""Which drafter a checkpoint holds: its files decide, or without any its config.

The tensors are told apart by name: an MTP layer has `mtp.N.e_proj` and `h_proj`, a DSpark drafter
`mtp.0.main_proj`. `num_nextn_predict_layers` is 1 for both.
"""

from __future__ import annotations

from typing import Any

from v4graph.spec.hf_fields import Fields
from v4graph.spec.hf_layers import LayerList, draft_kind
from v4graph.spec.safetensors_header import StoredCheckpoint
from v4graph.spec.speculator import find_speculator, mtp_layers

MTP_DRAFT_TOKENS = 3
"""Drafts a round in an imported spec: public acceptance figures hardly grow beyond three."""
DSPARK_LAYERS = 3
"""Draft layers of every published DSpark checkpoint."""


def drafter(
    fields: Fields, stored: StoredCheckpoint, plan: LayerList, notes: list[str]
) -> dict[str, Any] | None:
    """The spec's entry of the stored drafter; None if there is none that v4graph can run."""
    claimed = fields.integer("num_nextn_predict_layers", least=0, default=0)
    keys = sorted(key for key in fields.values if key.startswith("dspark_"))
    held = find_speculator(stored.tensors)
    whole = bool(stored.tensors) and not stored.missing_files
    if held.kind == "dspark" or (keys and not whole):
        return {**_dspark(fields, held.num_layers, plan), **_layer(fields, plan)}
    for key in keys:
        fields.any(key)
    if keys:
        notes.append(
            f"config.json has {', '.join(keys)}, but no file holds mtp.0.main_proj: there is no "
            "DSpark drafter"
        )
    count = _mtp_layers(fields, stored, held.num_layers, claimed, notes)
    if not count:
        return None
    return {
        "kind": "mtp",
        "num_draft_tokens": MTP_DRAFT_TOKENS,
        "num_layers": count,
        **_layer(fields, plan),
    }


def _layer(fields: Fields, plan: LayerList) -> dict[str, str]:
    return {"attention": draft_kind(fields, plan), "ffn": "routed"}


def _mtp_layers(
    fields: Fields, stored: StoredCheckpoint, found: int, claimed: int, notes: list[str]
) -> int:
    if found:
        if found != claimed:
            notes.append(
                f"{mtp_layers(found)} by the tensors mtp.N.e_proj, where config.json says "
                f"num_nextn_predict_layers {claimed}"
            )
        return found
    if stored.tensors and not stored.missing_files:
        if claimed:
            notes.append(
                f"num_nextn_predict_layers is {claimed}, but no file holds mtp.0.e_proj "
                "(transformers does not save draft layers): the spec offers speculation `none` only"
            )
        return 0
    if fields.has("layer_types"):
        if claimed:
            notes.append(
                "no file shows whether the MTP layer is there, and transformers does not save it: "
                "the spec offers speculation `none` only"
            )
        return 0
    if claimed:
        notes.append(
            f"{mtp_layers(claimed)} by num_nextn_predict_layers; no file shows the tensors"
        )
    return claimed


def _dspark(fields: Fields, found: int, plan: LayerList) -> dict[str, Any]:
    size = fields.integer("dspark_block_size")
    ids = fields.any("dspark_target_layer_ids")
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
        fields.fail("dspark_target_layer_ids", "a list of layer numbers, counted from 0")
        ids = [0]
    return {
        "kind": "dspark",
        "num_draft_tokens": size,
        "block_size": size,
        "num_layers": found or len(plan.draft_ratios) or DSPARK_LAYERS,
        "target_layer_ids": ids,
        "noise_token_id": fields.integer("dspark_noise_token_id", least=0),
        "markov_rank": fields.integer("dspark_markov_rank"),
    }
