"""What loads: shipped specs, paths, `like`, strict scalars; and files that cannot be read."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import yaml
from small_spec import SMALL, changed

from v4graph.errors import SpecError
from v4graph.spec import load
from v4graph.spec.load import load_spec, load_spec_text, schema, shipped_specs, spec_path
from v4graph.spec.model import ModelSpec, MtpSpeculation, SparseAttention, Yarn

SHIPPED = [
    "deepseek-v4-flash",
    "deepseek-v4-flash-dspark",
    "deepseek-v4-pro",
    "deepseek-v4-pro-dspark",
    "flash-slice24",
    "flash-slice8",
    "v4-nano",
]


def refusal(name_or_path: str | Path) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(name_or_path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_shipped_spec_loads_under_its_own_name() -> None:
    assert set(SHIPPED) <= set(shipped_specs())
    for name in shipped_specs():
        assert load_spec(name).name == name
        assert load_spec(spec_path(name)) == load_spec(name)
        assert load_spec(str(spec_path(name))) == load_spec(name)


def test_specs_inside_the_package_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "v4graph"
    (package / "spec").mkdir(parents=True)
    monkeypatch.setattr(load, "__file__", str(package / "spec" / "load.py"))
    (tmp_path / "site" / "specs").mkdir()
    (tmp_path / "site" / "specs" / "beside.yaml").write_text(SMALL)
    assert shipped_specs() == ["beside"]
    (package / "specs").mkdir()
    (package / "specs" / "inside.yaml").write_text(SMALL)
    assert shipped_specs() == ["inside"]
    assert load_spec("inside").name == "small"


def test_small_spec_means_what_it_says() -> None:
    spec = load_spec_text(SMALL)
    swa, csa = spec.attention["swa"], spec.attention["csa"]
    assert isinstance(csa, SparseAttention)
    assert (csa.heads, csa.head_dim, csa.rope) == (4, 32, "far")
    assert csa.caches.index_state == "keys_state"
    assert swa.rope == "main"
    assert spec.rope["far"].yarn == Yarn(factor=4, original_max_position=64)
    assert spec.layer_kinds == [("swa", "hash"), *[("csa", "routed"), ("hca", "routed")] * 2]
    assert isinstance(spec.speculative["mtp"], MtpSpeculation)
    assert spec.eos_token_ids == (1,)


def test_like_follows_chains_in_any_order() -> None:
    chained = changed(("csa:\n    like: swa", "csa:\n    like: hca"))
    assert load_spec_text(chained) == load_spec_text(SMALL)


def test_like_copies_whole_values() -> None:
    text = changed(
        ("routed: {like: hash, kind: moe}", "routed: {like: hash, kind: moe, topk: 3, clamp: 7}")
    )
    spec = load_spec_text(text)
    assert spec.ffn["routed"].model_dump() == spec.ffn["hash"].model_dump() | {
        "kind": "moe",
        "topk": 3,
        "clamp": 7.0,
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("streams: 2}", "streams: 2, eps: 1e-6}"),
        ("streams: 2}", "streams: 2, eps: 1.0E-06}"),
        ("eos_token_id: 1", "eos_token_id: [1]"),
        ("eos_token_id: 1", "eos_token_id: null"),
        ("eos_token_id: 1", "eos_token_id: +1"),
        ("name: small", "name: 'small'"),
        ("name: small", "name: 2024-01-01"),
        ("name: small", "name: yes"),
        ("name: small", "---\nname: small"),
        ("name: small", "\ufeffname: small"),
        ("linear: bf16", "linear: fp8_block, scale: f32"),
        ("{linear: bf16}", "{experts: fp4}"),
        ("speculative:\n", "speculative:\n  other: {kind: none}\n"),
        ("residual: {kind: hyper_connections, streams: 2}", "residual: {kind: plain}"),
        ("hidden_size: 64", "hidden_size: 65"),
    ],
)
def test_valid_variants(old: str, new: str) -> None:
    load_spec_text(changed((old, new)))


def test_scalars_follow_yaml_1_2() -> None:
    spec = load_spec_text(changed(("theta: 10000", "theta: 1e4"), ("name: small", "name: on")))
    assert (spec.rope["main"].theta, spec.name) == (10000.0, "on")


def test_line_endings_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.replace("\n", "\r\n").encode())
    assert load_spec(path) == load_spec_text(SMALL)
    path.write_bytes(b"\xef\xbb\xbf" + SMALL.replace("name", "nam").encode())
    with pytest.raises(SpecError, match=r"windows\.yaml:1:1: nam: unknown key"):
        load_spec(path)


def test_speculation_and_weights_are_optional() -> None:
    data = yaml.safe_load(SMALL)
    del data["speculative"], data["weights"]
    spec = load_spec_text(yaml.safe_dump(data, sort_keys=False))
    assert spec.speculative == {}
    assert spec.weights.linear == "bf16"


def test_unknown_name() -> None:
    message = refusal("v4-nanno")
    assert message.startswith("no shipped spec 'v4-nanno'; did you mean 'v4-nano'?")
    assert ", ".join(SHIPPED) in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.yaml")
    assert "did you mean the shipped spec 'v4-nano'?" in refusal(tmp_path / "v4-nano.yaml")
    assert "it is a directory" in refusal(tmp_path)
    assert "cannot be read" in refusal("")
    assert "null" in refusal("a\0b")
    big = tmp_path / "big.yaml"
    big.write_text("# x\n" * 50_000)
    assert "more than 128 KiB" in refusal(big)
    foreign = tmp_path / "foreign.yaml"
    foreign.write_bytes("name: é\n\nx: 1".encode("utf-16"))
    assert refusal(foreign).endswith("foreign.yaml:1: not UTF-8 text: byte 0xff")


def test_a_file_without_suffix_is_a_path_unless_it_has_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "v4-nano"):
        (tmp_path / name).write_text(SMALL)
    assert load_spec("mine").name == "small"
    assert load_spec("v4-nano").name == "v4-nano"


def test_no_text_brings_a_traceback() -> None:
    """Damaged specs load or raise SpecError with a position on every line."""
    rng = random.Random(0)
    words = [*SMALL.split(), "null", "[]", "{}", "-1", "&a", "*a", "!!x", "---", "\t", "\ud800"]
    for _ in range(60):
        text = SMALL
        for _ in range(rng.choice([1, 2, 5])):
            spots = [m.span() for m in re.finditer(r"[\w.]+|\n", text)]
            start, end = rng.choice(spots)
            text = text[:start] + rng.choice(words) + text[end:]
        try:
            load_spec_text(text, "s").layer_kinds  # noqa: B018
        except SpecError as fault:
            header, *lines = str(fault).split("\n")
            assert header.startswith(f"s: {len(lines)} problem")
            assert all(re.match(r"s:\d+:\d+: ", line) for line in lines)


def test_schema_describes_files_with_like() -> None:
    out = schema()
    assert out["properties"]["vocab_size"]["exclusiveMinimum"] == 0
    assert out["additionalProperties"] is False
    for block, kind in (("attention", "SparseAttention"), ("ffn", "ScoredMoe")):
        forms = out["properties"][block]["additionalProperties"]["anyOf"]
        assert {"$ref": f"#/$defs/{kind}Like"} in forms
        derived = out["$defs"][f"{kind}Like"]
        assert derived["required"] == ["like"]
        assert derived["properties"].keys() == {"like", *out["$defs"][kind]["properties"]}
    described = out["$defs"]["SlidingWindowGroup"]["properties"]["window"]["description"]
    assert described.startswith("Visible tokens")


def test_schema_knows_every_field_of_the_models() -> None:
    assert schema()["properties"].keys() == ModelSpec.model_fields.keys()


DOCS = Path(__file__).parents[2] / "docs" / "specs.md"


def block(language: str) -> str:
    """The first fenced block of a language in docs/specs.md."""
    found = re.search(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def test_documented_example_loads_and_its_documented_faults_are_real() -> None:
    example = block("yaml")
    assert len(load_spec_text(example).layer_kinds) == 5
    broken = example
    for old, new in (
        ("overlap: true, row: {dim: 64}", "overlap: true, row: {dim: 64}, page_tokens: 30"),
        ("heads: 8", "head: 8"),
        ("attention: swa,", "attention: swaa,"),
    ):
        broken = broken.replace(old, new, 1)
    with pytest.raises(SpecError) as caught:
        load_spec_text(broken, "example.yaml")
    assert str(caught.value) == block("text").rstrip()


def test_every_field_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for definition in [ModelSpec.model_json_schema(), *schema()["$defs"].values()]:
        for name, field in definition["properties"].items():
            assert f"`{name}`" in text or f"{name}: " in text, name
            for word in [*field.get("enum", []), *filter(None, [field.get("const")])]:
                assert f"`{word}`" in text, word
