"""Number formats as integer arithmetic: exact, and the same on a GPU and in the interpreter.

The interpreter of Triton 3.6 rounds wrongly when it casts to e4m3 (a carry out of the mantissa is
lost) and truncates when it casts to bf16, so encoders work on bits. Decoding casts are right there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e8m0_of(amax):
    """Least byte b with `amax <= 448 * 2^(b - 127)`; `amax` positive float32.

    448 is 1.75 * 2^8, so this reads the exponent and whether the mantissa exceeds 1.75: no division
    whose rounding could differ between devices.
    """
    bits = amax.to(tl.int32, bitcast=True)
    return (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)


@triton.jit
def exp2_of(byte):
    """`2^(byte - 127)` as float32 for integer bytes 1 to 254."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x):
    """float32 to e4m3 bytes, to nearest even, saturating at 448; NaN stays NaN. int32 0 to 255."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    small = tl.minimum(size, 0x43E00000)  # 448
    rounded = (small + 0x7FFFF + ((small >> 20) & 1)) >> 20
    # Below 2^-6 steps are 2^-9 wide: adding 2^14 lets float32 round to them.
    steps = (small.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(small < 0x3C800000, steps, rounded - (120 << 3))
    return tl.where(size > 0x7F800000, 0x7F, byte) | sign


@triton.jit
def from_e4m3(byte):
    """e4m3 bytes (uint8) to float32."""
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


# Four e4m3 bytes to four bf16: a code's bits, put where bf16 has its own, are its value times
# 2^-120; the instruction for it goes through float32, one value at a time.
_DECODE_E4M3 = tl.constexpr("""
{
.reg .b32 ab, cd, t, c;
mov.b32 c, 0x7B807B80;
prmt.b32 ab, $2, 0, 0x1404;
prmt.b32 cd, $2, 0, 0x3424;
shr.u32 t, ab, 4;
and.b32 t, t, 0x07F007F0;
and.b32 ab, ab, 0x80008000;
or.b32 t, t, ab;
mul.rn.bf16x2 $0, t, c;
shr.u32 t, cd, 4;
and.b32 t, t, 0x07F007F0;
and.b32 cd, cd, 0x80008000;
or.b32 t, t, cd;
mul.rn.bf16x2 $1, t, c;
}
""")


@triton.jit
def decode_e4m3(code, dtype: tl.constexpr):
    """e4m3 bytes (uint8) to `dtype`, which holds every one of them exactly.

    In bf16 the two NaN codes become 480: loading refuses weights with them, and a row that nobody
    wrote has scales of NaN too.
    """
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(_DECODE_E4M3, "=r,=r,r", [code], tl.bfloat16, True, 4)
    return code.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def round_bf16(x):
    """float32 to bf16 bits, to nearest even; int32 0 to 65535. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    up = bits + 0x7FFF + ((bits >> 16) & 1)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return (tl.where(is_nan, bits | 0x400000, up) >> 16) & 0xFFFF


@triton.jit
def through(x, dtype: tl.constexpr):
    """float32 `x` rounded to `dtype` and back."""
    if dtype == tl.bfloat16:
        return (round_bf16(x) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def from_e2m1(nibble):
    """FP4 codes 0 to 15 (int32) to float32: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    code = nibble & 7
    size = tl.where(
        code < 2, code.to(tl.float32) * 0.5, ((code + 252) << 22).to(tl.float32, bitcast=True)
    )
    return tl.where(nibble > 7, -size, size)


@triton.jit
def load_scale(pointers, mask, E8M0: tl.constexpr):
    """Weight scales as float32: e8m0 bytes (0 is 2^-127, 255 NaN) or float32 values."""
    if E8M0:
        byte = tl.load(pointers, mask=mask, other=0).to(tl.int32)
        bits = tl.where(byte == 0, 0x400000, byte << 23)
        bits = tl.where(byte == 255, 0x7FC00000, bits)
        return bits.to(tl.float32, bitcast=True)
    else:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
