"""Real megatron-core and megatron-bridge trained on a machine without CUDA or without Transformer Engine.

Call `install()` before anything of `megatron` is imported. With CUDA and Transformer Engine present it does nothing; with CUDA
alone only the stand-in for Transformer Engine is active. On a CPU the model code runs unchanged on gloo: `without_cuda` of
`megatron_sender` lets it be built, and the allowances here (streams, memory figures, types) let it be trained.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from megatron_sender.without_cuda import stand_in_for_transformer_engine, without_cuda
from vllm_refit_ext.core.stand_ins import swap

_for_good: ExitStack | None = None
"""Entered and never left: what goes when the caller returns would help nobody."""


def install() -> None:
    """Put in place what this machine lacks. May be called again; the first call counts.

    Raises RuntimeError when megatron was imported before, since it decides at import what it has.
    """
    global _for_good
    if _for_good is not None:
        return
    if "megatron.bridge" in sys.modules or "megatron.core.transformer" in sys.modules:
        raise RuntimeError("examples.support.megatron_cpu.install() must run before megatron is imported")
    stand_in_for_transformer_engine()
    _for_good = ExitStack()
    if not torch.cuda.is_available():
        _for_good.enter_context(without_cuda())
        _install_streams(_for_good)
        _install_types()
        _install_dispatcher()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class _Stream:
    """A CPU does everything in order, so every stream is the same one and nothing ever has to wait."""

    cuda_stream = priority = stream_id = device_index = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...


def _answering(answer: Any) -> Callable[..., Any]:
    """A new function for each name: torch.compile refuses one object that stands for functions with unlike rules."""
    return lambda *args, **kwargs: answer


def _install_streams(stack: ExitStack) -> None:
    answers: dict[str, Any] = {
        "current_stream": _Stream(),
        "default_stream": _Stream(),
        "is_current_stream_capturing": False,
        "get_device_capability": (0, 0),
        "mem_get_info": (1 << 40, 1 << 40),
        "memory_stats": {},
    }
    for name in ("set_stream", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        answers[name] = None
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        answers[name] = 0
    for name, answer in answers.items():
        swap(stack, torch.cuda, name, _answering(answer))
    swap(stack, torch.cuda, "Stream", _Stream)
    swap(stack, torch.cuda, "Event", _Event)
    swap(stack, torch.cuda, "stream", lambda *a, **k: nullcontext())
    for name in ("range_push", "range_pop"):
        swap(stack, torch.cuda.nvtx, name, _answering(None))


def _install_types() -> None:
    """The mixed-precision optimizer sorts parameters by the string "torch.cuda.BFloat16Tensor"."""
    real_type = torch.Tensor.type

    def type_as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real_type(self, *args, **kwargs)
        # A torch function mode calls this twice.
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = type_as_on_cuda


def _install_dispatcher() -> None:
    """The all-to-all dispatcher turns split sizes into lists only when they come from CUDA; gloo needs lists as well."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    real = moe_utils.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any) -> Any:
        if as_numpy and torch.is_tensor(tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
        return real(tensor, as_numpy, *args, **kwargs)

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = move
