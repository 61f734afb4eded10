"""Checkpoint directories: what loads, to which values, and what is refused, by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support import hf
from tests.support.tiny import Tiny
from v4graph.errors import NonFiniteWeightsError, WeightsError
from v4graph.model import finite
from v4graph.model.checkpoint import Checkpoint
from v4graph.model.loader import load_params, load_quantised
from v4graph.model.params import random_params, unstack_experts
from v4graph.spec.safetensors_header import INDEX_FILE
from v4graph.words import counted

SPEC = Tiny(kinds=("csa", "hca"), hidden=32, experts=4, vocab=40).spec()
PARAMS = random_params(SPEC, seed=5)
STORED = {name: tensor.contiguous() for name, tensor in unstack_experts(PARAMS)}
QUERY, EXPERT = "layers.0.attn.wq_a.weight", "layers.1.ffn.experts.3.w2.weight"
TABLE = "layers.0.ffn.gate.tid2eid"
Loader = Callable[..., dict[str, Any]]


def write(directory: Path, shards: list[dict[str, Tensor]], index: bool = True) -> Path:
    """Files `part-N.safetensors`, and an index that names each tensor's first one."""
    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(shards):
        save_file(
            {k: v.contiguous() for k, v in tensors.items()}, directory / f"part-{i}.safetensors"
        )
        for name in tensors:
            weight_map.setdefault(name, f"part-{i}.safetensors")
    if index:
        (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return directory


def split(tensors: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    names = sorted(tensors)
    return [{n: tensors[n] for n in names[i::count]} for i in range(count)]


def load(directory: Path) -> dict[str, Tensor]:
    return load_params(SPEC, directory, torch.float32)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("index", [True, False])
def test_round_trip(count: int, index: bool, tmp_path: Path) -> None:
    assert_same(load(write(tmp_path, split(STORED, count), index)), PARAMS)


def test_progress_counts_every_tensor(tmp_path: Path) -> None:
    write(tmp_path, [STORED])
    seen: list[tuple[str, int, int]] = []
    load_params(SPEC, tmp_path, torch.float32, lambda *step: seen.append(step))
    assert seen == [("load", i + 1, len(STORED)) for i in range(len(STORED))]


def test_the_index_decides_between_copies(tmp_path: Path) -> None:
    stale = {QUERY: STORED[QUERY] + 1, TABLE: STORED[TABLE]}
    write(tmp_path, [*split(STORED, 2), stale])
    assert_same(load(tmp_path), PARAMS)


def test_files_outside_the_index_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, [STORED])
    save_file({QUERY: STORED[QUERY] + 1, "junk": torch.ones(1)}, tmp_path / "old.safetensors")
    assert_same(load(tmp_path), PARAMS)


def test_the_main_model_loads_without_draft_layers(tmp_path: Path) -> None:
    main = {k: v for k, v in STORED.items() if not k.startswith("mtp.")}
    assert len(main) < len(STORED)
    expected = {k: v for k, v in PARAMS.items() if not k.startswith("mtp.")}
    assert_same(load(write(tmp_path, [main])), expected)


def test_half_a_draft_layer_is_refused(tmp_path: Path) -> None:
    some = {k: v for k, v in STORED.items() if k != "mtp.0.enorm.weight"}
    with pytest.raises(WeightsError, match=r"missing mtp\.0\.enorm\.weight"):
        load(write(tmp_path, [some]))


def test_dtypes(tmp_path: Path) -> None:
    """Matrices take the compute dtype; F32 tensors and routing tables keep their own."""
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in STORED.items()}
    params = load_params(SPEC, write(tmp_path, [half]), torch.bfloat16)
    assert params[QUERY].dtype is torch.float32  # this spec stores every matrix as f32
    bf16 = SPEC.model_copy(
        update={"weights": SPEC.weights.model_copy(update={"linear": "bf16", "other": "bf16"})}
    )
    params = load_params(bf16, tmp_path, torch.bfloat16)
    assert params[QUERY].dtype is params["embed.weight"].dtype is torch.bfloat16
    assert params["layers.0.hc_attn_fn"].dtype is torch.float32
    assert params["layers.0.attn.attn_sink"].dtype is torch.float32
    assert params[TABLE].dtype is torch.int64
    assert torch.equal(params[QUERY], STORED[QUERY].bfloat16())


