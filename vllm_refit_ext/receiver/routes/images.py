"""Tensors that a loader makes on the way by exact copying, and seeing through them to the checkpoint tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import torch

from vllm_refit_ext.receiver.routes.affine import Dim, decompose, row_major


class Part(msgspec.Struct, frozen=True):
    """The box lo..hi of an image equals elements of checkpoint tensor `source`: the first at `offset`, then by `strides`."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]
    source: int
    offset: int
    strides: tuple[int, ...]


class Image(msgspec.Struct, frozen=True):
    """A tensor that the loader made by copying. `shape` is that of its storage, row-major; the parts may leave gaps."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]


def through(image: Image, start: int, dims: Sequence[Dim]) -> list[tuple[int, int, int, list[Dim]]] | None:
    """A copy out of an image as copies out of its sources: (source, first read, first written, dims). None if it has gaps."""
    found: list[tuple[int, int, int, list[Dim]]] = []
    for lo, hi, at, strides in decompose(image.shape, start, dims):
        volume = 0
        for part in image.parts:
            first = tuple(map(max, lo, part.lo))
            last = tuple(map(min, hi, part.hi))
            if any(a >= b for a, b in zip(first, last, strict=True)):
                continue
            size = 1
            for a, b in zip(first, last, strict=True):
                size *= b - a
            volume += size
            read = part.offset + sum((a - b) * s for a, b, s in zip(first, part.lo, part.strides, strict=True))
            written = at + sum((a - b) * s for a, b, s in zip(first, lo, strides, strict=True))
            steps = [(b - a, s, d) for a, b, s, d in zip(first, last, part.strides, strides, strict=True)]
            found.append((part.source, read, written, steps))
        whole = 1
        for a, b in zip(lo, hi, strict=True):
            whole *= b - a
        if volume != whole:
            return None
    return found


def image_of(result: torch.Tensor, parts: Iterable[Part]) -> Image | None:
    """The image of a new tensor, in the order of its own storage; None if the storage is not dense."""
    strides = result.stride()
    order = sorted(range(result.dim()), key=lambda i: (-strides[i], i))
    shape = tuple(result.shape[i] for i in order)
    if any(n > 1 and strides[i] != s for i, n, s in zip(order, shape, row_major(shape), strict=True)):
        return None

    def turn(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[i] for i in order)

    return Image(shape, result.dtype, tuple(Part(turn(p.lo), turn(p.hi), p.source, p.offset, turn(p.strides)) for p in parts))
