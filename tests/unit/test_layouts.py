"""The layouts against the functions that engines use: vLLM's Marlin and 128x4 helpers, FlashInfer's row maps (stored)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import mxfp8_layouts as oracle
from vllm_refit_ext.core import layouts
from vllm_refit_ext.core.errors import LayoutError

FOLDER = Path(__file__).parent / "kernels" / "vectors"
VECTORS = FOLDER / "flashinfer_rows.json"


def matrices(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, shape, dtype=np.uint8), rng.integers(0, 256, (*shape[:-1], shape[-1] // 32), dtype=np.uint8)


def test_equals_stored_vectors_of_vllm():
    """Made by vLLM 0.32: `marlin_weights` with `get_weight_perm(8)`, `marlin_permute_scales` with
    `mxfp8_marlin_process_scales`, and `swizzle_mxfp8_scale`, on random bytes."""
    stored = np.load(FOLDER / "vllm_layouts.npz")
    values, scale_bytes = oracle.to_kernel("marlin", stored["codes"], stored["scales"])
    np.testing.assert_array_equal(values, stored["marlin"])
    np.testing.assert_array_equal(scale_bytes, stored["marlin_scales"])
    codes = np.zeros((130, 160), np.uint8)
    np.testing.assert_array_equal(oracle.to_kernel("linear_128x4", codes, stored["linear_scales"])[1], stored["linear_128x4"])


@pytest.mark.engine
@pytest.mark.parametrize(("n", "k"), [(64, 32), (192, 128), (320, 96)])
def test_marlin_equals_vllm(n, k):
    torch = pytest.importorskip("torch")
    test = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils_test")
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils")
    fp8 = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils_fp8")
    codes, scales = matrices(n, k)
    scales = scales.clip(1, 254)
    values, scale_bytes = oracle.to_kernel("marlin", codes, scales)
    packed = test.marlin_weights(torch.from_numpy(codes.T.copy()), k, n, 8, test.get_weight_perm(8))
    np.testing.assert_array_equal(packed.numpy().view(np.uint8), values)
    s = torch.from_numpy(scales).view(torch.float8_e8m0fnu).to(torch.bfloat16).T.contiguous()
    # One group a column takes another permutation in vLLM's helper, which its kernel does not use for MXFP8.
    s = fp8.mxfp8_marlin_process_scales(utils.marlin_permute_scales(s, max(k, 64), n, 32))
    np.testing.assert_array_equal(s.view(torch.uint8).numpy(), scale_bytes)


@pytest.mark.engine
@pytest.mark.parametrize(("n", "k"), [(128, 128), (200, 160), (5, 4096), (130, 32)])
def test_linear_scales_equal_vllm(n, k):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("vllm.model_executor.layers.quantization.utils.mxfp8_utils")
    codes, scales = matrices(n, k)
    values, scale_bytes = oracle.to_kernel("linear_128x4", codes, scales)
    np.testing.assert_array_equal(values, codes)
    np.testing.assert_array_equal(scale_bytes, theirs.swizzle_mxfp8_scale(torch.from_numpy(scales), n, k).numpy())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", ["128", "256", "384", "1536"])
def test_moe_rows_equal_flashinfer(rows, gated):
    source = json.loads(VECTORS.read_text())["rows"][rows]["gated" if gated else "plain"]
    codes, scales = matrices(int(rows), 96)
    values, scale_bytes = oracle.to_kernel("trtllm_moe", codes, scales, gated=gated)
    np.testing.assert_array_equal(values, codes[source])
    # Scales: the same rows, then the block order that the linear layout takes (checked against vLLM above).
    np.testing.assert_array_equal(scale_bytes, oracle.to_kernel("linear_128x4", codes, scales[source])[1])


@pytest.mark.parametrize("half", [64, 192, 768])
def test_moe_rows_equal_the_written_formula(half):
    """k = 16 b + 2 (q % 8) + q // 16, and an up row where q // 8 is even; r = 32 b + q."""
    r = np.arange(2 * half)
    b, q = r // 32, r % 32
    k = 16 * b + 2 * (q % 8) + q // 16
    source = np.where(q // 8 % 2 == 0, half + k, k)
    codes, scales = matrices(2 * half, 32)
    np.testing.assert_array_equal(oracle.to_kernel("trtllm_moe", codes, scales, gated=True)[0], codes[source])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(layouts.LAYOUTS)),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(0, 2),
    st.data(),
)
def test_both_ways_with_padding(name, gated, experts, rows, blocks, more, data):
    """Any canonical matrix comes back, whatever the engine pads; padding has code 0 and the asked scale byte."""
    rows *= 2 if gated else 1
    step = layouts.layout_of(name).row_multiple * (2 if gated else 1)
    stored = (-(-rows // step) * step + more * step, 32 * (blocks + data.draw(st.integers(0, 2))))
    codes, scales = matrices(experts, rows, 32 * blocks)
    values, scale_bytes = oracle.to_kernel(name, codes, scales, gated=gated, stored=stored, pad_scale=77)
    back = oracle.to_canonical(name, values, scale_bytes, gated=gated, shape=(rows, 32 * blocks))
    np.testing.assert_array_equal(back[0], codes)
    np.testing.assert_array_equal(back[1], scales)
    whole = oracle.to_canonical(name, values, scale_bytes, gated=gated)
    assert int((whole[1] == 77).sum()) == int((scales == 77).sum()) + experts * (stored[0] * stored[1] // 32 - rows * blocks)
    assert int((whole[0] != 0).sum()) == int((codes != 0).sum())


def test_padded_halves_stay_halves():
    codes, scales = matrices(2 * 96, 64)
    values, _ = oracle.to_kernel("trtllm_moe", codes, scales, gated=True, stored=(256, 64))
    padded = np.zeros((256, 64), np.uint8)
    padded[:96], padded[128:224] = codes[:96], codes[96:]
    wide = np.zeros((256, 2), np.uint8)
    np.testing.assert_array_equal(values, oracle.to_kernel("trtllm_moe", padded, wide, gated=True)[0])


def test_small_router_is_padded_to_64_rows_for_marlin():
    codes, scales = matrices(8, 128)
    values, scale_bytes = oracle.to_kernel("marlin", codes, scales)
    assert (values.shape, scale_bytes.shape) == ((8, 1024), (4, 64))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda c, s: oracle.to_kernel("deepgemm_moe", c, s), r"got 'deepgemm_moe'; wanted plain, linear_128x4"),
        (lambda c, s: oracle.to_kernel("marlin", c, s, stored=(100, 64)), r"got 100 rows; wanted a multiple of 64"),
        (lambda c, s: oracle.to_kernel("marlin", c, s, stored=(64, 64)), r"got \(96, 64\); wanted at most \(64, 64\)"),
        (lambda c, s: oracle.to_kernel("trtllm_moe", c, s, stored=(128, 80)), r"got K = 80"),
        (lambda c, s: oracle.to_kernel("plain", c, s[:, :1]), r"got scales \(96, 1\); wanted \(96, 2\)"),
        (lambda c, s: oracle.to_kernel("plain", c[0], s[0]), r"got shape \(64,\); wanted \[..., N, K\]"),
        (lambda c, s: oracle.to_canonical("linear_128x4", c, s), r"got \(96, 2\); wanted \(512,\)"),
        (lambda c, s: oracle.to_canonical("plain", c.view(np.int8), s), r"got int8, uint8; wanted uint8"),
    ],
)
def test_errors_say_got_and_wanted(call, match):
    with pytest.raises(LayoutError, match=match):
        call(*matrices(96, 64))
