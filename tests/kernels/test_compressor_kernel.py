"""Closing compression windows: state rows, pooling, and the compressed row in every format."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests.support.kernel_error import assert_as_exact
from tests.support.pools import empty_pool
from v4graph.ops.custom.compressor import close_windows
from v4graph_kernels import load

PAGE_ROWS, PAGES, STATES = 4, 5, 400
NAN = float("nan")


@dataclass
class Step:
    """Arguments of one call, pools included."""

    args: dict[str, Tensor]
    kwargs: dict[str, object]

    def run(self, device: str | None) -> tuple[Tensor, Tensor]:
        """(state pool, pool) after the kernel on `device`, or after the reference without one."""
        args = {name: a.to(device or "cpu", copy=True) for name, a in self.args.items()}
        op = load("compressor").close_windows if device else close_windows
        op(*args.values(), **self.kwargs)
        return args["state_pool"].cpu(), args["pool"].cpu()

    def but(self, **changed: Tensor) -> Step:
        return replace(self, args={**self.args, **changed})


def step(
    ratio: int,
    overlap: bool,
    dim: int = 32,
    rope: int = 8,
    row_format: str = "f32",
    dtype: torch.dtype = torch.float32,
    lengths: tuple[tuple[int, int], ...] = ((0, 9), (6, 3), (5, 1)),
) -> Step:
    """Requests of (computed, new) tokens and two padded rows; the last window is padding."""
    span, width = ratio * (1 + overlap), dim * (1 + overlap)
    positions, state_slots, read, closing = [], [], [], []
    base = 5
    for computed, new in lengths:
        positions += range(computed, computed + new)
        state_slots += range(base + computed, base + computed + new)
        for last in range(ratio - 1, computed + new, ratio):
            if last >= computed:
                closing.append(last)
                rows = range(last - span + 1, last + 1)
                read.append([base + p if p >= 0 else -1 for p in rows])
        base += computed + new
    positions, state_slots = [*positions, 0, 0], [*state_slots, 0, 0]
    closing, read = [*closing, -1], [*read, [-1] * span]
    T, C = len(positions), len(closing)
    assert base <= STATES
    assert C < PAGE_ROWS * (PAGES - 1)
    state_pool = torch.randn(STATES, 2 * width)
    state_pool[0] = NAN
    slots = PAGE_ROWS + torch.randperm(PAGE_ROWS * (PAGES - 1))[:C]
    slots[-1] = 0
    args = {
        "projected": torch.randn(T, 2 * width + 12)[:, 4 : 4 + 2 * width] * 3,
        "ape": torch.randn(ratio, width),
        "positions": torch.tensor(positions),
        "state_slots": torch.tensor(state_slots),
        "state_pool": state_pool,
        "read_slots": torch.tensor(read),
        "closing_positions": torch.tensor(closing),
        "freqs": 1.0 / 10 ** torch.linspace(0, 3, rope // 2),
        "norm_weight": (1 + 0.2 * torch.randn(dim)).to(dtype),
        "slots": slots,
        "pool": empty_pool(row_format, PAGES, PAGE_ROWS, dim, rope),
    }
    own = {"row_format": row_format, "page_rows": PAGE_ROWS, "dtype": dtype}
    return Step(args, {"overlap": overlap, "eps": 1e-6, **own})


def exact_rows(s: Step) -> Tensor:
    """The rows of all windows, `[C, dim]` in float64."""
    a = {name: t.double() if t.is_floating_point() else t for name, t in s.args.items()}
    width, ratio, dim = a["ape"].shape[1], len(a["ape"]), len(a["norm_weight"])
    states = a["state_pool"].clone()
    new = a["projected"].clone()
    new[:, width:] += a["ape"][a["positions"] % ratio]
    states[a["state_slots"]] = new
    out = []
    for read, last in zip(a["read_slots"], a["closing_positions"].tolist(), strict=True):
        rows = states[read.clamp_min(0)]
        kv, score = rows[:, :width], rows[:, width:]
        if width > dim:
            kv = torch.cat((kv[:ratio, :dim], kv[ratio:, dim:]))
            score = torch.cat((score[:ratio, :dim], score[ratio:, dim:]))
        kv, score = kv[read >= 0], score[read >= 0]
        row = (score.softmax(0) * kv).sum(0)
        row = row * (row.square().mean() + 1e-6).rsqrt() * a["norm_weight"]
        angle = max(last - ratio + 1, 0) * a["freqs"]
        turned = row.clone()
        nope = dim - 2 * len(angle)
        even, odd = row[nope::2], row[nope + 1 :: 2]
        turned[nope::2] = even * angle.cos() - odd * angle.sin()
        turned[nope + 1 :: 2] = odd * angle.cos() + even * angle.sin()
        out.append(turned)
    return torch.stack(out)


SHAPES = [(4, True), (4, False), (6, True), (20, False)]
LONG = ((0, 21), (35, 6), (21, 1))


@pytest.fixture(params=["one launch", "two launches"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """State rows written beside the windows that read them, and before."""
    if request.param == "two launches":
        monkeypatch.setattr(load("compressor"), "FEW_TOKENS", 0)
    return request.param


@pytest.mark.parametrize(("ratio", "overlap"), SHAPES)
def test_windows_are_as_exact_as_the_reference(
    device: str, path: str, ratio: int, overlap: bool
) -> None:
    """Windows of this step alone, with rows of earlier ones, and the first of a sequence."""
    s = step(ratio, overlap, lengths=LONG)
    states, got = s.run(device)
    expected_states, expected = s.run(None)
    written = s.args["slots"][:-1]
    assert len(written) >= 2
    assert_as_exact(got[written], expected[written], exact_rows(s)[:-1], factor=3.0)
    assert torch.equal(states[1:], expected_states[1:])


@pytest.mark.parametrize("row_format", ["f32", "bf16", "fp8_ds", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_format(device: str, row_format: str, dtype: torch.dtype) -> None:
    """At V4's width. Values that lie between two steps of a format may differ by one."""
    dim = 128 if row_format == "fp8" else 512
    s = step(4, True, dim, 64, row_format, dtype)
    _, got = s.run(device)
    _, expected = s.run(None)
    # Rows of padding come last in the order of pages; page 0 is the reference's to fill.
    skipped = 1 if got.dtype is torch.uint8 else PAGE_ROWS
    got, expected, before = (t[skipped:].contiguous() for t in (got, expected, s.args["pool"]))
    if row_format == "f32" and dtype is torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    else:
        got, expected, before = (t.view(torch.uint8) for t in (got, expected, before))
        assert (got != expected).float().mean() < 2e-3
    assert not torch.equal(got, before)


