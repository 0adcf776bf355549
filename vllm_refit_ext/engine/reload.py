"""vLLM's own reload as a writer: right for every quantisation method and layout, slow, and guarded here.

vLLM's layerwise reload puts every layer on the meta device, collects the tensors of a layer, then materialises, loads,
post-processes and copies the result into the layer's live tensors. It believes what it is given: a layer that gets half of its
tensors is filled up with uninitialised memory, and a failed reload poisons the next one. `reload_weights` checks before anything
is finalised, and `recover` puts a model back that a failure left half way.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
from torch.utils._python_dispatch import _disable_current_modes

from vllm_refit_ext.core.errors import ManifestError, Problem, RefitError, TornError
from vllm_refit_ext.engine.reload_writes import Writes

if TYPE_CHECKING:
    from vllm_refit_ext.engine.rank import EngineRank


class Reload(msgspec.Struct, frozen=True):
    """What a reload did: `tensors` and `bytes` taken from the iterator; `untouched`, layers with parameters that got none."""

    tensors: int
    bytes: int
    untouched: list[str]


class _Feed:
    """The caller's iterator on its way into `load_weights`: counts, remembers, and refuses a name that comes twice."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.tensors = tensors
        self.seen: dict[str, None] = {}
        self.nbytes = 0
        self.current = ""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = iter(self.tensors)
        while True:
            # The reload's modes, a default device and the count of what is written, are for the model's loaders: who fills the
            # tensors would pay for them with every call.
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                given = next(tensors, None)
            if given is None:
                break
            name, tensor = given
            if name in self.seen:
                raise ManifestError("a tensor came twice in one reload", where=name, do="send every tensor once")
            self.seen[name] = None
            self.nbytes += tensor.nbytes
            self.current = name
            yield name, tensor
        self.current = ""


def reload_weights(
    view: EngineRank,
    tensors: Iterable[tuple[str, torch.Tensor]],
    names: Collection[str] | None = None,
    wanted: Mapping[str, int] | None = None,
) -> Reload:
    """Load checkpoint tensors (Hugging Face names, shapes and dtypes) through vLLM's own reload, in place.

    Arguments: `tensors`, any order, best grouped by layer (a layer is held until it is complete). **Each tensor must own its
    memory until the call returns**: the reload keeps references and reads them when the layer is complete, so a view of a
    staging buffer that is used again would load later bytes. `names`, all that must come; without it, no layer may be left
    part-loaded. `wanted`, engine parameter -> elements that the loaders must have written in it (`Routes.wanted`).

    Raises `ManifestError` (a name twice, missing or refused by the model's loader; a parameter that was not written) or the
    iterator's own error, with the
    model as it was when no layer had been written yet; `TornError` with the same problems when one had. Either way the next
    reload starts clean.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import layerwise

    model = view.model
    recover(view)
    addresses = _addresses(model)
    feed, writes = _Feed(tensors), Writes(model)
    # A default device is a mode that each call of torch goes through.
    device = contextlib.nullcontext() if view.device == torch.get_default_device() else torch.device(view.device)
    context = set_current_vllm_config(view.vllm_config), device, torch.no_grad()
    with context[0], context[1], context[2], _zeroed_padding(), writes.replaying():
        kernels = _forget_cpu_kernels(view)
        _name_loaders(model)
        layerwise.initialize_layerwise_reload(model)
        writes.watch(model)
        open_layers = {layer for layer in model.modules() if layerwise.get_layerwise_info(layer).can_load()}
        try:
            with writes:
                cast(Any, model).load_weights(iter(feed))
            writes.put_back()
            untouched = _check_complete(model, feed, names)
            _check_written(writes, wanted or {})
        except Exception as error:
            wrote = writes.live or any(not layerwise.get_layerwise_info(layer).can_load() for layer in open_layers)
            recover(view)
            _restore_cpu_kernels(kernels)
            raise _explain(error, feed, wrote) from error
        try:
            with _expecting_untouched_layers():
                layerwise.finalize_layerwise_reload(model, view.vllm_config.model_config)
            _restore_cpu_kernels(kernels)
            untouched = _settle_tied(view, untouched)
            _check_in_place(model, addresses)
        except Exception as error:
            recover(view)
            _restore_cpu_kernels(kernels)
            raise _explain(error, feed, wrote=True) from error
    if hasattr(view.model_runner, "reset_lora_state"):
        view.model_runner.reset_lora_state()
    return Reload(len(feed.seen), feed.nbytes, untouched)


def recover(view: EngineRank) -> list[str]:
    """Put back the live tensors of every layer that an unfinished reload left on the meta device, and forget what it had
    collected.

    Returns the names of those layers; empty when nothing was open. Layers that the reload had already written keep the new
    values.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    restored = []
    for name, layer in view.model.named_modules():
        info = layerwise.LAYERWISE_INFO.get(layer)
        if info is None or not info.can_load():
            continue
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            restored.append(name)
        info.reset()
    if hasattr(view.model, "_original_do_torchao_reload"):
        view.model._do_torchao_reload = view.model._original_do_torchao_reload
    layerwise.LOADING_LAYERS.clear()
    return restored


