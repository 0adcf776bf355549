"""The quantiser's arithmetic, shared by every kernel that quantises. `core.mxfp8` is the reference for each bit."""

# Triton's language: constants are upper case, types its own, and branches that return need an else.
# ruff: noqa: N803, RET505, SIM108
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def widen(x):
    """float32 of loaded float32, or of the raw bits (uint16) of bfloat16. Exact; the interpreter's own cast loses subnormals."""
    if x.dtype == tl.uint16:
        return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def narrow(x):
    """The bits (uint16) of float32 `x` rounded to bfloat16, nearest even. The interpreter's own cast truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)


@triton.jit
def block_scale(amax, RULE: tl.constexpr):
    """(scale byte, factor for the values, is not finite) of blocks; `amax`: float32 bits of the largest magnitudes.

    A block with NaN or Inf gets the factor NaN, so that all its codes become NaN without work on each element.
    """
    if RULE == "ceil":
        exponent = ((amax + 0x1FFFFF) >> 23).to(tl.int32) - 8
    else:
        exponent = (amax >> 23).to(tl.int32)
    byte = tl.minimum(tl.maximum(exponent, 1), 254)
    bits = (254 - byte) << 23
    if RULE == "floor":
        bits = tl.where(byte == 254, 0x00400000, bits)  # 2^-127 is a subnormal; "ceil" stays below byte 249
    bad = amax >= 0x7F800000
    factor = tl.where(bad, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    return byte.to(tl.uint8), factor, bad


@triton.jit
def magnitude(x):
    """float32 bits of |x| as uint32. As integers they order like the magnitudes, with NaN above Inf above all finite values."""
    return x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def encode(y, HARDWARE: tl.constexpr):
    """E4M3 codes (uint8) of float32 `y`, rounded to nearest even; |y| <= 448 or NaN.

    The conversion instruction exists from sm89; elsewhere, and in the interpreter (whose own cast is wrong), integers do it.
    """
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return encode_integer(y).to(tl.uint8)


@triton.jit
def encode_integer(y):
    """As `encode`, as int32, in integer operations."""
    bits = y.to(tl.int32, bitcast=True)
    a = bits & 0x7FFFFFFF
    normal = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - 960
    # Below 2^-6 codes count multiples of 2^-9: adding 1.5 * 2^23 makes the float adder round to an integer.
    small = (a.to(tl.float32, bitcast=True) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(a < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(a > 0x7F800000, 0x7F, code)


@triton.jit
def pack4(a, b, c, d, HARDWARE: tl.constexpr):
    """The codes of four float32 values in one int32, `a` in the lowest byte."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return pack4_codes(encode_integer(a), encode_integer(b), encode_integer(c), encode_integer(d))


@triton.jit
def pack4_codes(a, b, c, d):
    """Four codes (any integer type) in one int32, `a` in the lowest byte."""
    return a.to(tl.int32) | (b.to(tl.int32) << 8) | (c.to(tl.int32) << 16) | (d.to(tl.int32) << 24)
