"""MXFP8 parameters of a live engine: where their values and scales lie, in which layout, and by which rule the engine quantises.

The class of the kernel says which layout to expect; shape, dtype and strides must then confirm it. What does not fit exactly is
unknown, with the reason, and takes the engine's own reload.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from vllm_refit_ext.core.coded import SCALE, Coding
from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.layouts import Stored, layout_of
from vllm_refit_ext.core.mxfp8 import BLOCK, Rule
from vllm_refit_ext.core.placement import Buffer
from vllm_refit_ext.engine import inventory
from vllm_refit_ext.receiver.engine import StoredParam

LINEAR_METHODS = frozenset({"Mxfp8OnlineLinearMethod", "ModelOptMxFp8LinearMethod", "ModelOptLinearMethod"})
EXPERT_METHODS = frozenset({"Mxfp8OnlineMoEMethod", "ModelOptMxFp8FusedMoE", "CompressedTensorsW8A8Mxfp8MoEMethod"})
SCHEMES = frozenset({"CompressedTensorsW8A8Mxfp8"})
"""Schemes of compressed-tensors, which hang on the layer and hold the kernel in the method's place."""
LINEAR_KERNELS = {
    "MarlinMxfp8LinearKernel": "marlin",
    "EmulationMxfp8LinearKernel": "plain",
    "FlashInferCutlassMxfp8LinearKernel": "linear_128x4",
    "FlashInferCutedslMxfp8LinearKernel": "linear_128x4",
}
EXPERT_BACKENDS = {"MARLIN": "marlin", "EMULATION": "plain", "FLASHINFER_TRTLLM": "trtllm_moe"}
BYTES = (torch.uint8, torch.float8_e8m0fnu)
MARLIN_PADDING = 128
"""Marlin pads a linear's sizes to less than this much more."""


def is_mxfp8(module: nn.Module) -> bool:
    """Whether the module's quantisation method means MXFP8."""
    name = type(getattr(module, "quant_method", None)).__name__
    return name in EXPERT_METHODS or "Mxfp8" in linear_kernel(module)


def linear_kernel(module: nn.Module) -> str:
    """The class of the kernel that multiplies a quantised linear layer, empty where none is known."""
    method, scheme = getattr(module, "quant_method", None), getattr(module, "scheme", None)
    if type(method).__name__ in LINEAR_METHODS:
        return type(getattr(method, "kernel", None)).__name__
    if type(method).__name__ == "CompressedTensorsLinearMethod" and type(scheme).__name__ in SCHEMES:
        return type(getattr(scheme, "kernel", None)).__name__
    return ""


def stored_param(created: Buffer, module: nn.Module, device: torch.device, engine_dtype: torch.dtype) -> StoredParam | str:
    """The live parameter that the model created as `created`, or the reason why its layout is not known."""
    attribute = created.name.rpartition(".")[2]
    method: Any = module.quant_method
    expert = type(method).__name__ in EXPERT_METHODS
    source = _backend(method) if expert else linear_kernel(module)
    layout = (EXPERT_BACKENDS if expert else LINEAR_KERNELS).get(source)
    if layout is None:
        return f"the layout of the MXFP8 kernel {source} is not known"
    values, scales = (getattr(module, name, None) for name in (attribute, attribute + SCALE))
    if not isinstance(values, torch.Tensor) or not isinstance(scales, torch.Tensor) or values.is_meta:
        return "it is gone after the post-load step"
    if layout == "marlin" and engine_dtype == torch.float16:
        return "Marlin's own conversion of scales loses bytes in a float16 engine"
    rule = engine_rule(device.type, device.index)
    if rule is None:
        return "the engine's own quantiser follows neither known rule"
    gated = expert and attribute.startswith("w13") and _is_gated(created.shape, module)
    found = _confirm(layout, created.shape, values.detach(), scales.detach(), gated)
    if isinstance(found, str):
        return found
    stored, memory = found
    others = _other_scales(module, attribute, scales.detach()) if expert else []
    return StoredParam(Coding(layout, rule), created.shape, stored, memory, [scales.detach(), *others])


def _backend(method: Any) -> str:
    backend = getattr(method, "fp8_backend", None) or getattr(method, "mxfp8_backend", None)
    return str(getattr(backend, "name", "unknown"))


def _is_gated(shape: tuple[int, ...], module: nn.Module) -> bool:
    """Whether a w13 of canonical [E, N, K] is two halves. `w2` [E, K, I] says how many rows one half has."""
    partition = getattr(module, "intermediate_size_per_partition", None)
    config = getattr(module, "moe_config", None)
    partition = partition or getattr(config, "intermediate_size_per_partition", None)
    return partition is None or shape[-2] == 2 * int(partition)


