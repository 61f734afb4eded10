"""Queries and cache rows in one launch, and the rotation back, against references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.kernel_error import assert_as_exact
from tests.support.pools import empty_pool
from v4graph.ops.custom.heads import qkv_rows, unrope
from v4graph.ops.custom.rows import write_kv_rows
from v4graph_kernels import load

PAGE_ROWS, PAGES = 4, 5
SLOTS = [7, 0, -1, 19, 4, 2**40, 12]
T = len(SLOTS)
NAN = float("nan")


def step(
    heads: int, dim: int, index_heads: int, index_dim: int, rope: int, dtype: torch.dtype
) -> tuple[list[Tensor], dict[str, object]]:
    """Projections (queries and rows are slices of wider products), angles, slots; no pool yet."""
    width = heads * dim + index_heads * index_dim
    queries = torch.randn(T, width + 16).to(dtype)[:, 8 : 8 + width]
    kv = (torch.randn(T, dim + 24) * torch.logspace(-3, 2, T)[:, None]).to(dtype)[:, 8 : 8 + dim]
    angle = torch.randn(T, rope // 2) * 10
    norm = (1 + 0.2 * torch.randn(dim)).to(dtype)
    args = [queries, kv, norm, angle.cos(), angle.sin(), torch.tensor(SLOTS)]
    own = {"heads": heads, "index_heads": index_heads, "index_dim": index_dim}
    return args, {**own, "eps": 1e-6, "rope_dim": rope, "page_rows": PAGE_ROWS}


def run(device: str, args: list[Tensor], pool: Tensor, kwargs: dict) -> tuple[Tensor, ...]:
    got = pool.to(device, copy=True)
    outs = load("heads").qkv_rows(*(a.to(device) for a in args), got, **kwargs)
    return *(o.cpu() for o in outs), got.cpu()


def within(args: list[Tensor]) -> list[Tensor]:
    """The same with slots that a reference accepts."""
    return [*args[:-1], torch.where(args[-1] < PAGES * PAGE_ROWS, args[-1], 0)]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` in float64."""
    x, nope = x.double(), x.shape[-1] - 2 * cos.shape[-1]
    co, si = cos.double()[:, None], sin.double()[:, None]
    even, odd = x[..., nope::2], x[..., nope + 1 :: 2]
    out = x.clone()
    out[..., nope::2], out[..., nope + 1 :: 2] = even * co - odd * si, odd * co + even * si
    return out


SHAPES = [(3, 512, 20, 128, 64), (5, 96, 0, 0, 32), (9, 16, 3, 64, 8)]


