"""One broken line of a small spec a case: the message names place, value and remedy."""

from __future__ import annotations

import pytest
from small_spec import SMALL, changed

from v4graph.errors import SpecError
from v4graph.spec.load import load_spec_text


def problems(text: str) -> list[str]:
    """The lines of the error, without the header."""
    with pytest.raises(SpecError) as caught:
        load_spec_text(text, "s.yaml")
    header, *lines = str(caught.value).split("\n")
    assert header == f"s.yaml: {len(lines)} problem{'s' if len(lines) > 1 else ''}"
    assert all(line.startswith("s.yaml:") for line in lines)
    return [line.removeprefix("s.yaml:") for line in lines]


# (what to replace, with what, the beginning of the one line, a later part of it)
CASES = [
    # Keys.
    ("heads: 4", "head: 4", "21:5: attention.swa.head: unknown key", "did you mean 'heads'?"),
    ("name: small", "Name: small", "1:1: Name: unknown key", "did you mean 'name'?"),
    ("    heads: 4\n", "", "19:3: attention.swa.heads: missing", "an integer of at least 1"),
    ("name: small\n", "", "1:1: name: missing", "a name"),
    ("{window: window}", "{}", "27:5: attention.swa.caches.window: missing", "a name"),
    ("rope: main", "rope: main\n    rope: far", "27:5: attention.swa.rope: duplicate", "at 26:5"),
    ("  far_kv: {", "  kv: {}\n  far_kv: {", "16:3: cache_groups.kv: duplicate key", "at 12:3"),
    ("{kind: none}", "{kind: none, like: mtp}", "46:22: speculative.none.like: unk", "attention"),
    ("{linear: bf16}", "{linear: bf16, expert: fp4}", "48:25: weights.expert: unk", "'experts'?"),
    (
        "    caches: {window: window}",
        "    caches: {window: window}\n    indexer: {heads: 2}",
        "28:5: attention.swa.indexer: unknown key",
        "only kind compressed_sparse_attention has it",
    ),
    # Types and ranges.
    ("heads: 4", "heads: true", "21:12: attention.swa.heads: wrong type (got true;", "an integer"),
    ("heads: 4", "heads: '4'", "21:12: attention.swa.heads: wrong type (got '4';", "write 4 with"),
    ("heads: 4", "heads: 4.0", "21:12: attention.swa.heads: wrong type (got 4.0;", "; write 4"),
    ("heads: 4", "heads: 0", "21:12: attention.swa.heads: out of range (got 0;", "at least 1"),
    ("heads: 4", "heads:", "21:11: attention.swa.heads: wrong type (got null;", "an integer"),
    ("heads: 4", "heads: [4]", "21:5: attention.swa.heads: wrong type (got a list;", "an integer"),
    ("size: 100", "size: 1_00", "2:13: vocab_size: wrong type (got '1_00';", "did you mean 100?"),
    ("size: 100", "size: 0100", "2:13: vocab_size: wrong type (got '0100';", "did you mean 100?"),
    ("size: 100", "size: 0x64", "2:13: vocab_size: wrong type (got '0x64';", "an integer"),
    ("size: 100", "size: 9223372036854775808", "2:13: vocab_size: too large", "64 bits"),
    ("theta: 10000", "theta: '1e4'", "8:17: rope.main.theta: wrong type (got '1e4'", "write 1e4"),
    ("theta: 10000", "theta: true", "8:17: rope.main.theta: wrong type (got true", "a number"),
    ("theta: 10000", "theta: .inf", "8:17: rope.main.theta: not a finite number", "a number"),
    ("theta: 10000", "theta: 1e999", "8:17: rope.main.theta: not a finite number", "a number"),
    ("lap: true", "lap: yes", "12:45: cache_groups.kv.overlap: wrong type", "did you mean true?"),
    ("lap: true", "lap: True", "12:45: cache_groups.kv.overlap: wrong type", "did you mean true?"),
    ("lap: true", "lap: 1", "12:45: cache_groups.kv.overlap: wrong type", "true or false"),
    ("streams: 2", "streams: 17", "6:46: residual.streams: out of range", "from 1 to 16"),
    ("name: small", "name: a b", "1:7: name: not a valid name (got 'a b'", "letters"),
    ("eos_token_id: 1", "eos_token_id: -1", "5:15: eos_token_id: out of range", "at least 0"),
    ("count: 2", "count: 0", "44:49: layers[1].count: out of range", "at least 1"),
    ("[csa, hca]", "[csa, 3, hca]", "44:23: layers[1].attention[1]: wrong type (got 3", "a name"),
    ("tokens: 2,", "tokens: 9,", "47:38: speculative.mtp.num_draft_tokens: out of", "1 to 8"),
    ("2, attention", "2, position_offset: 2, attention", "47:58: speculative.mtp.pos", "0 to 1"),
    # Closed sets.
    ("kind: sliding_attention", "kind: full", "20:11: attention.swa.kind: unknown kind", "one of"),
    ("ding_attention", "ding_atention", "20:11: attention.swa.kind: unk", "'sliding_attention'?"),
    ("{kind: none}", "{}", "46:3: speculative.none.kind: missing", "one of none, mtp, dspark"),
    ("linear: bf16", "linear: fp4", "48:19: weights.linear: unknown value", "f32, bf16, fp8_bl"),
    ("dim: 16}", "dim: 16, format: fp9}", "13:76: cache_groups.keys.row.format: unk", "'fp8'?"),
    # `like`.
    ("like: swa", "like: swo", "29:11: attention.csa.like: no such attention", "'swa'?"),
    ("like: swa", "like: csa", "29:11: attention.csa.like: a circle", "csa -> csa"),
    ("like: swa", "like: [swa]", "29:5: attention.csa.like: no such", "got a list"),
    (
        "like: swa\n    kind: heavily",
        "like: csa\n    kind: heavily",
        "35:5: attention.hca.like: inherits 'indexer'",
        "heavily_compressed_attention does not have",
    ),
    # References.
    ("rope: main", "rope: man", "26:11: attention.swa.rope: no such rope", "did you mean 'main'?"),
    ("w: window}", "w: widow}", "27:22: attention.swa.caches.window: no such", "'window'?"),
    ("w: window}", "w: kv}", "27:22: attention.swa.caches.window: a group of", "sliding_window"),
    ("of: kv}", "of: kvs}", "14:42: cache_groups.kv_state.of: no such cache", "mean 'kv'?"),
    ("of: kv}", "of: window}", "14:42: cache_groups.kv_state.of: a group of the", "compressed"),
    ("n: swa, ffn: hash", "n: sw, ffn: hash", "43:17: layers[0].attention: no such", "'swa'?"),
    ("ffn: hash", "ffn: hush", "43:27: layers[0].ffn: no such ffn", "did you mean 'hash'?"),
    ("2, attention: swa", "2, attention: sw", "47:52: speculative.mtp.attention: no", "'swa'?"),
    # Unused entries.
    ("[csa, hca]", "csa", "34:3: attention.hca: unused", "no layer or draft mode"),
    ("ffn: hash}", "ffn: routed}", "40:3: ffn.hash: unused", "no layer or draft mode"),
    ("  main:", "  odd: {theta: 10, dim: 4}\n  main:", "8:3: rope.odd: unused", "no attention"),
    (
        "  window: {kind",
        "  spare: {kind: compressor_state, of: kv}\n  window: {kind",
        "11:3: cache_groups.spare: unused",
        "no attention entry names it",
    ),
    # Numbers that must fit each other.
    ("page_tokens: 16", "page_tokens: 18", "12:80: cache_groups.kv.page_tokens: not a", "of 4"),
    ("page_tokens: 16", "page_tokens: 2", "12:80: cache_groups.kv.page_tokens: not a", "of 4"),
    ("dim: 8", "dim: 7", "8:29: rope.main.dim: odd (got 7", "even"),
    ("dim: 8", "dim: 40", "26:11: attention.swa.rope: rotates more", "at most head_dim 32"),
    ("theta: 10000", "theta: 1", "8:17: rope.main.theta: too small (got 1", "above 1"),
    ("factor: 4", "factor: 0.5", "9:46: rope.far.yarn.factor: shortens", "at least 1"),
    ("factor: 4", "factor: 4, beta_fast: 1", "9:60: rope.far.yarn.beta_fast: not above", "1 and 1"),
    ("dim: 32}}", "dim: 30}}", "11:57: cache_groups.window.row.dim: not", "swa, csa, hca"),
    ("dim: 16}", "dim: 24}", "13:64: cache_groups.keys.row.dim: not the", "16, the indexer.dim"),
    ("lap: true", "lap: false", "12:45: cache_groups.kv.overlap: wrong", "expected true for"),
    ("o: 8,", "o: 8, overlap: true,", "16:49: cache_groups.far_kv.overlap: wr", "expected false"),
    ("s: {kind: compressed, ratio: 4", "s: {kind: compressed, ratio: 8", "13:35: c", "of 'kv'"),
    ("o_groups: 2", "o_groups: 3", "24:15: attention.swa.o_groups: does not", "divisor of 128"),
    ("topk: 2", "topk: 5", "40:44: ffn.hash.topk: more than there are experts", "at most 4"),
    ("_id: 1", "_id: [1, 100]", "5:19: eos_token_id[1]: not in the vocabulary", "below 100"),
    ("_id: 1", "_id: []", "5:1: eos_token_id: an empty list", "a token id"),
    ("count: 2", "count: 501", "42:1: layers: too many layers (got 1003", "at most 1000"),
    ("[csa, hca], ffn: routed", "[csa, hca, csa], ffn: [routed, hash]", "44:34: layers[1].f", "3"),
    ("m: 32}}", "m: 32, format: fp8_ds}}", "11:69: cache_groups.window.row.format: does", "64"),
    ("m: 16}", "m: 16, format: fp8_ds}", "13:76: cache_groups.keys.row.format: not", "index"),
    ("2, attention: swa", "2, attention: csa", "47:52: speculative.mtp.attention: not", "csa"),
    ("swa, ffn: routed}", "swa, ffn: hash}", "47:62: speculative.mtp.ffn: not a", "moe or dense"),
    (
        "none: {kind: none}",
        "none: {kind: mtp, num_draft_tokens: 1, attention: swa, ffn: routed}",
        "46:3: speculative.none: ",
        "of kind none",
    ),
    ("2, attention: swa", "2, num_layers: 9, attention: swa", "47:53: sp", "9; expected an"),
    (
        "none: {kind: none}",
        "two: {kind: mtp, num_draft_tokens: 1, num_layers: 2, attention: swa, ffn: routed}",
        "47:3: speculative.mtp.num_layers: another draft layer",
        "expected 2, as in mode 'two'",
    ),
    # YAML.
    ("name: small", "name: *small", "1:7: name: anchors and aliases", "like"),
    ("heads: 4", "heads: &h 4", "21:12: attention.swa.heads: anchors and aliases", "like"),
    ("heads: 4", "heads: !!int 4", "21:12: attention.swa.heads: tags are not", "'!!int'"),
    ("rope: main", "<<: {}\n    rope: main", "26:5: attention.swa.<<: merge keys", "like"),
    ("heads: 4", "heads: 4\n    3: 4", "22:5: attention.swa.3: a key is not a name (got 3", "text"),
    ("heads: 4", "heads:\t4", "21:11: a tab", "spaces"),
    ("heads: 4", "heads: 4: 5", "21:13: not YAML: a second ':'", "quote"),
    ("[csa, hca]", "[csa, hca", "44:49: not YAML: expected ',' or ']'", "'}'"),
    ("heads: 4", "heads: \x00", "21:12: character U+0000", "not allowed"),
    ("heads: 4", 'heads: "\\U99999999"', "21:15: not YAML", ""),
    ("heads: 4", "heads: " + "[" * 40, "21:25: attention.swa.heads[0]", "deeper than 16"),
    ("weights:", "---\nweights:", "48:1: a second document", "one spec a file"),
]


