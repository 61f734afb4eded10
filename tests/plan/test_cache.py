"""The cache account against public row sizes and totals."""

from __future__ import annotations

import pytest

from v4graph.errors import PlanError
from v4graph.plan.cache import cache_account, row_bytes
from v4graph.spec.load import load_spec
from v4graph.spec.model import ModelSpec

MI = 1_048_576
FLASH, PRO = "deepseek-v4-flash", "deepseek-v4-pro"


def gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


@pytest.mark.parametrize(
    ("row_format", "dim", "rope_dim", "dtype_bytes", "expected"),
    [
        ("fp8_ds", 512, 64, 2, 584),
        ("fp8", 128, 0, 2, 132),
        ("bf16", 512, 64, 4, 1024),
        ("f32", 512, 64, 2, 2048),
        ("model", 512, 64, 2, 1024),
        ("model", 512, 64, 4, 2048),
        ("fp8_ds", 64, 16, 2, 48 + 32 + 8),
        ("fp8_ds", 1024, 64, 2, 960 + 128 + 16),
    ],
)
def test_row_bytes(
    row_format: str, dim: int, rope_dim: int, dtype_bytes: int, expected: int
) -> None:
    assert row_bytes(row_format, dim, rope_dim, dtype_bytes) == expected


@pytest.mark.parametrize(
    ("name", "rows", "total", "per_token"),
    [
        (FLASH, None, "3.76", "3,850"),
        (PRO, None, "5.39", "5,511"),
        (FLASH, "fp8_ds", "3.76", "3,850"),
        (FLASH, "bf16", "6.72", "6,880"),
        (PRO, "bf16", "9.62", "9,848"),
    ],
)
def test_public_totals_of_a_full_sequence(
    name: str, rows: str | None, total: str, per_token: str
) -> None:
    account = cache_account(load_spec(name), MI, rows)
    assert gib(account.kv_bytes) == total
    assert f"{int(account.bytes_per_token):,}" == per_token


def test_public_totals_leave_states_out_and_windows_in() -> None:
    account = cache_account(load_spec(PRO), MI)
    assert gib(account.history_bytes) == "5.38"  # 5.39 needs the window rows
    assert account.kv_bytes - account.history_bytes == 61 * 128 * 584
    states = sum(g.sequence_bytes(MI) for g in account.sliding if g.kind == "compressor_state")
    assert account.sequence_bytes == account.kv_bytes + states


def test_page_bytes_are_those_of_public_engines() -> None:
    account = cache_account(load_spec(FLASH), MI)
    pages = {g.name: (g.page_rows, g.page_bytes) for g in account.groups}
    assert pages == {
        "window": (64, 37_440),
        "csa_kv": (64, 37_440),
        "csa_index": (64, 8_448),
        "csa_state": (4, 32_768),
        "csa_index_state": (4, 8_192),
        "hca_kv": (2, 1_728),
        "hca_state": (8, 32_768),
    }


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        (FLASH, {"window": 43, "csa_kv": 21, "csa_index": 21, "csa_state": 21, "hca_kv": 20}),
        (PRO, {"window": 61, "csa_kv": 30, "csa_index": 30, "csa_state": 30, "hca_kv": 31}),
        ("flash-slice8", {"window": 8, "csa_kv": 3, "hca_kv": 3}),
        ("flash-slice24", {"window": 24, "csa_kv": 11, "hca_kv": 11}),
    ],
)
def test_layers_of_a_group(name: str, layers: dict[str, int]) -> None:
    account = cache_account(load_spec(name), MI)
    assert {n: account.group(n).main_layers for n in layers} == layers