def _check_complete(model: torch.nn.Module, feed: _Feed, names: Collection[str] | None) -> list[str]:
    """Names of the layers that got nothing. Raises when a tensor did not come, before vLLM makes up what is missing."""
    from vllm.model_executor.model_loader.reload import layerwise

    if names is not None and (absent := [name for name in names if name not in feed.seen]):
        raise ManifestError.of(
            [Problem("the tensor did not come", name, do="send every tensor of the manifest") for name in absent]
        )
    untouched, short = [], []
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load() or not info.load_numel_total:
            continue
        if info.load_numel <= 0:
            # a layer of buffers alone (rotary tables, ...) has nothing that a checkpoint could fill
            if any(True for _ in layer.parameters(recurse=False)):
                untouched.append(name)
        elif info.load_numel < info.load_numel_total and names is None:
            short.append(
                Problem(
                    "the layer got a part of its elements",
                    name,
                    str(info.load_numel),
                    str(info.load_numel_total),
                    "send all tensors of the layer, or pass the manifest's names if the rest is padding",
                )
            )
    if short:
        raise ManifestError.of(short)
    return untouched


def _check_written(writes: Writes, wanted: Mapping[str, int]) -> None:
    """What the plan says is written is written: nothing else looks at what a loader makes of the tensors that it is given."""
    short = {name: count for name, count in wanted.items() if writes.count.get(name, 0) < count}
    if short:
        what, do = "the reload did not write it", "this model's loader loses tensors in vLLM's reload: report it"
        raise ManifestError.of(
            [
                Problem(what, f"engine parameter {name!r}", f"{writes.count.get(name, 0)} elements", f"{count} elements", do)
                for name, count in short.items()
            ]
        )


def _check_in_place(model: torch.nn.Module, before: dict[str, int]) -> None:
    """Every tensor is real again and where it was: a captured CUDA graph reads the old address."""
    after = _addresses(model)
    problems = [
        Problem("the tensor was left without storage", name)
        for name, address in after.items()
        if address < 0 <= before.get(name, 0)
    ]
    problems += [
        Problem(
            "the tensor moved during the reload", name, do="captured CUDA graphs would read the old memory: restart the engine"
        )
        for name, address in before.items()
        if address >= 0 and after.get(name, address) not in (address, -1)
    ]
    problems += [Problem("the tensor is gone after the reload", name) for name in before if name not in after]
    if problems:
        raise RefitError.of(problems)


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    """Address of every parameter and buffer; -1 where there is no storage on a device."""
    found: dict[str, int] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        found[name] = -1 if tensor.is_meta else tensor.data_ptr()
    return found


def _explain(error: Exception, feed: _Feed, wrote: bool) -> RefitError:
    """`error` as one of ours, naming the tensor that was being loaded; a `TornError` when live memory had been written."""
    if isinstance(error, RefitError):
        problems, kind = error.problems, type(error)
    else:
        text = f"the model's loader failed: {type(error).__name__}: {error}"
        problems, kind = (
            [Problem(text, feed.current, do="see whether the engine's model takes this name, shape and dtype")],
            ManifestError,
        )
    if wrote:
        return TornError.of(problems, "a reload failed after it had written to the engine; a full refit is needed")
    return kind.of(problems)


@contextlib.contextmanager
def _expecting_untouched_layers() -> Iterator[None]:
    """Without vLLM's warning for every layer that got nothing: it is written in place, or `_check_written` has refused it."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")

    def wanted(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in str(record.msg)

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


@contextlib.contextmanager
def _zeroed_padding() -> Iterator[None]:
    """Materialise layers with zeros: what no loader fills (padding) must not be whatever the allocator held."""
    from vllm.model_executor.model_loader.reload import meta

    original: Any = meta.materialize_meta_tensor

    def zeroed(tensor: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = original(tensor)
        made.zero_()
        return made

    meta.materialize_meta_tensor = zeroed
    try:
        yield
    finally:
        meta.materialize_meta_tensor = original


def _name_loaders(model: torch.nn.Module) -> None:
    """Give loaders that are partial functions a name: vLLM's reload tells its own wrapper from others by `__name__`."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        for tensors in (layer._parameters, layer._buffers, *layerwise.get_layerwise_info(layer).restore_metadata):
            for tensor in tensors.values():
                loader = getattr(tensor, "weight_loader", None)
                if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
                    cast(Any, loader).__name__ = getattr(loader.func, "__name__", "partial")


def _forget_cpu_kernels(view: EngineRank) -> list[tuple[Any, Any]]:
    """Make the CPU's unquantised experts pack again; returns (method, its kernel) of each.

    Since 0.30 they pack on their first post-load step only, so a reload would leave raw weights in a packed buffer and answer
    wrongly without an error. A method object without a kernel packs.
    """
    forgotten: list[tuple[Any, Any]] = []
    for module in view.model.modules() if view.device.type == "cpu" else ():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedFusedMoEMethod" and getattr(method, "moe_kernel", None) is not None:
            forgotten.append((method, method.moe_kernel))
            method.moe_kernel = None
    return forgotten


def _restore_cpu_kernels(forgotten: list[tuple[Any, Any]]) -> None:
    """Give experts that were not loaded their kernel back; their packed weights are the old ones."""
    for method, kernel in forgotten:
        if method.moe_kernel is None:
            method.moe_kernel = kernel


def _settle_tied(view: EngineRank, untouched: list[str]) -> list[str]:
    """`untouched` without the layers that share their parameters with one that was loaded; on a CPU these are packed again.

    A tied output layer shares the embedding's parameter, and the reload counts the embedding alone. What a CPU multiplies
    with is a packed copy of the output layer's own.
    """
    owners: dict[int, list[str]] = {}
    for name, parameter in view.model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    left = []
    for name in untouched:
        layer = view.model.get_submodule(name)
        parameters = list(layer.parameters(recurse=False))
        if not all(any(owner not in untouched for owner in owners[id(parameter)]) for parameter in parameters):
            left.append(name)
            continue
        method: Any = getattr(layer, "quant_method", None)
        if view.device.type == "cpu" and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(layer)
    return left