MTP = "mtp: {kind: mtp, num_draft_tokens: 2, attention: swa, ffn: routed}"
BLOCK = (
    "ds: {kind: dspark, block_size: 2, num_draft_tokens: 2, target_layer_ids: [0, 4], "
    "noise_token_id: 9, markov_rank: 4, attention: swa, ffn: routed}"
)


@pytest.mark.parametrize(
    ("old", "new", "field", "part"),
    [
        ("block_size: 2", "block_size: 9", "block_size: out of range", "1 to 8"),
        ("tokens: 2", "tokens: 3", "num_draft_tokens: more than a block", "block_size 2"),
        ("[0, 4]", "[0, 5]", "target_layer_ids[1]: no such layer (got 5", "0..4"),
        ("[0, 4]", "[4, 0]", "target_layer_ids: not ascending", "each layer once"),
        ("[0, 4]", "[]", "target_layer_ids: too short", "non-empty"),
        ("_id: 9", "_id: 100", "noise_token_id: not in the vocabulary", "below 100"),
        ("markov_rank: 4, ", "", "markov_rank: missing", ""),
        ("attention: swa", "attention: hca", "attention: not a draft attention", "sliding"),
        ("ffn: routed", "ffn: hash", "ffn: not a draft ffn", "moe or dense"),
    ],
)
def test_dspark_modes(old: str, new: str, field: str, part: str) -> None:
    lines = problems(changed((MTP, BLOCK.replace(old, new, 1))))
    assert len(lines) == 1, lines
    assert f"speculative.ds.{field}" in lines[0]
    assert part in lines[0]