def test_draft_layers_count_only_with_speculation() -> None:
    plain = cache_account(load_spec(FLASH), MI)
    drafting = cache_account(load_spec(FLASH), MI, num_draft_tokens=3)
    assert [g.draft_layers for g in plain.groups] == [0] * 7
    assert {g.name for g in drafting.groups if g.draft_layers} == {"window"}
    assert drafting.group("window").num_layers == 44
    assert drafting.bytes_per_token == plain.bytes_per_token


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
def test_kept_ranges_survive_a_rejection(drafts: int) -> None:
    account = cache_account(load_spec(FLASH), MI, num_draft_tokens=drafts)
    width = drafts + 1
    assert account.group("window").kept_tokens == 127 + width
    assert account.group("csa_state").kept_tokens == 7 + width
    assert account.group("csa_index_state").kept_tokens == 7 + width
    assert account.group("hca_state").kept_tokens == 127 + width
    assert account.group("csa_kv").kept_tokens == 0


def test_rows_and_pages_of_short_sequences() -> None:
    account = cache_account(load_spec(FLASH), 0, num_draft_tokens=3)
    window, csa, hca = (account.group(n) for n in ("window", "csa_kv", "hca_kv"))
    assert [window.rows(n) for n in (0, 1, 130, 131, 500)] == [0, 1, 130, 131, 131]
    # 131 kept tokens may begin on the last token of a page: 1 + 64 + 64 + 2.
    assert [window.pages(n) for n in (0, 1, 64, 65, 500)] == [0, 1, 1, 2, 4]
    assert [csa.rows(n) for n in (0, 3, 4, 1023)] == [0, 0, 1, 255]
    assert [hca.rows(n) for n in (127, 128, 257)] == [0, 1, 2]
    assert [csa.pages(n) for n in (0, 1, 256, 257)] == [0, 1, 1, 2]
    assert account.sequence_bytes == account.sequence_page_bytes == 0


def test_pages_cover_rows_and_constants_bound_sliding_groups() -> None:
    for name in (FLASH, "v4-nano"):
        for tokens in (1, 100, 5000):
            account = cache_account(load_spec(name), tokens, num_draft_tokens=3)
            for g in account.groups:
                assert g.sequence_page_bytes(tokens) >= g.sequence_bytes(tokens)
            sliding = sum(g.sequence_page_bytes(tokens) for g in account.sliding)
            assert sliding <= account.constant_page_bytes
            assert account.constant_bytes <= account.constant_page_bytes


def test_override_leaves_states_alone_and_quantises_index_rows_whole() -> None:
    account = cache_account(load_spec("v4-nano"), 64, "fp8_ds", dtype_bytes=4)
    formats = {g.name: (g.row_format, g.row_bytes) for g in account.groups}
    assert formats["csa_kv"] == ("fp8_ds", 88)
    assert formats["csa_index"] == ("fp8", 36)
    assert formats["csa_state"] == ("f32", 2 * 2 * 64 * 4)
    assert formats["hca_state"] == ("f32", 2 * 64 * 4)


def test_model_rows_follow_the_compute_dtype() -> None:
    spec = load_spec("v4-nano")
    assert cache_account(spec, 64, dtype_bytes=2).group("window").row_bytes == 128
    assert cache_account(spec, 64, dtype_bytes=4).group("window").row_bytes == 256
    assert cache_account(spec, 64, "bf16", dtype_bytes=4).group("window").row_bytes == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": -1}, "tokens -1"),
        ({"tokens": 1, "num_draft_tokens": -1}, "num_draft_tokens -1"),
        ({"tokens": 1, "dtype_bytes": 8}, "dtype_bytes 8"),
        ({"tokens": 1, "row_format_override": "fp4"}, "'fp4': expected one of model, f32"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        cache_account(load_spec("v4-nano"), **arguments)


def test_a_page_must_hold_whole_rows() -> None:
    data = load_spec("v4-nano").model_dump()
    data["cache_groups"]["hca_kv"]["page_tokens"] = 48
    with pytest.raises(PlanError, match="page_tokens 48 is not a multiple of the ratio 32"):
        cache_account(ModelSpec.model_validate(data), 64)


def test_unknown_group_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        cache_account(load_spec("v4-nano"), 1).group("nope")