@pytest.mark.parametrize(("heads", "dim", "index_heads", "index_dim", "rope"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_as_exact_as_the_reference(
    device: str, dtype: torch.dtype, heads: int, dim: int, index_heads: int, index_dim: int,
    rope: int,
) -> None:  # fmt: skip
    args, kwargs = step(heads, dim, index_heads, index_dim, rope, dtype)
    pool = empty_pool("f32", PAGES, PAGE_ROWS, dim, rope)
    q, index_q, _ = run(device, args, pool, kwargs)
    expected_q, expected_index_q = qkv_rows(*within(args), pool.clone(), **kwargs)
    raw, (cos, sin) = args[0].double(), args[3:5]
    heads_q = raw[:, : heads * dim].unflatten(-1, (heads, dim))
    heads_q = heads_q * (heads_q.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert_as_exact(q, expected_q, turned(heads_q, cos, sin))
    assert index_q.shape == (T, index_heads, index_dim)
    if index_heads:
        own = raw[:, heads * dim :].unflatten(-1, (index_heads, index_dim))
        assert_as_exact(index_q, expected_index_q, turned(own, cos, sin))


@pytest.mark.parametrize("row_format", ["f32", "bf16", "fp8_ds"])
def test_rows_are_those_of_write_kv_rows(device: str, row_format: str) -> None:
    """The same function writes them: equal bytes, padding and foreign ids included."""
    args, kwargs = step(3, 512, 2, 128, 64, torch.float32)
    pool = empty_pool(row_format, PAGES, PAGE_ROWS, 512, 64)
    _, _, got = run(device, args, pool, kwargs)
    alone = pool.to(device, copy=True)
    own = {name: kwargs[name] for name in ("eps", "rope_dim", "page_rows")}
    load("cache_rows").write_kv_rows(*(a.to(device) for a in args[1:]), alone, **own)
    assert torch.equal(got.view(torch.uint8), alone.cpu().view(torch.uint8))
    assert not torch.equal(got.view(torch.uint8), pool.view(torch.uint8))


def test_the_reference_is_write_kv_rows_too() -> None:
    args, kwargs = step(1, 96, 0, 0, 32, torch.float32)
    pool, alone = (empty_pool("fp8_ds", PAGES, PAGE_ROWS, 96, 32) for _ in range(2))
    qkv_rows(*within(args), pool, **kwargs)
    own = {name: kwargs[name] for name in ("eps", "rope_dim", "page_rows")}
    write_kv_rows(*within(args)[1:], alone, **own)
    assert torch.equal(pool, alone)


def test_a_head_does_not_depend_on_its_neighbours(device: str) -> None:
    args, kwargs = step(3, 32, 2, 16, 8, torch.float32)
    pool = empty_pool("f32", PAGES, PAGE_ROWS, 32, 8)
    clean, clean_index, _ = run(device, args, pool, kwargs)
    args[0][2, 40], args[0][3, -1] = NAN, NAN
    q, index_q, _ = run(device, args, pool, kwargs)
    assert q[2, 1].isnan().all()
    assert index_q[3, 1].isnan().sum() == 2
    q[2, 1], index_q[3, 1] = clean[2, 1], clean_index[3, 1]
    assert torch.equal(q, clean)
    assert torch.equal(index_q, clean_index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim", "rope"), [(20, 512, 64), (3, 24, 12), (1, 8, 8)])
def test_unrope(device: str, dtype: torch.dtype, heads: int, dim: int, rope: int) -> None:
    """As exact as the reference; other channels, and memory between heads, stay."""
    whole = torch.randn(T, heads, dim + 8).to(dtype)
    angle = torch.randn(T, rope // 2) * 10
    expected, got = whole.clone(), whole.to(device, copy=True)
    unrope(expected[..., :dim], angle.cos(), angle.sin())
    load("heads").unrope(got[..., :dim], angle.cos().to(device), angle.sin().to(device))
    got = got.cpu()
    kept = torch.ones(dim + 8, dtype=torch.bool)
    kept[dim - rope : dim] = False
    assert torch.equal(got[..., kept], whole[..., kept])
    exact = turned(whole[..., :dim], angle.cos(), -angle.sin())
    assert_as_exact(got[..., :dim], expected[..., :dim], exact)


def test_wrong_shapes_are_refused(device: str) -> None:
    args, kwargs = step(3, 32, 2, 16, 8, torch.float32)
    pool = empty_pool("f32", PAGES, PAGE_ROWS, 32, 8)
    with pytest.raises(ValueError, match=r"queries: \(7, 128\), expected \(7, 160\)"):
        run(device, args, pool, {**kwargs, "heads": 4})
    with pytest.raises(ValueError, match=r"cos: \(7, 4\), expected \(7, 3\)"):
        run(device, args, pool, {**kwargs, "rope_dim": 6})
    with pytest.raises(ValueError, match="rope_dim 8: of 4 channels, both even"):
        load("heads").unrope(
            torch.zeros(T, 1, 4, device=device), *(a.to(device) for a in args[3:5])
        )


@pytest.mark.parametrize("index_heads", [0, 2])
def test_operators_are_registered_soundly(index_heads: int) -> None:
    args, kwargs = step(3, 32, index_heads, 16, 8, torch.float32)
    pool = empty_pool("fp8_ds", PAGES, PAGE_ROWS, 32, 8)
    torch.library.opcheck(qkv_rows, (*within(args), pool), kwargs)
    torch.library.opcheck(unrope, (torch.randn(T, 3, 32), *args[3:5]))
