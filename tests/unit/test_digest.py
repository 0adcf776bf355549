"""The digest against its formula in Python integers, and the properties that verification rests on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_refit_ext.core import digest as module
from vllm_refit_ext.core.digest import digest
from vllm_refit_ext.core.errors import LayoutError

M = 0xFFFFFFFF


def mix(bits, index):
    h = (bits + (index & M) * 0x9E3779B1 + (index >> 32) * 0x85EBCA77) & M
    h ^= h >> 16
    h = h * 0x7FEB352D & M
    h ^= h >> 15
    h = h * 0x846CA68B & M
    return h ^ (h >> 16)


def plain(array, shape, start):
    """One element after another, as the specification says it."""
    total = 0
    for position in np.ndindex(array.shape):
        index = 0
        for n, p, s in zip(shape, position, start, strict=True):
            index = index * n + p + s
        data = array[position].tobytes()
        if len(data) == 8:
            total += mix(int.from_bytes(data[:4], "little"), 2 * index) + mix(int.from_bytes(data[4:], "little"), 2 * index + 1)
        else:
            total += mix(int.from_bytes(data, "little"), index)
    return total % 2**64


DTYPES = [np.uint8, np.uint16, np.float32, np.int64]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(1, 5), max_size=4), st.integers(0, 2**40), st.booleans(), st.integers(0, 99))
def test_equals_the_specification(dtype, size, far, fortran, seed):
    rng = np.random.default_rng(seed)
    array = np.frombuffer(rng.bytes(int(np.prod(size, dtype=int)) * np.dtype(dtype).itemsize), dtype).reshape(size)
    array = np.asfortranarray(array) if fortran and size else array
    start = [int(v) for v in rng.integers(0, 4, len(size))]
    if size:
        start[0] += far  # the flat index passes 2^32, and 2^32 lies inside some boxes
    shape = [s + n + int(v) for s, n, v in zip(start, size, rng.integers(0, 3, len(size)), strict=True)]
    assert digest(array, shape=shape, start=start) == plain(array, shape, start)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_cross_2_to_the_32(dtype):
    array = np.arange(40).astype(dtype).reshape(2, 20)
    shape, start = (2**20, 2**14), (2**18 - 1, 2**14 - 20)
    assert digest(array, shape=shape, start=start) == plain(array, shape, start)


def test_long_rows_and_many_rows_are_chunked_alike():
    rng = np.random.default_rng(0)
    array = rng.integers(0, 2**16, (3, 70_000), dtype=np.uint16)
    whole = digest(array, shape=array.shape, start=(0, 0))
    assert whole == sum(digest(array[:, c : c + 9_999], shape=array.shape, start=(0, c)) for c in range(0, 70_000, 9_999)) % 2**64
    assert whole == digest(array.reshape(-1), shape=(210_000,), start=(0,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_threads_add_the_same(dtype, monkeypatch):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: range(3))
    array = np.frombuffer(np.random.default_rng(0).bytes((1 << 20) * np.dtype(dtype).itemsize + 80), dtype)
    parts = [digest(array[i : i + 60_001], shape=array.shape, start=(i,)) for i in range(0, len(array), 60_001)]
    assert digest(array, shape=array.shape, start=(0,)) == sum(parts) % 2**64
    every = np.full(1 << 16, 0xFF, np.uint8).view(dtype)  # the largest sums
    assert digest(every, shape=every.shape, start=(0,)) == plain(every, every.shape, (0,))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 8), st.integers(1, 8), st.integers(0, 8), st.integers(0, 8), st.integers(0, 99))
def test_any_cut_adds_up(dtype, n, k, i, j, seed):
    array = np.frombuffer(np.random.default_rng(seed).bytes(n * k * np.dtype(dtype).itemsize), dtype).reshape(n, k)
    i, j = min(i, n), min(j, k)
    boxes = [((0, i), (0, k)), ((i, n), (0, j)), ((i, n), (j, k))]
    total = sum(digest(array[a:b, c:d], shape=(n, k), start=(a, c)) for (a, b), (c, d) in boxes)
    assert total % 2**64 == digest(array, shape=(n, k), start=(0, 0))


def test_a_changed_or_moved_element_is_found():
    array = np.random.default_rng(5).integers(0, 256, (16, 64), dtype=np.uint8)
    whole = digest(array, shape=array.shape, start=(0, 0))
    for value in range(256):
        changed = array.copy()
        changed[3, 9] = value
        assert (digest(changed, shape=array.shape, start=(0, 0)) == whole) == (value == array[3, 9])
    assert digest(array[::-1], shape=array.shape, start=(0, 0)) != whole
    assert digest(np.zeros((2, 8), np.uint8), shape=(2, 8), start=(0, 0)) != digest(
        np.zeros((2, 8), np.uint8), shape=(2, 9), start=(0, 0)
    )


def test_does_not_write_its_input():
    array = np.arange(1000, dtype=np.uint32)
    array.flags.writeable = False
    digest(array, shape=(1000,), start=(0,))


@pytest.mark.parametrize(
    ("array", "shape", "start", "match"),
    [
        (np.zeros((2, 2)), (2, 3), (0, 2), r"got size \(2, 2\) at \(0, 2\); wanted inside \(2, 3\)"),
        (np.zeros((2, 2)), (4,), (0,), r"size \(2, 2\)"),
        (np.zeros(2, np.complex128), (2,), (0,), r"got 16 bytes; wanted 1, 2, 4 or 8 bytes"),
    ],
)
def test_errors_say_got_and_wanted(array, shape, start, match):
    with pytest.raises(LayoutError, match=match):
        digest(array, shape=shape, start=start)