def test_a_checkpoint_holds_one_drafter() -> None:
    lines = problems(changed((MTP, f"{MTP}\n  {BLOCK}")))
    assert len(lines) == 1
    assert "speculative.ds.kind: another draft layer (got 'dspark'" in lines[0]
    assert "expected 'mtp', as in mode 'mtp'" in lines[0]


@pytest.mark.parametrize(("old", "new", "start", "part"), CASES)
def test_one_fault(old: str, new: str, start: str, part: str) -> None:
    lines = problems(changed((old, new)))
    assert len(lines) == 1, lines
    assert lines[0].startswith(start), lines[0]
    assert part in lines[0].removeprefix(start), lines[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1:1: empty"),
        ("# only a comment\n", "1:1: empty"),
        ("null\n", "1:1: empty"),
        ("- name: small\n", "1:1: the top is a list"),
        ("\n small", "2:2: the top is a single value"),
        ("\tname: small", "1:1: a tab"),
        ("'unclosed", "1:10: not YAML"),
        ("{{ name }}", "1:2: a key is a collection"),
        ("a: 'é'\n'é': \x07", "2:6: character U+0007"),
        ("# " + "x" * 200_000, "1:1: too large"),
    ],
)
def test_unreadable_text(text: str, message: str) -> None:
    lines = problems(text)
    assert len(lines) == 1
    assert lines[0].startswith(message)


