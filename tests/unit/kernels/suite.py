"""The tests that each way of running shares. A test module imports all of it and supplies the fixture `way`."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels import checks

CASES = [
    (layout, stored, options)
    for layout in checks.LAYOUTS
    for stored, options in checks.QUANTIZE
    if checks.takes(layout, stored, options.get("gated", False))
]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize(("layout", "stored", "options"), CASES)
def test_quantize_into_a_layout(way, layout, stored, options):
    checks.check_quantize(way, layout, stored, **options)


@pytest.mark.parametrize("layout", ["plain", "trtllm_moe", "marlin"])
def test_transposed_sources_and_slabs(way, layout):
    checks.check_transposed_and_slab(way, layout)


@pytest.mark.parametrize("layout", ["linear_128x4", "marlin"])
def test_nonfinite_tensors_are_named(way, layout):
    checks.check_nonfinite(way, layout)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("layout", checks.LAYOUTS)
def test_shuffle_both_ways(way, layout, gated):
    checks.check_shuffle(way, layout, (256, 160), gated=gated, shift=5 if gated else 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64])
def test_copy(way, dtype):
    checks.check_copy(way, dtype)


@pytest.mark.parametrize(("source", "target"), [(a, b) for a in FLOATS for b in FLOATS if a != b])
def test_cast(way, source, target):
    checks.check_copy(way, source, target)


def test_digest(way):
    checks.check_digest(way)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("layout", checks.LAYOUTS)
def test_digest_of_a_layout(way, layout, gated):
    checks.check_digest_of_layout(way, layout, gated)