def test_routing_tables_keep_odd_ids(tmp_path: Path) -> None:
    """A float16 or bfloat16 detour would round ids above 256 to even ones."""
    spec = Tiny(kinds=("swa",), hidden=8, experts=300, vocab=40, hash_layers=1).spec()
    params = random_params(spec)
    params[TABLE] = torch.stack((torch.arange(258, 298), torch.arange(259, 299)), dim=1)
    write(tmp_path, [dict(unstack_experts(params))])
    got = load_params(spec, tmp_path, torch.bfloat16)[TABLE]
    assert got.dtype is torch.int64
    assert torch.equal(got, params[TABLE])


Change = Callable[[dict[str, Tensor]], None]


def _put(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = make(tensors[name])

    return change


def _drop(name: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def _rename(old: str, new: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[new] = tensors.pop(old)

    return change


FAULTS: dict[str, tuple[Change, str]] = {
    "missing": (_drop(EXPERT), f"missing {EXPERT}"),
    "missing top": (_drop("norm.weight"), "missing norm.weight"),
    "unknown": (lambda t: t.update(extra=torch.ones(1)), "unknown extra: nothing in the spec"),
    "unknown layer": (
        lambda t: t.update({"layers.2.attn_norm.weight": torch.ones(32)}),
        "unknown layers.2.attn_norm.weight",
    ),
    "renamed": (
        _rename(QUERY, "layers.0.attn.wqa.weight"),
        f"missing {QUERY} (found layers.0.attn.wqa.weight)",
    ),
    "shape": (_put(QUERY, lambda v: v[:-1]), f"tensor {QUERY}: shape (23, 32), expected (24, 32)"),
    "transposed": (_put(QUERY, torch.t), f"tensor {QUERY}: shape (32, 24), expected (24, 32)"),
    "expert shape": (_put(EXPERT, lambda v: v[:, :-1]), f"tensor {EXPERT}: shape (32, 31)"),
    "table as bf16": (_put(TABLE, Tensor.bfloat16), f"tensor {TABLE}: dtype BF16, expected I64"),
    "table as i32": (_put(TABLE, Tensor.int), f"tensor {TABLE}: dtype I32, expected I64"),
    "fp8 without scale": (
        _put(QUERY, lambda v: v.to(torch.float8_e4m3fn)),
        f"tensor {QUERY}: dtype F8_E4M3 without a scale",
    ),
    "float with scale": (
        lambda t: t.update({QUERY.replace("weight", "scale"): torch.ones(1, 1)}),
        f"tensor {QUERY}: dtype F32 with a scale",
    ),
    "integers": (_put(QUERY, Tensor.char), f"tensor {QUERY}: dtype I8 without a scale"),
    "scale of nothing": (
        lambda t: t.update({"layers.9.attn.wq_a.scale": torch.ones(1, 1)}),
        "unknown layers.9.attn.wq_a.scale",
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_refused_by_name(fault: str, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    tensors = dict(STORED)
    change(tensors)
    with pytest.raises(WeightsError, match=re.escape(message)) as caught:
        load(write(tmp_path, split(tensors, 2)))
    assert str(tmp_path) in str(caught.value)


def test_all_faults_at_once(tmp_path: Path) -> None:
    tensors = {k: v for k, v in STORED.items() if ".experts." not in k} | {"a": torch.ones(1)}
    with pytest.raises(WeightsError) as caught:
        load(write(tmp_path, [tensors]))
    gone = len(STORED) - len(tensors) + 1
    assert f"{counted(gone + 1, 'tensor differs', 'tensors differ')}:" in str(caught.value)
    assert f"and {gone + 1 - 20} more" in str(caught.value)


def test_the_index_points_to_a_file_without_the_tensor(tmp_path: Path) -> None:
    write(tmp_path, split(STORED, 2))
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    where = index["weight_map"]
    where[QUERY] = (
        "part-0.safetensors" if where[QUERY].startswith("part-1") else "part-1.safetensors"
    )
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    claim = f"says that {where[QUERY]} holds {QUERY}, but it does not"
    with pytest.raises(WeightsError, match=re.escape(claim)):
        load(tmp_path)


def test_the_index_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, split(STORED, 2))
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"names part-1\.safetensors, which is not in"):
        load(tmp_path)


def test_two_copies_without_an_index(tmp_path: Path) -> None:
    write(tmp_path, [STORED, {QUERY: STORED[QUERY]}], index=False)
    with pytest.raises(WeightsError, match=re.escape(QUERY) + r".*no index says which"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}'])
def test_broken_index(text: str, tmp_path: Path) -> None:
    write(tmp_path, [STORED])
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(WeightsError, match="expected JSON with a weight_map"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_file(kept: int, tmp_path: Path) -> None:
    write(tmp_path, [STORED])
    file = tmp_path / "part-0.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=r"part-0\.safetensors: cannot be read"):
        load(tmp_path)


def test_empty_and_missing_directories(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no \*\.safetensors file"):
        load(tmp_path)
    with pytest.raises(WeightsError, match="not a directory"):
        load(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(WeightsError, match="not a directory"):
        Checkpoint(file)


def test_what_transformers_saves(tmp_path: Path) -> None:
    """Both of its forms: the published names, and its own modules with stacked experts."""
    main = {k: v for k, v in PARAMS.items() if not k.startswith("mtp.")}
    source = tmp_path / "source"
    source.mkdir()
    hf.write_checkpoint(SPEC, main, source)
    model = hf.load(source)
    model.save_pretrained(tmp_path / "saved")
    assert_same(load(tmp_path / "saved"), main)
    modules = {k: v for k, v in model.state_dict().items() if k != "lm_head.bias"}
    assert any("gate_up_proj" in name for name in modules)
    (tmp_path / "modules").mkdir()
    got = load(write(tmp_path / "modules", split(modules, 2)))
    assert_same(got, main)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("loader", [load_params, load_quantised])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_not_finite_are_refused_by_name_and_count(
    value: float, loader: Loader, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = {n: t.to(dtype) if n == QUERY else t.clone() for n, t in STORED.items()}
    tensors[QUERY][1, 3] = value
    tensors[EXPERT][0, :5] = value
    write(tmp_path, split(tensors, 2))
    with pytest.raises(NonFiniteWeightsError) as caught:
        loader(SPEC, tmp_path, torch.float32)
    message = str(caught.value)
    assert "2 tensors hold" in message
    assert f"tensor {QUERY}: 1 of {STORED[QUERY].numel()} values are NaN or infinite" in message
    assert f"tensor {EXPERT}: 5 of {STORED[EXPERT].numel()} values are NaN or infinite" in message
    assert "--allow-nonfinite" in message


def test_values_that_are_too_large_for_the_dtype_are_refused(tmp_path: Path) -> None:
    tensors = {**STORED, QUERY: torch.full_like(STORED[QUERY], 3.4e38)}
    load(write(tmp_path, [tensors]))
    bf16 = SPEC.model_copy(update={"weights": SPEC.weights.model_copy(update={"linear": "bf16"})})
    with pytest.raises(NonFiniteWeightsError, match=f"{QUERY}: finite as stored, but not in "):
        load_params(bf16, tmp_path, torch.bfloat16)


@pytest.mark.parametrize("loader", [load_params, load_quantised])
def test_allowed_they_are_loaded_and_told(
    loader: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {**STORED, QUERY: STORED[QUERY].clone()}
    tensors[QUERY][1, 3] = float("nan")
    params = loader(SPEC, write(tmp_path, [tensors]), torch.float32, allow_nonfinite=True)
    assert params[QUERY].isnan().sum() == 1
    assert f"tensor {QUERY}: 1 of" in caplog.text


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu]
)
@pytest.mark.parametrize("place", [0, 12, 24])
def test_one_bad_element_anywhere_is_seen_and_counted(
    dtype: torch.dtype, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite, "PIECE", 7)
    values = torch.full((5, 5), 2.0).to(dtype)
    flag = finite.any_nonfinite([values])
    assert flag is not None
    assert not flag
    assert finite.count_nonfinite(values) == 0
    values.view(-1)[place] = float("nan")
    flag = finite.any_nonfinite([torch.ones(2), values])
    assert flag is not None
    assert flag
    assert finite.count_nonfinite(values) == 1


@pytest.mark.parametrize("byte", range(256))
def test_every_code_that_is_nan_is_seen(byte: int) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        code = torch.tensor([byte], dtype=torch.uint8).view(dtype)
        flag = finite.any_nonfinite([code])
        assert flag is not None
        assert bool(flag) is bool(code.float().isnan().any())
        assert finite.count_nonfinite(code) == int(flag)
