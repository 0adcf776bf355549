"""A digest of tensor content that is the same for any cut: sender and engine compare it without moving the bytes.

    digest(part) = sum over its elements e of mix(bits(e), flat_index(e))   mod 2^64

`flat_index` is the row-major index in the whole checkpoint tensor and `bits` the unsigned little-endian integer of an element of
1, 2 or 4 bytes; an element of 8 bytes counts as two words of 4 bytes with indices 2i and 2i + 1. The sum is additive over
disjoint boxes, so shards of any sharding add up to the same number. `mix` (a 32-bit finaliser after a Weyl step on the index)
is a bijection of the bits for a fixed index: a single changed element is found with certainty, moved or swapped ones with
probability 1 - 2^-32. It guards against mistakes, not against an adversary.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from vllm_refit_ext.core.errors import LayoutError

INDEX_LOW = 0x9E3779B1
INDEX_HIGH = 0x85EBCA77
MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B

_FOR_A_THREAD = 8
"""Chunks for which it is worth while to start a thread."""
_CHUNK = 1 << 16
"""Words hashed at once: two scratch arrays of 256 KiB stay in a core's cache, and are all the extra memory there is."""

Words = NDArray[np.uint32]


def digest(array: NDArray[np.generic], *, shape: Sequence[int], start: Sequence[int]) -> int:
    """Digest of a box of a tensor, an integer in [0, 2^64).

    `array` is the box's content (any strides, elements of 1, 2, 4 or 8 bytes), `shape` the whole tensor's shape and `start` the
    box's first index in each dimension. A scalar has shape () and start ().

    Raises LayoutError for other element sizes or a box that does not lie in the tensor.
    """
    check_box(array.shape, shape, start)
    words = words_of(array.dtype.itemsize)
    if array.size == 0:
        return 0
    bits = array.view(f"u{array.dtype.itemsize}")
    strides = row_strides(shape)
    first = sum(i * s for i, s in zip(start, strides, strict=True))
    # Rows of consecutive indices: trailing dimensions that the box fills join, where memory lets them join without a copy.
    joined = 1 if bits.ndim else 0
    run = bits.shape[-1] if bits.ndim else 1
    while bits.flags.c_contiguous and joined < bits.ndim and run == strides[bits.ndim - 1 - joined]:
        joined += 1
        run *= bits.shape[bits.ndim - joined]
    lead = bits.shape[: bits.ndim - joined] or (1,)
    steps = strides[: bits.ndim - joined] or (0,)
    bits = bits.reshape(*lead, run)
    inner = np.arange(lead[-1], dtype=np.uint64) * np.uint64(steps[-1])
    total = 0
    for outer in np.ndindex(*lead[:-1]):
        base = first + sum(i * s for i, s in zip(outer, steps, strict=False))
        total += _rows(bits[outer], inner + np.uint64(base), words)
    return total % (1 << 64)


def _index_term(index: NDArray[np.uint64]) -> Words:
    low = index.astype(np.uint32)
    term: Words = low * np.uint32(INDEX_LOW) + (index >> np.uint64(32)).astype(np.uint32) * np.uint32(INDEX_HIGH)
    return term


def _sum_finished(h: Words, scratch: Words) -> int:
    """Finish the hashes `h` in place, and add them up. At most 2^16 in a row, so that sums of 16 bits fit 32."""
    for shift, factor in ((16, MIX_1), (15, MIX_2)):
        np.right_shift(h, np.uint32(shift), out=scratch)
        np.bitwise_xor(h, scratch, out=h)
        np.multiply(h, np.uint32(factor), out=h)
    # The last step changes the lower half only. Two sums of halves are faster than one that widens every hash.
    np.right_shift(h, np.uint32(16), out=scratch)
    np.bitwise_xor(h, scratch, out=h)
    np.bitwise_and(h, np.uint32(0xFFFF), out=h)
    upper, lower = (part.sum(axis=1, dtype=np.uint32).sum(dtype=np.uint64) for part in (scratch, h))
    return (int(upper) << 16) + int(lower)


def _rows(bits: NDArray[np.generic], first: NDArray[np.uint64], words: int) -> int:
    """Digest of elements [rows, run] whose rows begin at the element indices `first` [rows]."""
    rows, run = bits.shape
    across = min(run * words, _CHUNK)
    down = max(1, _CHUNK // across)
    column = np.arange(across, dtype=np.uint32) * np.uint32(INDEX_LOW)
    corners = list(itertools.product(range(0, rows, down), range(0, run, across // words)))

    def add(corners: Sequence[tuple[int, int]]) -> int:
        hashes, scratch = np.empty((2, min(down, rows), across), dtype=np.uint32)
        total = 0
        for r, c in corners:
            part = bits[r : r + down, c : c + across // words]
            if words == 2:
                part = np.ascontiguousarray(part).view(np.uint32)
            index = (first[r : r + down] + np.uint64(c)) * np.uint64(words)
            h, s = hashes[: len(part), : part.shape[1]], scratch[: len(part), : part.shape[1]]
            np.copyto(h, part, casting="unsafe")
            last = index + np.uint64(part.shape[1] - 1)
            if np.array_equal(index >> np.uint64(32), last >> np.uint64(32)):
                # lo32(i) * constant is linear modulo 2^32: it splits into a part of the row and a part of the column.
                h += column[None, : part.shape[1]]
                h += _index_term(index)[:, None]
            else:
                h += _index_term(index[:, None] + np.arange(part.shape[1], dtype=np.uint64))
            total += _sum_finished(h, s)
        return total

    workers = min(len(corners) // _FOR_A_THREAD, len(os.sched_getaffinity(0)))
    if workers < 2:
        return add(corners)
    with ThreadPoolExecutor(workers) as pool:  # numpy lets go of the interpreter's lock
        return sum(pool.map(add, (corners[i::workers] for i in range(workers))))


def words_of(itemsize: int) -> int:
    """Words an element counts as: 1, or 2 for 8 bytes. Raises LayoutError for sizes that have no digest."""
    if itemsize not in (1, 2, 4, 8):
        raise LayoutError("no digest for this element size", got=f"{itemsize} bytes", wanted="1, 2, 4 or 8 bytes")
    return 2 if itemsize == 8 else 1


def row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def check_box(box: Sequence[int], shape: Sequence[int], start: Sequence[int]) -> None:
    """Raise LayoutError unless a box of size `box` at `start` lies in a tensor of `shape`."""
    inside = len(box) == len(shape) == len(start) and all(
        s >= 0 and s + b <= n for b, n, s in zip(box, shape, start, strict=True)
    )
    if not inside:
        raise LayoutError(
            "the box does not lie in the tensor", got=f"size {tuple(box)} at {tuple(start)}", wanted=f"inside {tuple(shape)}"
        )
