"""Watching a weight loader: every copy is noted, none is performed, and whatever is not a copy is found.

`Recorder` is a torch dispatch mode. Checkpoint tensors and parameters are meta tensors, each with its own storage, so any
view of one is known by its storage, offset, sizes and strides. Views run as they are. A copy from a checkpoint tensor into a
parameter becomes a `Copy`. A tensor that a loader makes on the way as an exact copy (`contiguous`, `cat`, a widening cast) is
kept as an `Image` and seen through. Anything else that a checkpoint tensor's values flow into carries a taint: if that reaches
a parameter, or a value is read, the checkpoint tensors concerned are named in `computed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_refit_ext.copies import Copies, Image, mutated, storage_id, tensors_in
from vllm_refit_ext.core.affine import Dim, row_major
from vllm_refit_ext.receiver.routes.created import Created

aten = torch.ops.aten
MAGIC = 1.0e300
"""Stand-in for a value that a loader reads from a checkpoint tensor of one element, to recognise where it is written."""


NN_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


class Copy(msgspec.Struct, frozen=True):
    """A copy into parameter `target`, from checkpoint tensor `source` or through `image` (then `source` is -1).

    `at` and `start` are the first elements written and read; `dims` the steps. `source_dtype` and `target_dtype` are those of
    the two views, which differ from the tensors' own where the loader looked at bytes.
    """

    target: int
    source: int
    image: Image | None
    at: int
    start: int
    dims: tuple[Dim, ...]
    source_dtype: torch.dtype
    target_dtype: torch.dtype


class Write(msgspec.Struct, frozen=True):
    """A write into parameter `target` that is no copy: a constant (no `sources`), or something computed from `sources`."""

    target: int
    at: int
    dims: tuple[Dim, ...]
    op: str
    sources: frozenset[int]


class ValueReadError(Exception):
    """The loader asked for a value of a checkpoint tensor, which has none here."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what a loader does with `sources` (checkpoint tensors, on meta) in a model that holds `created`.

    After the loader ran: `events` in order; `computed`: source index -> what was done to it that is not a copy; `zeroed`:
    sources that the loader cleared before it copied them.
    """

    def __init__(self, created: Created, sources: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.created = created
        self.targets = {storage_id(t): i for i, t in enumerate(created.tensors.values())}
        self.copies = Copies(sources)
        self.sources, self.images, self.source_tensors = self.copies.sources, self.copies.images, sources
        self.shapes = [tuple(t.shape) for t in created.tensors.values()]
        self.dtypes = [t.dtype for t in created.tensors.values()]
        self.target_names = list(created.tensors)
        self.events: list[Copy | Write] = []
        self.computed: dict[int, str] = {}
        self.zeroed = self.copies.cleared  # a loader may clear a tensor that another rank adds, such as a bias before a sum
        self.taints: dict[int, frozenset[int]] = {}
        self.writers: dict[int, set[int]] = {}
        self.read: dict[float, int] = {}
        self._kept: list[torch.Tensor] = []  # keeps storages alive, so that no id is used twice
        self._views: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._views:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func is aten.copy_.default:
            return self._copy(args[0], args[1])
        if func.is_view:
            self._views.add(func)
            return func(*args, **(kwargs or {}))
        return self._other(func, args, kwargs or {})

    def finish(self, model: nn.Module) -> None:
        """Find what the loader replaced, or left behind in the model. Call it before the model is put back."""
        for index, (name, meta) in enumerate(self.created.tensors.items()):
            module, attribute = self.created.slots[name]
            now = getattr(module, attribute, None)
            if now is meta and self.targets.get(storage_id(meta)) == index:
                continue
            origins = frozenset(self.writers.get(index, ()))
            if isinstance(now, torch.Tensor):
                origins |= self._origins(storage_id(now))
            self._blame(origins, f"the loader replaces {name} instead of writing it")
            at, dims = self._region(meta, index)
            self.events.append(Write(index, at, dims, "replaced", origins))
        for path, module in model.named_modules():
            for name, value in [*module._parameters.items(), *module._buffers.items(), *module.__dict__.items()]:
                for tensor in tensors_in(value if name not in NN_TABLES else None):
                    key = storage_id(tensor)
                    if key not in self.targets:
                        self._blame(self._origins(key), f"the loader keeps it in {path}.{name}, made while loading")

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        into, of = storage_id(target), storage_id(source)
        index = self.targets.get(into)
        if index is None:
            if into in self.created.live or into in self.sources:
                self._blame(
                    self._origins(of) | self._origins(into),
                    f"copied into {self._whose(into)}, which is not a parameter as created",
                )
            elif self._origins(of) or target.is_meta or source.is_meta:
                self._taint(target, self._origins(of) | self._origins(into))
            else:
                target.copy_(source)
            return target
        origin, image = self.sources.get(of, -1), self.images.get(of)
        if source.shape != target.shape:
            source = source.expand(target.shape)
        if origin in self.zeroed:
            at, steps = self._region(target, index)
            self.events.append(Write(index, at, steps, "zeros", frozenset()))
            return target
        seen = self.source_tensors[origin].dtype if image is None else image.dtype
        resized = source.dtype.itemsize != seen.itemsize or target.dtype.itemsize != self.dtypes[index].itemsize
        if (origin < 0 and image is None) or resized:
            self._write(target, "copy_", self._origins(of) - {-1})
            return target
        dims = tuple(zip(target.shape, source.stride(), target.stride(), strict=True))
        self.writers.setdefault(index, set()).update((origin,) if image is None else (p.source for p in image.parts))
        self.events.append(
            Copy(
                index, origin, image, int(target.storage_offset()), int(source.storage_offset()), dims, source.dtype, target.dtype
            )
        )
        return target

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten._local_scalar_dense.default:
            return self._scalar(args[0])
        written = mutated(func, args, kwargs)
        tensors = list(tensors_in((args, kwargs)))
        origins: frozenset[int] = frozenset().union(*(self._origins(storage_id(t)) for t in tensors))
        for target in written:
            key = storage_id(target)
            if key in self.targets:
                self._target_write(func, target, args, kwargs, origins)
            elif (
                key in self.sources
                and func is aten.zero_.default
                and target.numel() == self.source_tensors[self.sources[key]].numel()
            ):
                self.zeroed.add(self.sources[key])
            elif key in self.sources:
                self._blame(origins | self._origins(key), f"{_op(func)} changes the checkpoint tensor itself")
            elif key in self.created.live:
                self._blame(origins, f"{_op(func)} writes {self._whose(key)}, which is not a parameter as created")
            else:
                self._taint(target, origins)
        if written and any(storage_id(t) in self.created.live or storage_id(t) in self.targets for t in written):
            return args[0]
        if func is aten._to_copy.default and (origins or not args[0].is_meta):
            # A tensor without data can't be put on a device, and a table with data must not lose it on the way to meta.
            kwargs = {**kwargs, "device": args[0].device, "pin_memory": False}
        try:
            result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not origins:
                raise
            self._blame(origins, f"{_op(func)} needs its values")
            raise ValueReadError(f"{_op(func)}: {error}") from error
        if origins:
            self._follow(func, args, kwargs, result, origins)
        return result

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, origins: frozenset[int]) -> None:
        """Remember where the tensors in `result` come from."""
        if self.copies.follow(func, args, kwargs, result):
            return
        seen = {storage_id(t) for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if storage_id(tensor) not in seen:  # else a view by another name, such as _unsafe_view
                self._taint(tensor, origins)

    def _target_write(
        self, func: Any, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], origins: frozenset[int]
    ) -> None:
        if func in (aten.fill_.Scalar, aten.zero_.default):
            value = args[1] if len(args) > 1 else kwargs.get("value", 0)
            source = self.read.pop(float(value), None) if isinstance(value, int | float) else None
            if source is not None:
                self._note_scalar(target, source)
                return
            origins = frozenset()
        elif func is aten.fill_.Tensor and storage_id(args[1]) in self.sources:
            self._copy(target, args[1])
            return
        self._write(target, _op(func), origins - {-1})

    def _note_scalar(self, target: torch.Tensor, source: int) -> None:
        """A value read from a source of one element was written here, unchanged."""
        index = self.targets[storage_id(target)]
        at, dims = self._region(target, index)
        dtype = self.source_tensors[source].dtype
        self.computed.pop(source, None)
        self.writers.setdefault(index, set()).add(source)
        self.events.append(Copy(index, source, None, at, 0, dims, dtype, target.dtype))

    def _write(self, target: torch.Tensor, op: str, origins: frozenset[int]) -> None:
        index = self.targets[storage_id(target)]
        at, dims = self._region(target, index)
        if origins:
            self._blame(origins, f"{op} on {self.target_names[index]} is computed, not copied")
            self.writers.setdefault(index, set()).update(origins)
        self.events.append(Write(index, at, dims, op, origins))

    def _region(self, target: torch.Tensor, index: int) -> tuple[int, tuple[Dim, ...]]:
        """The first element and the steps of a view of parameter `index`; all of it where elements of another size are seen."""
        if target.dtype.itemsize != self.dtypes[index].itemsize:
            shape = self.shapes[index]
            return 0, tuple((n, 0, s) for n, s in zip(shape, row_major(shape), strict=True))
        return int(target.storage_offset()), tuple((n, 0, s) for n, s in zip(target.shape, target.stride(), strict=True))

    def _scalar(self, tensor: torch.Tensor) -> Any:
        key = storage_id(tensor)
        real = self.created.values.get(key)
        origins = self._origins(key)
        if not tensor.is_meta:
            return aten._local_scalar_dense.default(tensor)
        if key in self.sources and self.source_tensors[self.sources[key]].numel() == 1 and tensor.dtype.is_floating_point:
            source = self.sources[key]
            value = MAGIC * (1 + len(self._kept) / 2**20)
            self._kept.append(tensor)
            self.read[value] = source
            self._blame(frozenset({source}), "its value is read by the loader")
            return value
        if not origins and real is not None:
            return real.as_strided(tensor.size(), tensor.stride(), real.storage_offset() + tensor.storage_offset()).item()
        self._blame(origins, "its value is read by the loader")
        raise ValueReadError("a value of a tensor without storage")

    def _origins(self, key: int) -> frozenset[int]:
        """The sources whose values a storage may hold."""
        if key in self.sources:
            return frozenset({self.sources[key]})
        if key in self.images:
            return frozenset(p.source for p in self.images[key].parts)
        if key in self.targets:
            return frozenset(self.writers.get(self.targets[key], ()))
        return self.taints.get(key, frozenset())

    def _taint(self, tensor: torch.Tensor, origins: frozenset[int]) -> None:
        key = storage_id(tensor)
        if key in self.images:
            origins = origins | self._origins(key)
            del self.images[key]
        if origins:
            self._kept.append(tensor)
            self.taints[key] = self.taints.get(key, frozenset()) | origins

    def _blame(self, origins: Iterable[int], reason: str) -> None:
        for source in origins:
            self.computed.setdefault(source, reason)

    def _whose(self, key: int) -> str:
        if key in self.sources:
            return "a checkpoint tensor"
        return "a live tensor of the model" if key in self.created.live else "a tensor"


def _op(func: Any) -> str:
    return str(func).removesuffix(".default")
