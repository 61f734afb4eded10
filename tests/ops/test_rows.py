"""FP8 rows: byte layout, exact scales, and what quantisation loses."""

from __future__ import annotations

import math

import pytest
import torch

from v4graph.ops.rows import (
    fp8_ds_bytes,
    pack_fp8_ds,
    power_of_two_exponent,
    read_fp8_ds_rows,
    read_fp8_rows,
    unpack_fp8_ds,
    write_fp8_ds_rows,
    write_fp8_rows,
)


def test_row_sizes_are_the_published_ones() -> None:
    assert fp8_ds_bytes(512, 64) == (576, 8)
    assert sum(fp8_ds_bytes(512, 64)) == 584


@pytest.mark.parametrize("n", [-22, -3, 0, 7])
def test_scale_is_the_least_power_that_fits(n: int) -> None:
    limit = torch.tensor(448.0 * 2.0**n)
    above = torch.nextafter(limit, torch.tensor(math.inf))
    assert power_of_two_exponent(limit) == n
    assert power_of_two_exponent(above) == n + 1


def test_tiny_groups_take_the_floor() -> None:
    expected = math.ceil(math.log2(1e-4 / 448))
    assert power_of_two_exponent(torch.tensor([0.0, 1e-9, 1e-4])).tolist() == [expected] * 3


def test_rotated_channels_are_exact_in_bf16_and_the_others_close() -> None:
    x = torch.randn(5, 512).bfloat16() * torch.logspace(-3, 3, 5)[:, None].bfloat16()
    data, scales = pack_fp8_ds(x, 64)
    assert data.shape == (5, 576)
    assert scales.shape == (5, 8)
    assert not scales[:, 7].any()
    back = unpack_fp8_ds(data, scales, 64)
    assert torch.equal(back[:, 448:], x[:, 448:].float())
    top = x[:, :448].float().unflatten(1, (7, 64)).abs().amax(2, keepdim=True)
    lost = (back - x.float())[:, :448].unflatten(1, (7, 64)).abs() / top
    # Steps are 32 at most below 448, and a scale brings the largest value above 224.
    assert lost.max() <= 16 / 224


def test_every_code_survives_a_round_trip() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    x = torch.nn.functional.pad(codes.view(torch.float8_e4m3fn).float(), (0, 2))
    # Every group of 64 needs a large value, or its scale would shrink.
    x = x.view(4, 64).clone()
    x[:, 63] = 448
    data, scales = pack_fp8_ds(x.flatten()[None], 0)
    assert torch.equal(unpack_fp8_ds(data, scales, 0)[0], x.flatten())


def test_layout_of_a_page() -> None:
    """Data of all rows first, then scales; the byte offsets of row 3 on page 1 of 4 rows."""
    pool = torch.zeros(2, 4 * 584 + 100, dtype=torch.uint8)
    row = torch.randn(1, 512)
    write_fp8_ds_rows(pool, torch.tensor([7]), row, 64, 4)
    data, scales = pack_fp8_ds(row, 64)
    assert torch.equal(pool[1, 3 * 576 : 4 * 576], data[0])
    assert torch.equal(pool[1, 4 * 576 + 24 : 4 * 576 + 31], scales[0, :7])
    pool[1, 3 * 576 : 4 * 576] = 0
    pool[1, 4 * 576 + 24 : 4 * 576 + 32] = 0
    assert not pool.any()


def test_reading_finds_what_was_written_and_zeros_for_none() -> None:
    pool = torch.full((3, 4 * 584 + 100), 0x7F, dtype=torch.uint8)
    rows, slots = torch.randn(5, 512), torch.tensor([4, 11, 7, 9, 5])
    write_fp8_ds_rows(pool, slots, rows, 64, 4)
    got = read_fp8_ds_rows(pool, torch.tensor([[9, -1], [5, 4]]), 512, 64, 4)
    expected = unpack_fp8_ds(*pack_fp8_ds(rows, 64), 64)
    assert torch.equal(got[0, 0], expected[3])
    assert torch.equal(got[1], expected[[4, 0]])
    assert not got[0, 1].any()


def test_index_rows_have_132_bytes() -> None:
    pool = torch.full((2, 4 * 132), 0x7F, dtype=torch.uint8)
    rows, slots = torch.randn(2, 128) * 50, torch.tensor([6, 4])
    write_fp8_rows(pool, slots, rows, 4)
    scale = pool[1, 4 * 128 :].view(torch.float32)
    assert torch.equal(scale[[2, 0]].log2(), scale[[2, 0]].log2().round())
    got = read_fp8_rows(pool, torch.tensor([6, 4, -1]), 128, 4)
    assert (got[:2] - rows).abs().max() <= rows.abs().max() / 14
    assert not got[2].any()
    assert (pool[0] == 0x7F).all()