def test_an_alias_bomb_is_refused_before_it_grows() -> None:
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    lines = problems("a0: &a0 [x]\n" + levels)
    assert any(line.startswith("2:10: a1[0]: anchors and aliases") for line in lines)


def test_field_and_cross_field_faults_come_together_in_text_order() -> None:
    text = changed(
        ("size: 100", "size: '100'"),
        ("dim: 8", "dim: 7"),
        ("overlap: true", "overlap: false"),
        ("heads: 4", "heads: 0"),
        ("rope: main", "rope: man"),
        ("topk: 2", "topk: 5"),
        ("count: 2", "counts: 2"),
        ("swa, ffn: routed}", "swa, ffn: hash}"),
    )
    assert [line.split(": ")[1] for line in problems(text)] == [
        "vocab_size",
        "rope.main.dim",
        "cache_groups.kv.overlap",
        "attention.swa.heads",
        "attention.swa.rope",
        "ffn.hash.topk",
        "layers[1].counts",
        "speculative.mtp.ffn",
    ]


def test_a_bad_number_does_not_hide_an_unused_group() -> None:
    spare = "  spare: {kind: compressor_state, of: kv}\n  window: {kind"
    lines = problems(changed(("  window: {kind", spare), ("heads: 4", "heads: 0")))
    assert [line.split(": ")[1] for line in lines] == ["cache_groups.spare", "attention.swa.heads"]


