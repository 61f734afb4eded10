"""FP4 weights as operands of a product: decoded in registers, in the layout that the product wants.

In bf16 a code's sign, exponent and mantissa bits, put where bf16 has its own, are its value times
2^-126, 0.5 as a subnormal. So a mask, a multiplication that moves two codes' bits at once, and one
product with the scale decode two weights. The scale is taken times 2^100, which leaves the exact
result in the range of bf16 for scales from 2^-100 to 2^27 (the published checkpoints' are near
2^-10); larger ones become NaN, so they show. `FACTOR` takes the two powers back from the sum.

Decoding is what limits these products: see `benchmarks/kernels.py`.

Shape suffixes: N outputs, M activations, K inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from v4graph_kernels.numerics import from_e2m1, load_scale

FACTOR = tl.constexpr(2.0**26)
"""What a sum of products by `fp4_tile` is to be multiplied by in bf16 with e8m0 scales."""

# Low nibbles, then high ones, of four bytes: two bf16 a register.
_DECODE = tl.constexpr("""
{
.reg .b32 ab, cd, t;
prmt.b32 ab, $4, 0, 0x4140;
prmt.b32 cd, $4, 0, 0x4342;
and.b32 t, ab, 0x000F000F;
mul.lo.u32 t, t, 0x1040;
and.b32 t, t, 0x81C081C0;
mul.rn.bf16x2 $0, t, $5;
and.b32 t, cd, 0x000F000F;
mul.lo.u32 t, t, 0x1040;
and.b32 t, t, 0x81C081C0;
mul.rn.bf16x2 $1, t, $6;
and.b32 t, ab, 0x00F000F0;
mul.lo.u32 t, t, 0x104;
and.b32 t, t, 0x81C081C0;
mul.rn.bf16x2 $2, t, $5;
and.b32 t, cd, 0x00F000F0;
mul.lo.u32 t, t, 0x104;
and.b32 t, t, 0x81C081C0;
mul.rn.bf16x2 $3, t, $6;
}
""")


@triton.jit
def fp4_tile(
    rows, scales, n_in, start, K: tl.constexpr, dtype: tl.constexpr,
    E8M0: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weights of inputs [start, start + BLOCK_K): even ones and odd ones, `[N, BLOCK_K / 2]` each.

    Low nibbles are even inputs, high ones odd; a scale stands for 32 inputs, which are 16 bytes.
    With EVEN all rows and inputs are there, otherwise those beyond are 0.
    """
    FAST: tl.constexpr = (dtype == tl.bfloat16) and E8M0
    G: tl.constexpr = BLOCK_K // 32
    byte = tl.arange(0, BLOCK_K // 2)[None, :]
    g = tl.arange(0, G)[None, :]
    code_at = rows[:, None] + start // 2 + byte
    scale_at = scales[:, None] + start // 32 + g
    if EVEN:
        code = tl.load(code_at)
        g_in = tl.full((BLOCK_N, G), True, tl.int1)
    else:
        code = tl.load(code_at, mask=n_in[:, None] & (start + 2 * byte < K), other=0)
        g_in = n_in[:, None] & (start + 32 * g < K)
    if FAST:
        if EVEN:
            exponent = tl.load(scale_at).to(tl.int32)
        else:
            exponent = tl.load(scale_at, mask=g_in, other=0).to(tl.int32)
        bits = tl.where(exponent > 154, 0x7FC0, (exponent + 100) << 7)
        s = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        s = load_scale(scale_at, g_in, E8M0)
    s = tl.reshape(tl.broadcast_to(s[:, :, None], (BLOCK_N, G, 16)), (BLOCK_N, BLOCK_K // 2))
    if FAST:
        even, odd = tl.inline_asm_elementwise(
            _DECODE, "=r,=r,=r,=r,r,r,r", [code, s], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        even = (from_e2m1(code.to(tl.int32) & 15) * s).to(dtype)
        odd = (from_e2m1(code.to(tl.int32) >> 4) * s).to(dtype)
    return even, odd


@triton.jit
def load_half(
    rows, at, half: tl.constexpr, m_in, EVEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Activations [at, at + BLOCK) of a half of `half` channels, `[M, BLOCK]`.

    With EVEN rows of padding are read too: a column of the product sees its own row only.
    """
    c = at + tl.arange(0, BLOCK)[None, :]
    if EVEN:
        return tl.load(rows[:, None] + c)
    return tl.load(rows[:, None] + c, mask=m_in[:, None] & (c < half), other=0.0)


@triton.jit
def add_products(acc, even, odd, x_even, x_odd):
    """`acc [N, M]` plus even weights times even activations and odd times odd."""
    acc = tl.dot(even, tl.trans(x_even), acc, input_precision="ieee")
    return tl.dot(odd, tl.trans(x_odd), acc, input_precision="ieee")


@triton.jit
def gate_up(
    x_even, x_odd, m_in, w_gate, w_up, s_gate, s_up, n_in, D: tl.constexpr, clamp,
    CLAMP: tl.constexpr, E8M0: tl.constexpr, EVEN: tl.constexpr,
    M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`silu(gate) * up`, clamped, of BLOCK_N channels and M activations, float32 `[N, M]`.

    Args:
        x_even, x_odd: pointers to each activation's even and odd channels. w_gate, w_up, s_gate,
        s_up: to each channel's codes and scales.
    """
    dtype: tl.constexpr = x_even.dtype.element_ty
    gate = tl.zeros((BLOCK_N, M), tl.float32)
    up = tl.zeros((BLOCK_N, M), tl.float32)
    for start in range(0, D, BLOCK_K):
        even, odd = fp4_tile(
            w_gate, s_gate, n_in, start, D, dtype, E8M0, EVEN, BLOCK_N, BLOCK_K
        )  # fmt: skip
        even2, odd2 = fp4_tile(w_up, s_up, n_in, start, D, dtype, E8M0, EVEN, BLOCK_N, BLOCK_K)
        e = load_half(x_even, start // 2, D // 2, m_in, EVEN, BLOCK_K // 2)
        o = load_half(x_odd, start // 2, D // 2, m_in, EVEN, BLOCK_K // 2)
        gate = add_products(gate, even, odd, e, o)
        up = add_products(up, even2, odd2, e, o)
    if (dtype == tl.bfloat16) and E8M0:
        gate, up = gate * FACTOR, up * FACTOR
    if CLAMP:
        # Comparisons leave a NaN in place, where a minimum might drop it.
        gate = tl.where(gate > clamp, clamp, gate)
        up = tl.where(up > clamp, clamp, tl.where(up < -clamp, -clamp, up))
    return gate * tl.sigmoid(gate) * up


@triton.jit
def down(
    h_even, h_odd, m_in, w, s, n_in, J: tl.constexpr,
    E8M0: tl.constexpr, EVEN: tl.constexpr,
    M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of M hidden activations, float32 `[N, M]`; arguments as in `gate_up`."""
    dtype: tl.constexpr = h_even.dtype.element_ty
    acc = tl.zeros((BLOCK_N, M), tl.float32)
    for start in range(0, J, BLOCK_K):
        even, odd = fp4_tile(w, s, n_in, start, J, dtype, E8M0, EVEN, BLOCK_N, BLOCK_K)
        e = load_half(h_even, start // 2, J // 2, m_in, EVEN, BLOCK_K // 2)
        o = load_half(h_odd, start // 2, J // 2, m_in, EVEN, BLOCK_K // 2)
        acc = add_products(acc, even, odd, e, o)
    if (dtype == tl.bfloat16) and E8M0:
        acc *= FACTOR
    return acc
