"""What a model's loaders write during vLLM's layerwise reload, counted by parameter, and the writes that vLLM would lose.

The reload holds a layer back until its wrapped `weight_loader`s have been called for every element. A loader that copies into a
parameter itself (gpt-oss's experts, attention sinks) writes to a tensor on the meta device: nothing is stored and nothing is
counted. Here such a write is kept, counted for its layer, and done again as soon as the layer has memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_refit_ext.copies import storage_id
from vllm_refit_ext.core.errors import RefitError

Kept = tuple[str, Any, tuple[Any, ...], tuple[Any, ...], dict[str, Any]]
"""(attribute, operation, the view's size, stride and offset, further arguments, named arguments)."""


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Make it before `initialize_layerwise_reload`, call `watch` after it, and run the model's loader inside both contexts.

    `count`: elements copied into each parameter or buffer, by full name; a shared one under its first name. `live`: whether a
    loader wrote into memory that the engine serves from (tensors that the reload never moves to the meta device).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: dict[str, int] = {}
        self.live = False
        self._first: dict[str, str] = {}
        self._where: dict[int, tuple[nn.Module, str, str]] = {}
        self._served: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._paths: dict[nn.Module, str] = {}
        self._tensors: list[torch.Tensor] = []  # keeps storages alive, so that no id is used twice
        self._kept: dict[nn.Module, list[Kept]] = {}
        self._wrapped = self._processing = False
        owners: dict[int, str] = {}
        for name, _, _, tensor in _tensors_of(model):
            self._first[name] = owners.setdefault(id(tensor), name)

    def watch(self, model: nn.Module) -> None:
        """Learn the tensors that loaders are handed: those on the meta device, and those that stay live."""
        self._paths = {module: path for path, module in model.named_modules()}
        for _, layer, attribute, tensor in _tensors_of(model):
            self._learn(layer, attribute, tensor)
            if not tensor.is_meta:
                self._served.append((layer, attribute, tensor))

    def _learn(self, layer: nn.Module, attribute: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and layer in self._paths and not self._processing:
            name = _join(self._paths[layer], attribute)
            self._tensors.append(tensor)
            self._where[storage_id(tensor)] = layer, attribute, self._first.get(name, name)

    def put_back(self) -> None:
        """Give the live tensors that a loader replaced (a bias that it makes anew) their contents and their place."""
        for layer, attribute, tensor in self._served:
            now = getattr(layer, attribute, None)
            if isinstance(now, torch.Tensor) and now is not tensor and now.shape == tensor.shape:
                tensor.data.copy_(now)
                (layer._parameters if attribute in layer._parameters else layer._buffers)[attribute] = tensor  # type: ignore[assignment]

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Within it vLLM's reload does the kept writes when it gives a layer memory."""
        from vllm.model_executor.model_loader.reload import layerwise

        names = ("get_numel_loaded", "_layerwise_process", "materialize_layer")
        original = {name: getattr(layerwise, name) for name in names}
        layerwise.get_numel_loaded = self._within("_wrapped", original["get_numel_loaded"])
        layerwise._layerwise_process = self._within("_processing", original["_layerwise_process"])

        def materialize_layer(layer: nn.Module, *rest: Any) -> None:
            original["materialize_layer"](layer, *rest)
            for attribute, func, geometry, arguments, named in self._kept.pop(layer, ()):
                func(getattr(layer, attribute).data.as_strided(*geometry), *arguments, **named)

        layerwise.materialize_layer = materialize_layer
        # Loaders may make parameters, such as a bias that only some checkpoints have.
        learning = (
            hooks.register_module_parameter_registration_hook(self._learn),
            hooks.register_module_buffer_registration_hook(self._learn),
        )
        try:
            yield
        finally:
            for handle in learning:
                handle.remove()
            for name, function in original.items():
                setattr(layerwise, name, function)

    def _within(self, flag: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            setattr(self, flag, True)
            try:
                return function(*arguments)
            finally:
                setattr(self, flag, False)

        return call

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._processing or not func._schema.is_mutable or not args or not isinstance(args[0], torch.Tensor):
            return result
        target = args[0]
        spot = self._where.get(storage_id(target))
        if spot is not None:
            if func is torch.ops.aten.copy_.default:
                self.count[spot[2]] = self.count.get(spot[2], 0) + target.numel()
            self.live = self.live or not target.is_meta
            if target.is_meta and not self._wrapped:
                self._keep(func, spot, target, args[1:], kwargs)
        return result

    def _keep(
        self, func: Any, spot: tuple[nn.Module, str, str], target: torch.Tensor, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """A loader wrote to a parameter without its `weight_loader`: keep the write until the layer has memory.

        Attention layers get none: vLLM puts their live tensors back and loads scales only.
        """
        from vllm.model_executor.model_loader.reload import layerwise

        layer, attribute, name = spot
        info = layerwise.get_layerwise_info(layer)
        whole: Any = getattr(layer, attribute, None)
        usable = info.can_load() and isinstance(whole, torch.Tensor) and storage_id(whole) == storage_id(target)
        computed = any(isinstance(value, torch.Tensor) and value.is_meta for value in (*arguments, *named.values()))
        if not usable or computed or target.dtype != whole.dtype or hasattr(layer, "kv_cache"):
            why = f"the model's loader writes past vLLM's reload, by {func}"
            raise RefitError(why, where=f"engine parameter {name!r}", do="this model can't be reloaded in place: report it")
        geometry = (tuple(target.size()), tuple(target.stride()), int(target.storage_offset()))
        self._kept.setdefault(layer, []).append((attribute, func, geometry, arguments, named))
        if func is torch.ops.aten.copy_.default:
            info.load_numel += target.numel()
            if info.load_numel >= info.load_numel_total:
                layerwise._layerwise_process(layer, info)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(full name, module, attribute, tensor) of every parameter and buffer."""
    for path, module in model.named_modules():
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not isinstance(
                tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer
            ):
                yield _join(path, attribute), module, attribute, tensor


def _join(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute
