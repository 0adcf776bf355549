"""The quantiser against independent ones: ml_dtypes for the rounding, vLLM's own functions for whole blocks."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import mxfp8_layouts as whole
from vllm_refit_ext.core import mxfp8
from vllm_refit_ext.core.errors import LayoutError

VECTORS = Path(__file__).parent / "kernels" / "vectors" / "vllm_quantize.npz"


def awkward(rng, shape):
    """float32 values over the whole exponent range, with zeros, subnormals and block maxima at and just above 448 * 2^e."""
    x = rng.standard_normal(shape).astype(np.float32)
    blocks = x.reshape(-1, mxfp8.BLOCK)
    with np.errstate(under="ignore", over="ignore"):
        blocks *= np.exp2(rng.integers(-140, 120, (len(blocks), 1))).astype(np.float32)
    for i, value in enumerate(
        (0.0, 448.0, np.nextafter(np.float32(448), np.float32(1e9)), 448 * 2.0**40, 2.0**-149, 2.0**-126, 3.0e38)
    ):
        if i < len(blocks):
            blocks[i] = rng.uniform(-1, 1, mxfp8.BLOCK) * value
            blocks[i, 7] = -value
    return blocks.reshape(shape)


def test_rounding_equals_ml_dtypes_over_the_float32_range():
    y = np.arange(2**32 - 1, step=9973, dtype=np.uint32).view(np.float32)
    edges = (
        np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)[:, None]
        * np.float32([1, 1.0625, 1.03125])
    ).ravel()
    y = np.concatenate([y, edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(1e9))])
    with np.errstate(invalid="ignore", over="ignore"):
        want = y.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(mxfp8.encode_e4m3(y), want)


def test_decoding_equals_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(whole.decode_e4m3(codes), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize(("rule", "engine"), [("floor", "floor_024"), ("ceil", "ceil_033")])
def test_equals_stored_vectors_of_vllm(rule, engine):
    """Made by `_mxfp8_e4m3_quantize_torch` of vLLM 0.24.0 and 0.33.0 on bfloat16 `x`."""
    stored = np.load(VECTORS)
    x = (stored["x"].astype(np.uint32) << 16).view(np.float32)
    codes, scales = mxfp8.quantize(x, rule)
    np.testing.assert_array_equal(scales, stored[f"{engine}_scales"])
    np.testing.assert_array_equal(codes, stored[f"{engine}_codes"])


@pytest.mark.engine
def test_equals_the_installed_vllm():
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("vllm.model_executor.layers.quantization.utils.mxfp8_utils")
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    codes, scales = theirs._mxfp8_e4m3_quantize_torch(x)
    ours = mxfp8.quantize(x.float().numpy())
    np.testing.assert_array_equal(ours[1], scales.numpy())
    np.testing.assert_array_equal(ours[0], codes.view(torch.uint8).numpy())


@pytest.mark.parametrize("rule", mxfp8.RULES)
def test_scale_is_the_formula_and_codes_are_the_nearest(rule):
    x = awkward(np.random.default_rng(0), (64, 96))
    codes, scales = mxfp8.quantize(x, rule)
    blocks = x.reshape(64, 3, 32).astype(np.float64)
    amax = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore"):
        exponent = np.ceil(np.log2(amax / 448)) if rule == "ceil" else np.floor(np.log2(amax))
    np.testing.assert_array_equal(scales, np.clip(exponent + 127, 1, 254))
    scaled = (blocks * np.exp2(127.0 - scales)[..., None]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(x.shape)
    np.testing.assert_array_equal(codes, scaled)
    assert not np.any((codes & 0x7F) == mxfp8.CODE_NAN)


def test_scales_stay_between_1_and_254_and_zero_blocks_get_1():
    codes, scales = mxfp8.quantize(np.zeros((2, 64), np.float32))
    assert (scales == 1).all()
    assert (codes == 0).all()
    _, top = mxfp8.quantize(np.full((1, 32), np.finfo(np.float32).max), "floor")
    assert top[0, 0] == 254


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 5), st.sampled_from(mxfp8.RULES), st.data())
def test_slicing_commutes_with_quantising_on_block_borders(seed, rows, blocks, rule, data):
    x = awkward(np.random.default_rng(seed), (rows, 32 * blocks))
    codes, scales = mxfp8.quantize(x, rule)
    r = data.draw(st.integers(0, rows - 1))
    a = data.draw(st.integers(0, blocks - 1))
    b = data.draw(st.integers(a + 1, blocks))
    part = mxfp8.quantize(x[r:, 32 * a : 32 * b], rule)
    np.testing.assert_array_equal(part[0], codes[r:, 32 * a : 32 * b])
    np.testing.assert_array_equal(part[1], scales[r:, a:b])


def test_requantising_dequantised_values_changes_nothing():
    x = np.random.default_rng(3).standard_normal((16, 128)).astype(np.float32)
    codes, scales = mxfp8.quantize(x)
    again = mxfp8.quantize(whole.dequantize(codes, scales))
    np.testing.assert_array_equal(whole.dequantize(*again), whole.dequantize(codes, scales))


def test_dequantize_covers_every_byte():
    codes = np.tile(np.arange(32, dtype=np.uint8) + 40, (256, 1))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    want = whole.decode_e4m3(codes).astype(np.float64) * np.exp2(np.arange(256) - 127.0)[:, None]
    want[255] = np.nan
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(whole.dequantize(codes, scales), want.astype(np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_blocks_are_refused_by_name_or_become_nan_whole(value):
    x = np.ones((3, 64), np.float32)
    x[1, 40] = value
    with pytest.raises(LayoutError, match=r"experts\.3.*NaN or Inf.*\[1, 1\]"):
        mxfp8.quantize(x, name="experts.3")
    codes, _ = mxfp8.quantize(x, allow_nonfinite=True)
    assert (codes[1, 32:] == mxfp8.CODE_NAN).all()
    finite = np.delete(codes.reshape(-1), np.s_[96:128])
    assert not ((finite & 0x7F) == mxfp8.CODE_NAN).any()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: mxfp8.quantize(np.zeros((2, 32), np.float64)), r"got float64; wanted float32"),
        (lambda: mxfp8.quantize(np.zeros((2, 33), np.float32)), r"got K = 33; wanted a positive multiple of 32"),
        (lambda: mxfp8.quantize(np.zeros((), np.float32)), r"got K = 0"),
        (lambda: mxfp8.quantize(np.zeros((2, 32), np.float32), "round"), r"got 'round'; wanted ceil or floor"),
        (
            lambda: whole.dequantize(np.zeros((2, 32), np.uint8), np.zeros((2,), np.uint8)),
            r"got scales \(2,\); wanted \(2, 1\)",
        ),
        (lambda: whole.dequantize(np.zeros((2, 32), np.int8), np.zeros((2, 1), np.uint8)), r"got int8; wanted uint8"),
    ],
)
def test_errors_say_got_and_wanted(call, match):
    with pytest.raises(LayoutError, match=match):
        call()