def test_a_lost_reference_makes_nothing_look_unused() -> None:
    assert len(problems(changed(("rope: far", "ropes: far")))) == 1
    assert len(problems(changed(("attention: [csa, hca]", "attentions: [csa, hca]")))) == 1
    assert len(problems(changed(("layers:\n", "layer:\n")))) == 1


def test_an_inherited_fault_is_reported_once_where_it_stands() -> None:
    assert len(problems(changed(("o_lora_rank: 8", "o_lora_rank: eight")))) == 1
    assert len(problems(changed(("    o_lora_rank: 8\n", "")))) == 1
    assert len(problems(changed(("o_groups: 2", "o_groups: 3")))) == 1


def test_like_in_a_circle() -> None:
    text = changed(
        ("    kind: sliding_attention\n", "    like: hca\n    kind: sliding_attention\n")
    )
    lines = problems(text)
    assert [line.split(": ", 1)[1] for line in lines] == [
        "attention.swa.like: a circle: swa -> hca -> swa"
    ]


def test_experts_in_fp4_need_whole_groups_of_inputs() -> None:
    text = changed(
        ("{linear: bf16}", "{experts: fp4}"),
        ("hidden_size: 64", "hidden_size: 72"),
        ("intermediate: 32", "intermediate: 48"),
    )
    lines = problems(text)
    assert [line.split(" (")[0] for line in lines] == [
        "3:14: hidden_size: does not fit fp4 experts",
        "40:61: ffn.hash.intermediate: does not fit fp4 experts",
    ]


def test_readers_of_an_fp8_ds_group_must_rotate_alike() -> None:
    # Row dims follow head_dim, so that only the rotated width is at fault.
    text = SMALL.replace("dim: 32", "dim: 72").replace("head_dim: 72", "head_dim: 72")
    text = text.replace("main: {theta: 10000, dim: 8}", "main: {theta: 10000, dim: 4}")
    text = text.replace("window: 16, row: {dim: 72}", "window: 16, row: {dim: 72, format: fp8_ds}")
    lines = problems(text)
    assert any("its readers rotate 4 and 8 channels" in line for line in lines)


def heads_of(lines: list[str]) -> list[str]:
    """The lines up to what was found and expected."""
    return [line.split(" (")[0] for line in lines]


def test_states_of_each_others_groups() -> None:
    text = changed(("state: kv_state", "state: x"), ("_state: keys_state}", "_state: kv_state}"))
    assert heads_of(problems(text.replace("state: x", "state: keys_state"))) == [
        "33:53: attention.csa.caches.state: the state of another group",
        "33:91: attention.csa.caches.index_state: the state of another group",
    ]


def test_one_group_in_two_roles() -> None:
    lines = heads_of(problems(changed(("index: keys,", "index: kv,"))))
    assert "33:70: attention.csa.caches.index: the same group as caches.compressed" in lines


def test_an_empty_list_of_names() -> None:
    lines = heads_of(problems(changed(("[csa, hca]", "[]"))))
    assert "44:6: layers[1].attention: an empty list" in lines


def test_entry_names_are_plain() -> None:
    lines = problems(SMALL.replace("far_kv", "far.kv").replace("far_state", "2nd"))
    assert heads_of(lines) == [
        "16:3: cache_groups.'far.kv': not a valid name",
        "17:3: cache_groups.2nd: not a valid name",
    ]


def test_index_keys_hold_the_rotated_channels() -> None:
    text = changed(("row: {dim: 16}", "row: {dim: 4}"), ("dim: 16, topk", "dim: 4, topk"))
    assert heads_of(problems(text)) == ["32:30: attention.csa.indexer.dim: too small"]


def test_a_long_list_of_faults_is_cut() -> None:
    text = SMALL + "".join(f"extra_{i}: 1\n" for i in range(150))
    with pytest.raises(SpecError) as caught:
        load_spec_text(text, "s.yaml")
    lines = str(caught.value).split("\n")
    assert lines[0] == "s.yaml: 150 problems"
    assert lines[-1] == "... and 50 more"
    assert len(lines) == 102