def _confirm(
    layout: str, shape: tuple[int, ...], values: torch.Tensor, scales: torch.Tensor, gated: bool
) -> tuple[Stored, torch.Tensor] | str:
    """(one stored matrix, the values' memory in layout order), or what does not fit."""
    *lead, n, k = shape
    if len(shape) not in (2, 3) or k % BLOCK:
        return f"its canonical shape {list(shape)} is not of matrices with whole blocks"
    got = f"{values.dtype} {list(values.shape)} with scales {scales.dtype} {list(scales.shape)}".replace("torch.", "")
    if layout == "linear_128x4" and tuple(values.shape) == (k, n) and values.stride() == (1, k):
        values = values.t()
    if not values.is_contiguous() or not scales.is_contiguous():
        return f"the {layout} kernel's tensors are not contiguous: {got}"
    if layout == "marlin":
        fits = values.dtype == torch.int32 and scales.dtype in BYTES and values.ndim == scales.ndim == len(shape)
        if not fits or list(values.shape[:-2]) != lead or list(scales.shape[:-2]) != lead:
            return f"not what Marlin makes of {list(shape)}: {got}"
        stored = Stored(values.shape[-1] // 4, values.shape[-2] * 16)
        padded = MARLIN_PADDING if not lead else 1
        if not (0 <= stored.rows - n < padded and 0 <= stored.cols - k < padded) or tuple(scales.shape[-2:]) != (
            stored.blocks,
            stored.rows,
        ):
            return f"not what Marlin makes of {list(shape)}: {got}"
        return stored, values
    stored = Stored(n, k, gated)
    if tuple(values.shape) != shape or values.dtype != torch.float8_e4m3fn or scales.dtype not in BYTES:
        return f"not what the {layout} kernel makes of {list(shape)}: {got}"
    one = layout_of(layout).scale_shape(stored)
    size = 1
    for m in (*lead, *one):
        size *= m
    if scales.numel() != size or (layout == "plain" and tuple(scales.shape) != (*lead, *one)):
        return f"not the scales that the {layout} kernel makes of {list(shape)}: {got}"
    try:
        layout_of(layout).check(stored)
    except LayoutError as error:
        return str(error)
    return stored, values


def _other_scales(module: nn.Module, attribute: str, scales: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of the expert kernel that hold the same scales in other memory.

    The kernel's config keeps a reference of its own. After vLLM's reload that is another tensor than the layer's, which eager
    steps read and captured graphs don't.
    """
    index = "w1" if attribute.startswith("w13") else "w2"
    other = "w2" if index == "w1" else "w1"
    found: dict[int, torch.Tensor] = {}
    for name, tensor in inventory.tensors(module).items():
        if "." not in name and "[" not in name:
            continue
        same = tuple(tensor.shape) == tuple(scales.shape) and tensor.element_size() == 1
        if same and index in name and other not in name and tensor.data_ptr() != scales.data_ptr():
            found[tensor.data_ptr()] = tensor.detach()
    return list(found.values())


def has_config(module: nn.Module) -> bool:
    """Whether the module's kernels have a config of their own, which may refer to scales."""
    return hasattr(getattr(module, "quant_method", None), "moe_quant_config")


def config_scale(module: nn.Module, attribute: str) -> int:
    """Address of the scales that the expert kernel's own config refers to, 0 where there is none."""
    config = getattr(getattr(module, "quant_method", None), "moe_quant_config", None)
    scales = getattr(config, "w1_scale" if attribute.startswith("w13") else "w2_scale", None)
    return scales.data_ptr() if isinstance(scales, torch.Tensor) else 0


@functools.cache
def engine_rule(kind: str, index: int | None) -> Rule | None:
    """The rule of the engine's own quantiser, from what it makes of a block whose largest element is 1; None if neither."""
    try:
        from vllm.model_executor.layers.quantization.utils.mxfp8_utils import mxfp8_e4m3_quantize
    except ImportError:
        return None
    block = torch.zeros(128, 128, dtype=torch.bfloat16, device=torch.device(kind) if index is None else torch.device(kind, index))
    block[:, ::BLOCK] = 1.0
    byte = int(mxfp8_e4m3_quantize(block)[1].view(torch.uint8).reshape(-1)[0])
    return {127: "floor", 119: "ceil"}.get(byte)  # type: ignore[return-value]
