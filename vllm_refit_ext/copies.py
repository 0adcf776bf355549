"""Tensors that code makes on the way by exact copying (`contiguous`, `cat`, `stack`, a widening cast), followed on tensors
without storage: which elements of which source tensors each of them holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch

from vllm_refit_ext.core.affine import Dim, decompose, row_major

aten = torch.ops.aten
WIDENING = frozenset({(torch.bfloat16, torch.float32), (torch.float16, torch.float32)})
"""Casts that lose nothing, so that a second cast after them gives what a direct one would."""


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, equal for all its views. Stays unique only while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


class Part(msgspec.Struct, frozen=True):
    """The box lo..hi of an image equals elements of checkpoint tensor `source`: the first at `offset`, then by `strides`."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]
    source: int
    offset: int
    strides: tuple[int, ...]


class Image(msgspec.Struct, frozen=True):
    """A tensor that was made by copying. `shape` is that of its storage, row-major; the parts may leave gaps."""

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


class Copies:
    """What tensors made by exact copies of `sources` hold. All are meta tensors, so a view is known by its storage, offset and
    strides.

    sources: storage -> number of the source. images: storage -> what a made tensor holds. cleared: sources that were zeroed, and
    so no longer hold what they held.
    """

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self.tensors = sources
        self.sources = {storage_id(t): i for i, t in enumerate(sources)}
        self.images: dict[int, Image] = {}
        self.cleared: set[int] = set()
        self._kept: list[torch.Tensor] = []  # keeps storages alive, so that no id is used twice

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Remember what `result` holds; False where `func` is not an exact copy of parts of sources."""
        if not isinstance(result, torch.Tensor) or not args:
            return False
        parts: list[Part] | None = None
        if func in (aten.clone.default, aten._to_copy.default, aten.contiguous.default):
            parts = self.parts(args[0], [0] * result.dim(), result.dtype)
        elif func in (aten.cat.default, aten.stack.default):
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            parts = self._joined(args[0], dim, result.dtype, stacked=func is aten.stack.default)
        elif func is aten.index.Tensor:
            parts = self._indexed(args[0], args[1], result)
        image = None if parts is None else image_of(result, parts)
        if image is None:
            return False
        self.images[storage_id(result)] = image
        self._kept.append(result)
        return True

    def _joined(self, tensors: Sequence[torch.Tensor], dim: int, dtype: torch.dtype, *, stacked: bool) -> list[Part] | None:
        """Parts of the concatenation (or stack) of `tensors` along `dim`."""
        parts: list[Part] = []
        at = 0
        for tensor in tensors:
            if stacked:
                tensor = tensor.unsqueeze(dim)
            if tensor.dim() == 1 and not tensor.numel():
                continue
            dim = dim % tensor.dim()
            found = self.parts(tensor, [at if i == dim else 0 for i in range(tensor.dim())], dtype)
            if found is None:
                return None
            parts += found
            at += tensor.shape[dim]
        return parts

    def _indexed(self, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], result: torch.Tensor) -> list[Part] | None:
        """Parts of `tensor` indexed along one dimension by a table of integers, such as the experts of this rank."""
        used = [(axis, index) for axis, index in enumerate(indices) if index is not None]
        if len(used) != 1 or used[0][1].is_meta or used[0][1].dim() != 1 or used[0][1].dtype == torch.bool:
            return None
        axis, table = used[0][0], used[0][1].tolist()
        parts: list[Part] = []
        at = 0
        while at < len(table):
            run = 1
            while at + run < len(table) and table[at + run] == table[at] + run:
                run += 1
            first = table[at] % tensor.shape[axis]
            view = tensor.narrow(axis, first, run)
            found = self.parts(view, [at if i == axis else 0 for i in range(view.dim())], result.dtype)
            if found is None:
                return None
            parts += found
            at += run
        return parts

    def parts(self, view: torch.Tensor, shift: Sequence[int], dtype: torch.dtype) -> list[Part] | None:
        """What a view holds, in its own coordinates moved by `shift`; None if it is not all copied from sources."""
        if view.dtype != dtype and (view.dtype, dtype) not in WIDENING:
            return None
        key = storage_id(view)
        shape = tuple(view.shape)
        origin, image = self.sources.get(key, -1), self.images.get(key)
        if origin in self.cleared:
            return None
        if origin >= 0 and view.dtype == self.tensors[origin].dtype:
            found = [Part((0,) * view.dim(), shape, origin, int(view.storage_offset()), view.stride())]
        elif image is not None and view.dtype == image.dtype:
            at = row_major(shape)
            seen = through(image, int(view.storage_offset()), tuple(zip(shape, view.stride(), at, strict=True)))
            if seen is None:
                return None
            found = []
            for source, start, first, dims in seen:
                for lo, hi, offset, strides in decompose(shape, first, [(n, d, s) for n, s, d in dims]):
                    found.append(Part(lo, hi, source, start + offset, strides))
        else:
            return None
        return [
            Part(
                tuple(a + b for a, b in zip(p.lo, shift, strict=True)),
                tuple(a + b for a, b in zip(p.hi, shift, strict=True)),
                p.source,
                p.offset,
                p.strides,
            )
            for p in found
        ]


def mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes."""
    found: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found.extend(tensors_in(value))
    return found


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