def test_padding_and_ids_outside_the_pools_touch_nothing(device: str, path: str) -> None:
    s = step(4, True)
    T, C = len(s.args["positions"]), len(s.args["slots"])
    outside = torch.tensor([0, -1, -(2**40), 2**40, STATES])
    s = s.but(state_slots=outside.repeat(T)[:T], slots=outside.repeat(C)[:C])
    states, pool = s.run(device)
    assert torch.equal(states[1:], s.args["state_pool"][1:])
    assert states[0].isnan().all()
    assert pool.isnan().all()


@pytest.mark.parametrize("outside", [STATES, 2**40, -(2**40)])
def test_ids_outside_the_state_pool_are_not_read(device: str, path: str, outside: int) -> None:
    """They count as rows before the sequence."""
    s = step(4, True)
    read = s.args["read_slots"]
    _, expected = s.run(device)
    _, got = s.but(read_slots=torch.where(read < 0, outside, read)).run(device)
    assert torch.equal(got[PAGE_ROWS:].nan_to_num(), expected[PAGE_ROWS:].nan_to_num())


def test_a_nan_shows_in_its_window_alone(device: str, path: str) -> None:
    s = step(4, False)
    s.args["projected"][1, 0] = NAN
    _, got = s.run(device)
    slots = s.args["slots"]
    assert got[slots[0]].isnan().any()
    assert got[slots[1:-1]].isfinite().all()


@pytest.mark.filterwarnings("ignore:overflow encountered in subtract")
def test_extreme_scores(device: str, path: str) -> None:
    """The largest score takes all, however far apart they are."""
    s = step(4, False)
    width = s.args["ape"].shape[1]
    s.args["projected"][:3, width:] = -3e38
    s.args["projected"][3, width:] = 3e38
    s.args["projected"][1, width:] = -float("inf")
    _, got = s.run(device)
    _, expected = s.run(None)
    slot = s.args["slots"][0]
    torch.testing.assert_close(got[slot], expected[slot])


def test_far_positions_turn_exactly(device: str) -> None:
    """A million radians: the reduction of the angle counts."""
    s = step(4, False, lengths=((0, 8),))
    far = torch.tensor([1_048_571, 4_099, -1])
    s = s.but(closing_positions=far)
    _, got = s.run(device)
    _, expected = s.run(None)
    rows = s.args["slots"][:2]
    torch.testing.assert_close(got[rows], expected[rows], rtol=1e-4, atol=1e-4)


def test_nothing_to_close_and_nothing_to_write(device: str, path: str) -> None:
    s = step(4, True)
    none = {n: s.args[n][:0] for n in ("read_slots", "closing_positions", "slots")}
    states, pool = s.but(**none).run(device)
    assert torch.equal(states[1:], s.run(None)[0][1:])
    assert pool.isnan().all()
    empty = {n: s.args[n][:0] for n in ("projected", "positions", "state_slots")}
    states, _ = s.but(**none, **empty).run(device)
    assert torch.equal(states[1:], s.args["state_pool"][1:])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("read_slots", r"read_slots: \(4, 7\), expected \(4, 8\)"),
        ("projected", r"projected: \(15, 127\), expected \(15, 128\)"),
        ("state_pool", r"state_pool: \(400, 127\), expected \(400, 128\)"),
    ],
)
def test_other_shapes_are_refused(device: str, name: str, told: str) -> None:
    s = step(4, True)
    with pytest.raises(ValueError, match=told):
        s.but(**{name: s.args[name][:, :-1]}).run(device)


def test_an_unknown_row_format_is_refused(device: str) -> None:
    s = step(4, True, row_format="fp8_ds")
    s.kwargs["row_format"] = "fp4"
    with pytest.raises(ValueError, match="pool: uint8 rows of format 'fp4'"):
        s.run(device)


@pytest.mark.parametrize("row_format", ["f32", "fp8_ds"])
def test_operator_is_registered_soundly(row_format: str) -> None:
    s = step(4, True, row_format=row_format)
    s.args["state_pool"][0] = 0.0
    torch.library.opcheck(close_windows, tuple(s.args.values()), s.kwargs)
