"""Building Megatron's modules where CUDA or Transformer Engine is missing.

Model code runs unchanged. What is replaced is what it asks of the machine while it is built: the current device,
`device="cuda"` literals, and the random-number tracker. Nothing here computes with a weight.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vllm_refit_ext.core.stand_ins import swap

NEED_TRANSFORMER_ENGINE = frozenset(
    {"megatron.bridge.peft.lora_layers", "megatron.bridge.models.gpt_full_te_layer_autocast_spec"}
)
"""Modules of megatron-bridge 0.6 that import Transformer Engine unconditionally. The local layer specs call nothing of it."""


def stand_in_for_transformer_engine() -> None:
    """Let the bridge be imported without Transformer Engine. Call it before the bridge is imported; it lasts, and does nothing
    where Transformer Engine is installed."""
    known = any(isinstance(finder, _StandInFinder) for finder in sys.meta_path)
    if not known and importlib.util.find_spec("transformer_engine") is None:
        sys.meta_path.insert(0, _StandInFinder())


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Within the context Megatron's modules are built on the CPU, whether CUDA is available or not."""
    with contextlib.ExitStack() as stack:
        _answer_for_cuda(stack)
        _track_random_states(stack)
        _allow_sequence_parallel_norm(stack)
        yield


class _StandIn(types.ModuleType):
    """A module whose every attribute is an empty class: enough to subclass and compare with while a module is executed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # so that it passes for a package

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        cls = type(name, (torch.nn.Module,), {"__module__": self.__name__})
        setattr(self, name, cls)
        return cls


class _StandInLoader(importlib.abc.Loader):
    """Runs one module with stand-ins for Transformer Engine in `sys.modules`, then takes them out again.

    They must not stay: megatron-core would take their presence for the real thing.
    """

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")
        if any(name in sys.modules for name in names):
            self.inner.exec_module(module)
            return
        root, pytorch, ops = (_StandIn(name) for name in names)
        vars(root)["pytorch"], vars(pytorch)["ops"] = pytorch, ops
        sys.modules.update(zip(names, (root, pytorch, ops), strict=True))
        try:
            self.inner.exec_module(module)
        finally:
            for name in names:
                sys.modules.pop(name, None)


class _StandInFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in NEED_TRANSFORMER_ENGINE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _StandInLoader(spec.loader)
        return spec


class _Unused:
    """A stream or event that a module makes when it is built and would use when it computes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...


class _CudaMeansCpu(torch.overrides.TorchFunctionMode):
    """Megatron's modules, schedules, gradient clipping and scaler write `device="cuda"` literally."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def _names_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _answer_for_cuda(stack: contextlib.ExitStack) -> None:
    # torch.manual_seed seeds the CPU generator itself, so the CUDA ones have nothing left to do.
    for name in ("set_device", "manual_seed", "manual_seed_all"):
        swap(stack, torch.cuda, name, lambda *a, **k: None)
    swap(stack, torch.cuda, "current_device", lambda: torch.device("cpu"))
    for name in ("Stream", "Event", "current_stream", "default_stream"):
        swap(stack, torch.cuda, name, _Unused)
    for owner in (torch.cuda, torch.cuda.random):
        swap(stack, owner, "get_rng_state", lambda *a, **k: torch.get_rng_state())
        swap(stack, owner, "set_rng_state", lambda state, *a, **k: torch.set_rng_state(state))
    for kind in (torch.Tensor, torch.nn.Module):
        swap(stack, kind, "cuda", lambda self, *a, **k: self)
    stack.enter_context(_CudaMeansCpu())


def _track_random_states(stack: contextlib.ExitStack) -> None:
    from megatron.core.tensor_parallel import random

    def add(self: Any, name: str, seed: int) -> None:
        self._is_initialized = True
        if seed in self.seeds_ or name in self.states_:
            raise RuntimeError(f"random state {name!r} or seed {seed} exists already")
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self: Any, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        if name not in self.states_:
            raise RuntimeError(f"random state {name!r} was not added")
        outer, outer_name = torch.get_rng_state(), self._current_state_name
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)
            self._current_state_name = outer_name

    swap(stack, random.CudaRNGStatesTracker, "add", add)
    swap(stack, random.CudaRNGStatesTracker, "fork", fork)
    swap(stack, random, "_set_cuda_rng_state", lambda state, *a, **k: torch.set_rng_state(state))
    swap(stack, random, "_get_cuda_rng_state", lambda *a, **k: torch.get_rng_state())


def _allow_sequence_parallel_norm(stack: contextlib.ExitStack) -> None:
    """torch's norm refuses sequence parallelism, which MoE training with TP insists on. The arithmetic needs nothing: the
    parameters only have to be marked, so that Megatron sums their gradients over TP, as the fused norms do."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    real = WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        marked, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = real(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = marked
        for parameter in norm.parameters():
            parameter.sequence_parallel = marked
        return norm

    swap(stack, WrappedTorchNorm, "__new__", staticmethod(new))
