"""Products with stored FP8 and FP4 weights against float64, in either format of scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.kernel_error import assert_as_exact, relative_error
from v4graph.ops import quantised
from v4graph.ops.custom import quantised as ops
from v4graph.ops.quantised import fp4_values, fp8_values
from v4graph_kernels import load

SCALES = ["e8m0", "u8", "f32"]


def random_scale(shape: tuple[int, ...], scale_format: str) -> Tensor:
    """Scales about 2^-7; float32 ones are no powers of two."""
    if scale_format == "f32":
        return torch.rand(shape) * 2**-6 + 2**-8
    byte = torch.randint(117, 124, shape, dtype=torch.uint8)
    return byte if scale_format == "u8" else byte.view(torch.float8_e8m0fnu)


def fp8_weight(o: int, i: int, scale_format: str) -> tuple[Tensor, Tensor]:
    weight = (torch.randn(o, i) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    return weight, random_scale((-(-o // 128), -(-i // 128)), scale_format)


def half(device: str) -> torch.dtype:
    """The interpreter multiplies bf16 wrongly, so it gets float16."""
    return torch.float16 if device == "cpu" else torch.bfloat16


def linear(device: str, *args: Tensor, name: str = "fp8_linear") -> Tensor:
    return getattr(load("fp8_linear"), name)(*(a.to(device) for a in args)).cpu()


@pytest.mark.parametrize("scale_format", SCALES)
@pytest.mark.parametrize(("m", "o", "i"), [(1, 40, 96), (3, 260, 129), (17, 128, 1100)])
def test_fp8_linear(device: str, scale_format: str, m: int, o: int, i: int) -> None:
    """Sides that are no multiples of 128, one part and several."""
    x = torch.randn(m, i + 8)[:, :i]
    weight, scale = fp8_weight(o, i, scale_format)
    exact = x.double() @ fp8_values(weight, scale).double().T
    expected = ops.fp8_linear(x, weight, scale)
    assert_as_exact(linear(device, x, weight, scale), expected, exact)


def test_fp8_linear_in_half_precision(device: str) -> None:
    x = torch.randn(5, 300).to(half(device))
    weight, scale = fp8_weight(72, 300, "f32")
    exact = x.double() @ fp8_values(weight, scale).double().T
    expected = ops.fp8_linear(x, weight, scale)
    assert_as_exact(linear(device, x, weight, scale), expected, exact)


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_grouped_fp8_linear(device: str, groups: int) -> None:
    x = torch.randn(4, groups, 200)
    weight, scale = fp8_weight(128 * groups, 200, "e8m0")
    values = fp8_values(weight, scale).double().unflatten(0, (groups, 128))
    exact = torch.einsum("mgi,goi->mgo", x.double(), values)
    got = linear(device, x, weight, scale, name="grouped_fp8_linear")
    assert_as_exact(got, ops.grouped_fp8_linear(x, weight, scale), exact)


def test_nan_codes_and_nan_scales_show(device: str) -> None:
    x = torch.randn(2, 256)
    weight, scale = fp8_weight(256, 256, "u8")
    scale[1, 0] = 255
    got = linear(device, x, weight, scale)
    assert got[:, 128:].isnan().all()
    assert got[:, :128].isfinite().all()


def experts(
    tokens: int, topk: int, dim: int, inner: int, scale_format: str, num_experts: int = 7
) -> list[Tensor]:
    """Arguments of `fp4_experts` but the clamp; the last two experts are chosen by nobody."""
    w13 = torch.randint(-128, 128, (num_experts, 2 * inner, dim // 2), dtype=torch.int8)
    w2 = torch.randint(-128, 128, (num_experts, dim, inner // 2), dtype=torch.int8)
    s13 = random_scale((num_experts, 2 * inner, dim // 32), scale_format)
    s2 = random_scale((num_experts, dim, inner // 32), scale_format)
    chosen = torch.stack([torch.randperm(num_experts - 2)[:topk] for _ in range(tokens)])
    return [torch.randn(tokens, dim) * 3, torch.rand(tokens, topk), chosen, w13, s13, w2, s2]


def exact_experts(args: list[Tensor], clamp: float | None) -> Tensor:
    x, weights, chosen, w13, s13, w2, s2 = args
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for k, e in enumerate(chosen[t].tolist()):
            if e < 0:
                continue
            gate, up = (fp4_values(w13[e], s13[e]).double() @ x[t].double()).chunk(2)
            if clamp is not None:
                gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
            h = (gate * gate.sigmoid() * up * weights[t, k]).to(x.dtype).double()
            out[t] += fp4_values(w2[e], s2[e]).double() @ h
    return out


def run_experts(device: str, args: list[Tensor], clamp: float | None) -> Tensor:
    return load("fp4_experts").fp4_experts(*(a.to(device) for a in args), clamp).cpu()


@pytest.mark.parametrize("scale_format", SCALES)
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_fp4_experts(device: str, scale_format: str, clamp: float | None) -> None:
    args = experts(6, 2, 96, 64, scale_format)
    got, expected = run_experts(device, args, clamp), ops.fp4_experts(*args, clamp)
    assert_as_exact(got, expected, exact_experts(args, clamp), factor=3.0)


def test_fp4_experts_in_half_precision(device: str) -> None:
    args = experts(3, 2, 64, 64, "e8m0")
    args[0] = (args[0] / 8).to(half(device))
    got, expected = run_experts(device, args, 10.0), ops.fp4_experts(*args, 10.0)
    assert_as_exact(got, expected, exact_experts(args, 10.0))


def test_more_pairs_of_one_expert_than_a_block(device: str) -> None:
    args = experts(19, 1, 32, 32, "e8m0")
    args[2].fill_(4)
    got, expected = run_experts(device, args, 10.0), ops.fp4_experts(*args, 10.0)
    assert_as_exact(got, expected, exact_experts(args, 10.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_code_has_its_value(device: str, dtype: torch.dtype) -> None:
    """One input is not zero, and the second matrix an identity: the codes come out one by one."""
    if device == "cpu" and dtype is torch.bfloat16:
        pytest.skip("the interpreter multiplies bf16 wrongly")
    args = experts(1, 1, 32, 32, "u8", num_experts=3)
    args[0] = args[0].to(dtype)
    x, weights, chosen, w13, s13, w2, s2 = args
    x.zero_()
    x[0, 1] = 2.0**7
    weights.fill_(1.0)
    chosen.zero_()
    codes = torch.arange(16, dtype=torch.uint8)
    w13.zero_()
    # Input 1 is a high nibble; up is 1 (code 2) throughout, gate is each code.
    w13[0, :16, 0] = (codes << 4).view(torch.int8)
    w13[0, 32:, 0] = 2 << 4
    s13.fill_(120)
    w2.zero_()
    for n in range(16):
        w2[0, n, n // 2] = 2 << (4 * (n % 2))
    s2.fill_(127)
    got = run_experts(device, args, None)[0, :16]
    table = torch.tensor(quantised.FP4_VALUES)
    assert relative_error(got, table * table.sigmoid()) < torch.finfo(dtype).eps


def test_only_touched_experts_are_read(device: str) -> None:
    """Scales of NaN in all others; an expert of -1 reads and adds nothing."""
    args = experts(4, 2, 64, 32, "u8")
    args[2][1, 0] = -1
    args[2][3] = -1
    touched = set(args[2].flatten().tolist())
    for e in set(range(7)) - touched:
        args[4][e], args[6][e] = 255, 255
    got, expected = run_experts(device, args, 10.0), ops.fp4_experts(*args, 10.0)
    assert_as_exact(got, expected, exact_experts(args, 10.0), factor=3.0)
    assert not got[3].any()


def test_experts_that_do_not_exist_are_ignored(device: str) -> None:
    args = experts(2, 2, 64, 32, "u8")
    args[2][0, 1] = -1
    clean = run_experts(device, args, 10.0)
    args[2][0, 1] = 2**40
    assert torch.equal(run_experts(device, args, 10.0), clean)


def test_wrong_arguments_are_refused(device: str) -> None:
    weight, scale = fp8_weight(128, 256, "f32")
    with pytest.raises(ValueError, match=r"scale: \(1, 1\), expected \(1, 2\)"):
        linear(device, torch.randn(2, 256), weight, scale[:, :1])
    with pytest.raises(ValueError, match=r"scale: torch\.float64, expected float32"):
        linear(device, torch.randn(2, 256), weight, scale.double())
    args = experts(2, 2, 64, 32, "u8")
    args[4] = args[4][..., :1]
    with pytest.raises(ValueError, match=r"s13: \(7, 64, 1\), expected \(7, 64, 2\)"):
        run_experts(device, args, None)


@pytest.mark.parametrize("scale_format", ["e8m0", "f32"])
def test_operators_are_registered_soundly(scale_format: str) -> None:
    weight, scale = fp8_weight(256, 96, scale_format)
    # Not test_schema: it multiplies its inputs, which torch cannot do in e4m3; nothing is mutated.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for op, args in (
        (ops.fp8_linear, (torch.randn(2, 96), weight, scale)),
        (ops.grouped_fp8_linear, (torch.randn(2, 2, 96), weight, scale)),
        (ops.fp4_experts, (*experts(2, 2, 64, 32, scale_format), 10.0)),
    ):
        torch.library.opcheck(op, args, test_utils=checks)
