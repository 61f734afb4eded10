"""The inventory against the published checkpoints: counts, bytes and dtypes of their headers."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from v4graph.plan.weight_totals import part_totals, weight_totals
from v4graph.plan.weights import TensorEntry, draft_inventory, inventory, main_inventory
from v4graph.spec.load import load_spec

PUBLISHED = {
    "deepseek-v4-flash": (
        (69_187, 159_609_485_896),
        (1_575, 3_593_787_756),
        {"BF16": 433, "F32": 417, "F8_E4M3": 375, "F8_E8M0": 34_167, "I64": 3, "I8": 33_792},
    ),
    "deepseek-v4-pro": (
        (145_116, 864_704_792_696),
        (2_343, 13_956_587_692),
        {"BF16": 619, "F32": 590, "F8_E4M3": 528, "F8_E8M0": 71_952, "I64": 3, "I8": 71_424},
    ),
}


@cache
def flash_tensors() -> dict[str, TensorEntry]:
    return {e.name: e for e in inventory(load_spec("deepseek-v4-flash"))}


@pytest.mark.parametrize("name", PUBLISHED)
def test_totals_equal_the_published_headers(name: str) -> None:
    total, draft, by_dtype = PUBLISHED[name]
    totals = weight_totals(load_spec(name))
    assert (totals.total.num_tensors, totals.total.num_bytes) == total
    assert (totals.draft.num_tensors, totals.draft.num_bytes) == draft
    assert {dtype: n for dtype, (n, _) in totals.total.by_dtype.items()} == by_dtype


def test_flash_draft_layer_has_the_published_dtypes() -> None:
    counts = Counter(e.dtype for e in draft_inventory(load_spec("deepseek-v4-flash")))
    assert counts == {"BF16": 8, "F32": 11, "F8_E4M3": 10, "F8_E8M0": 778, "I8": 768}


@pytest.mark.parametrize(
    ("name", "total", "num_bytes", "drafts"),
    [
        ("deepseek-v4-flash-dspark", 72_317, 166_878_536_440, (4_705, 10_862_838_300)),
        ("deepseek-v4-pro-dspark", 149_782, 892_727_580_904, (7_009, 41_979_375_900)),
    ],
)
def test_dspark_checkpoints_have_their_published_size(
    name: str, total: int, num_bytes: int, drafts: tuple[int, int]
) -> None:
    """Counts and bytes of the index files; Pro's draft part is ours, its total is published."""
    totals = weight_totals(load_spec(name))
    assert (totals.total.num_tensors, totals.total.num_bytes) == (total, num_bytes)
    assert (totals.draft.num_tensors, totals.draft.num_bytes) == drafts


def test_parameters_are_those_of_the_model_card() -> None:
    flash = weight_totals(load_spec("deepseek-v4-flash"))
    assert f"{flash.main.num_params / 1e9:.2f}" == "284.33"
    assert f"{flash.draft.num_params / 1e9:.2f}" == "6.61"
    pro = weight_totals(load_spec("deepseek-v4-pro"))
    assert f"{pro.main.num_params / 1e9:.2f}" == "1573.00"


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("embed.weight", "BF16", (129280, 4096)),
        ("hc_head_fn", "F32", (4, 16384)),
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.0.attn.wo_a.scale", "F8_E8M0", (64, 32)),
        ("layers.0.ffn.gate.tid2eid", "I64", (129280, 6)),
        ("layers.2.attn.compressor.wkv.weight", "BF16", (1024, 4096)),
        ("layers.2.attn.compressor.ape", "F32", (4, 1024)),
        ("layers.2.attn.indexer.wq_b.weight", "F8_E4M3", (8192, 1024)),
        ("layers.2.attn.indexer.compressor.ape", "F32", (4, 256)),
        ("layers.3.attn.compressor.wkv.weight", "BF16", (512, 4096)),
        ("layers.3.attn.compressor.ape", "F32", (128, 512)),
        ("layers.3.ffn.gate.bias", "F32", (256,)),
        ("layers.42.ffn.experts.255.w1.weight", "I8", (2048, 2048)),
        ("layers.42.ffn.experts.255.w1.scale", "F8_E8M0", (2048, 128)),
        ("layers.42.ffn.experts.255.w2.weight", "I8", (4096, 1024)),
        ("mtp.0.e_proj.weight", "F8_E4M3", (4096, 4096)),
        ("mtp.0.enorm.weight", "BF16", (4096,)),
    ],
)
def test_flash_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert flash_tensors()[name] == TensorEntry(name, dtype, shape)


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.attn.compressor.wkv.weight",
        "layers.2.ffn.gate.bias",
        "layers.3.ffn.gate.tid2eid",
        "layers.3.attn.indexer.wq_b.weight",
        "mtp.0.embed.weight",
        "mtp.0.attn.compressor.wkv.weight",
        "mtp.1.e_proj.weight",
    ],
)
def test_flash_has_no_tensor(name: str) -> None:
    assert name not in flash_tensors()


def test_a_slice_is_its_layers_of_flash() -> None:
    flash = {e.name: e for e in main_inventory(load_spec("deepseek-v4-flash"))}
    for name, layers in (("flash-slice8", 8), ("flash-slice24", 24)):
        spec = load_spec(name)
        assert len(spec.layer_kinds) == layers
        entries = main_inventory(spec)
        assert all(flash[e.name] == e for e in entries)
        kept = [n for n in flash if not n.startswith("layers.") or int(n.split(".")[1]) < layers]
        assert [e.name for e in entries] == kept
        assert draft_inventory(spec) == draft_inventory(load_spec("deepseek-v4-flash"))


def test_names_are_unique() -> None:
    for name in ("v4-nano", "flash-slice8"):
        names = [e.name for e in inventory(load_spec(name))]
        assert len(names) == len(set(names))


def test_parts_add_up_to_the_total() -> None:
    totals = weight_totals(load_spec("v4-nano"))
    assert totals.total.num_bytes == totals.main.num_bytes + totals.draft.num_bytes
    assert totals.total.num_tensors == totals.main.num_tensors + totals.draft.num_tensors
    assert sum(size for _, size in totals.total.by_dtype.values()) == totals.total.num_bytes


def test_packed_bytes_count_two_parameters_and_scales_none() -> None:
    part = part_totals(
        [
            TensorEntry("a.weight", "I8", (4, 8)),
            TensorEntry("a.scale", "F8_E8M0", (4, 1)),
            TensorEntry("b.scale", "F32", (3,)),
            TensorEntry("hc_attn_scale", "F32", (3,)),
            TensorEntry("tid2eid", "I64", (10, 2)),
        ]
    )
    assert part.num_params == 64 + 3
    assert part.num_bytes == 32 + 4 + 12 + 12 + 160
