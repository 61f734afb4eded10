"""Which speculator the files hold decides which modes run on them, whatever config.json says; and
an index names files of its own directory only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.tiny import Tiny
from v4graph.engine.engine import EngineConfig, LLMEngine
from v4graph.errors import SpecError, WeightsError
from v4graph.model.loader import load_params
from v4graph.model.params import random_params, unstack_experts
from v4graph.spec.model import ModelSpec
from v4graph.spec.safetensors_header import INDEX_FILE, read_checkpoint
from v4graph.spec.speculator import Speculator, find_speculator

TINY = Tiny(kinds=("swa",), hidden=32, experts=4, vocab=40, hash_layers=0)


def spec(**mtp: Any) -> ModelSpec:
    data = TINY.data()
    data["speculative"]["mtp"] |= mtp
    data["speculative"]["lookup"] = {"kind": "ngram", "num_draft_tokens": 2}
    return ModelSpec.model_validate(data)


SPEC = spec()
STORED = {k: v.contiguous() for k, v in unstack_experts(random_params(SPEC, seed=5))}
MAIN = {k: v for k, v in STORED.items() if not k.startswith("mtp.")}
DSPARK = {
    **MAIN,
    **{
        k.replace("mtp.0.", f"mtp.{stage}."): v.clone()
        for k, v in STORED.items()
        if k.startswith(("mtp.0.attn", "mtp.0.ffn", "mtp.0.hc_"))
        for stage in range(3)
    },
    "mtp.0.main_proj.weight": torch.ones(32, 96),
    "mtp.0.main_norm.weight": torch.ones(32),
    "mtp.2.markov_head.markov_w1.weight": torch.ones(40, 4),
}


def write(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """As published: config.json says one MTP layer, whatever the files hold."""
    drafts = {k: v for k, v in tensors.items() if k.startswith("mtp.")}
    save_file({k: v for k, v in tensors.items() if k not in drafts}, directory / "a.safetensors")
    if drafts:
        save_file(drafts, directory / "b.safetensors")
    (directory / "config.json").write_text('{"num_nextn_predict_layers": 1}')
    return directory


def test_kinds_are_told_by_names() -> None:
    assert find_speculator(MAIN) == Speculator("none")
    assert find_speculator(STORED) == Speculator("mtp", "mtp.0.e_proj.weight", 1)
    two = [*STORED, *(k.replace("mtp.0.", "mtp.1.") for k in STORED)]
    assert find_speculator(two).num_layers == 2
    assert find_speculator(DSPARK) == Speculator("dspark", "mtp.0.main_norm.weight", 3)
    last = [*MAIN, "mtp.2.markov_head.markov_w1.weight", "mtp.0.attn.wkv.weight"]
    assert find_speculator(last).kind == "dspark"
    assert find_speculator([*STORED, "mtp.0.main_proj.weight"]).kind == "unknown"
    assert find_speculator([*MAIN, "mtp.0.attn.wkv.weight"]).kind == "unknown"


def test_dspark_files_do_not_run_as_mtp(tmp_path: Path) -> None:
    """One error, before anything is read: no list of tensors that differ."""
    write(tmp_path, DSPARK)
    for mode in (None, "mtp"):
        with pytest.raises(WeightsError) as caught:
            load_params(SPEC, tmp_path, torch.float32, speculative=mode)
        message = str(caught.value)
        assert "speculative mode 'mtp' needs MTP layers, but the files hold a DSpark" in message
        assert "mtp.0.main_norm.weight in b.safetensors" in message
        assert "choose --speculative none or --speculative lookup" in message
        assert "num_nextn_predict_layers" in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("tensors", "part"),
    [
        (MAIN, "needs MTP layers, but the files hold no draft layers. "),
        ({**MAIN, "mtp.0.attn.wkv.weight": torch.ones(2)}, "unknown kind (mtp.0.attn.wkv.weight"),
    ],
)
def test_mtp_needs_its_tensors(tensors: dict[str, torch.Tensor], part: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=re.escape(part)):
        load_params(SPEC, write(tmp_path, tensors), torch.float32, speculative="mtp")


def test_numbers_of_layers_agree(tmp_path: Path) -> None:
    part = "needs 2 MTP layers, but the files hold 1 of them (mtp.0.e_proj.weight in b.saf"
    with pytest.raises(WeightsError, match=re.escape(part)):
        load_params(spec(num_layers=2), write(tmp_path, STORED), torch.float32, speculative="mtp")
    two = STORED | {k.replace("mtp.0.", "mtp.1."): v.clone() for k, v in STORED.items()}
    part = "needs 1 MTP layer, but the files hold 2 of them (mtp.0.e_proj.weight in b.saf"
    with pytest.raises(WeightsError, match=re.escape(part)) as caught:
        load_params(SPEC, write(tmp_path, two), torch.float32, speculative="mtp")
    assert str(caught.value).endswith("or a checkpoint with 1 MTP layer")


@pytest.mark.parametrize("mode", ["none", "lookup"])
@pytest.mark.parametrize("tensors", [DSPARK, STORED, MAIN], ids=["dspark", "mtp", "main"])
def test_modes_without_weights_run_on_all(
    mode: str, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    config = EngineConfig(
        max_num_seqs=1, max_model_len=32, compile=False, device="cpu", speculative=mode
    )
    llm = LLMEngine.from_spec(SPEC, write(tmp_path, tensors), config)
    assert llm.plan.speculation.name == mode
    assert not llm.programs.state.draft_layers
    got = load_params(SPEC, tmp_path, torch.float32, speculative=mode)
    assert not any(name.startswith("mtp.") for name in got)


def test_draft_layers_that_no_mode_declares_are_left_over(tmp_path: Path) -> None:
    """Unless a mode that needs none is chosen, nothing in the files goes unread."""
    alone = SPEC.model_copy(update={"speculative": {}})
    write(tmp_path, STORED)
    with pytest.raises(WeightsError, match=r"unknown mtp\.0\.attn"):
        load_params(alone, tmp_path, torch.float32)
    assert load_params(alone, tmp_path, torch.float32, speculative="none").keys() == {
        k for k in random_params(alone) if not k.startswith("mtp.")
    }


# The index -----------------------------------------------------------------------------------


def index(directory: Path, file: object) -> Path:
    weight_map = {**dict.fromkeys(MAIN, "a.safetensors"), "norm.weight": file}
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "sub/../../outside.safetensors",
        "/etc/passwd",
        "C:\\outside.safetensors",
        "..\\outside.safetensors",
        "\\\\host\\share\\outside.safetensors",
        "a.safetensors\0",
    ],
)
def test_files_outside_the_directory_are_refused(file: str, tmp_path: Path) -> None:
    save_file(MAIN, tmp_path / "outside.safetensors")
    inner = tmp_path / "checkpoint"
    inner.mkdir()
    index(write(inner, MAIN), file)
    for read, error in (
        (lambda: load_params(SPEC, inner, torch.float32), WeightsError),
        (lambda: read_checkpoint(inner), SpecError),
    ):
        with pytest.raises(error) as caught:
            read()
        expected = f"{INDEX_FILE}: weight_map says {file!r} for norm.weight; expected a path inside"
        assert expected in str(caught.value)


@pytest.mark.parametrize("file", [3, None, "", ["a.safetensors"]])
def test_what_is_no_file_name(file: object, tmp_path: Path) -> None:
    index(write(tmp_path, MAIN), file)
    with pytest.raises(WeightsError, match=r"for norm\.weight; expected a file name"):
        load_params(SPEC, tmp_path, torch.float32)
    with pytest.raises(SpecError, match=r"for norm\.weight; expected a file name"):
        read_checkpoint(tmp_path)


def test_links_and_folders_inside_are_read(tmp_path: Path) -> None:
    """Download caches are directories of links; an index may name files in folders."""
    store, inner = tmp_path / "store", tmp_path / "checkpoint"
    store.mkdir()
    (inner / "sub").mkdir(parents=True)
    save_file({k: v for k, v in MAIN.items() if k != "norm.weight"}, store / "a")
    save_file({"norm.weight": MAIN["norm.weight"]}, store / "b")
    (inner / "a.safetensors").symlink_to(store / "a")
    (inner / "sub" / "b.safetensors").symlink_to(store / "b")
    index(inner, "sub/b.safetensors")
    got = load_params(SPEC, inner, torch.float32)
    assert torch.equal(got["norm.weight"], MAIN["norm.weight"])
