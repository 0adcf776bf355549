"""MXFP8, the number format: the one quantiser that senders, receivers, kernels and tests must equal bit for bit.

A block is 32 consecutive elements along the last dimension K. It is held as 32 E4M3 codes (one byte an element, largest finite
448) and one E8M0 scale byte b that stands for 2^(b - 127). This module is numpy only and is the oracle for every kernel.

The scale comes from the block's largest magnitude amax = m * 2^E, 1 <= m < 2, by one of two rules (OCP Microscaling Formats
1.0 leaves the rule open):

    "ceil"   byte = clamp(E + 127 - 8 + (m > 1.75), 1, 254)    the smallest scale for which nothing saturates: 448 = 1.75 * 2^8
    "floor"  byte = clamp(E + 127, 1, 254)                     what vLLM 0.24 does in torch when it quantises while loading
    code = round-to-nearest-even E4M3 of x * 2^(127 - byte)

A prequantised wire is always "ceil"; "floor" exists so that a receiver that quantises gives the bits that the engine's own load
would. A zero block gets byte 1 and zero codes, because an engine's kernels need not take byte 0.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.errors import LayoutError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Rule = Literal["ceil", "floor"]

BLOCK = 32
"""Elements that share a scale, along K."""
RULES: tuple[Rule, ...] = get_args(Rule)
CODE_NAN = 0x7F
"""The E4M3 code of NaN. A block that holds a NaN or an Inf becomes 32 of these: it is never saturated silently."""

_ABS = np.uint32(0x7FFFFFFF)
_INF = np.uint32(0x7F800000)


def quantize(x: Floats, rule: Rule = "ceil", *, name: str = "", allow_nonfinite: bool = False) -> tuple[Bytes, Bytes]:
    """Quantise float32 `x` [..., K] to (codes uint8 [..., K], scales uint8 [..., K/32]).

    BF16 widens to float32 exactly, so widen it first. `name` is said in errors. With `allow_nonfinite`, a block with NaN or Inf
    becomes 32 NaN codes (0x7F) and keeps the scale byte that its bits give.

    Raises LayoutError for a dtype other than float32, a K that is not a multiple of 32, an unknown rule, or NaN or Inf.
    """
    check_rule(rule)
    if x.dtype != np.float32:
        raise LayoutError("quantize takes float32", where=name, got=x.dtype, wanted="float32")
    check_k(x.shape[-1] if x.ndim else 0, name)
    blocks = np.ascontiguousarray(x).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    bits = blocks.view(np.uint32) & _ABS
    amax = bits.max(axis=-1)
    bad = amax >= _INF
    if bad.any() and not allow_nonfinite:
        where = np.argwhere(bad)[0].tolist()
        raise LayoutError(
            "a block holds NaN or Inf",
            where=name,
            got=f"{int(bad.sum())} bad block(s), the first at block index {where}",
            wanted="finite values",
            do="find the step that made them; nothing was written",
        )
    scales = scale_byte(amax, rule)
    # A power of two, exact in float32 (2^-127 as a subnormal). The products are exact wherever the code isn't zero.
    step = np.ldexp(np.float32(1), 127 - scales.astype(np.int32)).astype(np.float32)
    with np.errstate(invalid="ignore", under="ignore"):
        codes = encode_e4m3(blocks * step[..., None])
    codes[bad] = CODE_NAN
    return codes.reshape(x.shape), scales


def scale_byte(amax: NDArray[np.uint32], rule: Rule = "ceil") -> Bytes:
    """The scale byte of blocks whose largest magnitudes have the float32 bits `amax` (sign bit clear)."""
    if rule == "ceil":  # noqa: SIM108
        # Adding 2^21 - 1 carries into the exponent exactly when the mantissa is above 0.75, that is m > 1.75.
        exponent = ((amax + np.uint32(0x1FFFFF)) >> 23).astype(np.int32) - 8
    else:
        exponent = (amax >> 23).astype(np.int32)
    scales: Bytes = np.clip(exponent, 1, 254).astype(np.uint8)
    return scales


def encode_e4m3(y: Floats) -> Bytes:
    """E4M3 codes of float32 `y` by round-to-nearest-even, in integer operations. NaN and magnitudes above 464 give NaN (0x7F)."""
    bits = np.asarray(y, dtype=np.float32).view(np.uint32)
    magnitude = bits & _ABS
    # Normal results: keep 3 of 23 mantissa bits, then move the exponent bias from 127 to 7.
    rounded = (magnitude + np.uint32(0x7FFFF) + ((magnitude >> 20) & 1)) >> 20
    normal = rounded.astype(np.int32) - (120 << 3)
    # Subnormal results count multiples of 2^-9; float32's own adder rounds them to even.
    with np.errstate(over="ignore", invalid="ignore"):
        tiny = np.rint(magnitude.view(np.float32) * np.float32(512)).clip(0, 8)
    code = np.where(magnitude < np.uint32(0x3C800000), np.nan_to_num(tiny).astype(np.int32), normal)
    code = np.where(normal > 0x7E, CODE_NAN, code)
    return (code | ((bits >> 24) & 0x80).astype(np.int32)).astype(np.uint8)


def check_rule(rule: str) -> None:
    """Raise LayoutError unless `rule` is one of RULES."""
    if rule not in RULES:
        raise LayoutError("unknown quantisation rule", got=repr(rule), wanted=" or ".join(RULES))


def check_k(k: int, name: str = "") -> None:
    """Raise LayoutError unless `k` is a positive multiple of 32."""
    if k <= 0 or k % BLOCK:
        raise LayoutError(
            "K does not split into blocks",
            where=name,
            got=f"K = {k}",
            wanted="a positive multiple of 32",
            do="move the cut along K",
        )
