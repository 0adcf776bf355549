"""Real megatron-core and megatron-bridge trained on a machine without CUDA or without Transformer Engine.

Call `install()` before anything of `megatron` is imported. With CUDA and Transformer Engine present it does nothing; with CUDA
alone only the stand-in for Transformer Engine is active. On a CPU the model code runs unchanged on gloo, on the ground that
`megatron_sender.without_cuda` gives it; the allowances here are those that training needs beside it.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

import torch

from megatron_sender.without_cuda import stand_in_for_transformer_engine, without_cuda

_for_good: ExitStack | None = None
"""Entered and never left: a ground that goes when the caller returns would help nobody."""


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
        _install_types()
        _install_dispatcher()


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
