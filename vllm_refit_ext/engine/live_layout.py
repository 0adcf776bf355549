"""Which layout a live parameter has after the engine's post-load step. What is not known exactly has none and is reloaded.

A module without a quantisation method uses its parameters as it created them. With one, its class decides: `KNOWN` maps the
class name to a function that looks at the live module. A function must be certain, since a wrong answer writes weights where
the kernel does not read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_refit_ext.core.coded import PLAIN
from vllm_refit_ext.core.placement import Buffer
from vllm_refit_ext.engine.stored import EXPERT_METHODS, LINEAR_METHODS, is_mxfp8, linear_kernel, stored_param
from vllm_refit_ext.receiver.engine import StoredParam

if TYPE_CHECKING:
    from vllm_refit_ext.engine.rank import EngineRank

Detect = Callable[[nn.Module, "EngineRank"], tuple[str, str]]
"""(module, view) -> (layout, reason); an empty layout means unknown, and the reason says why."""


def _dense(module: nn.Module, view: EngineRank) -> tuple[str, str]:
    if view.device.type == "cpu":
        return "", "CPU kernels pack linear weights into handles of their own"
    return PLAIN, ""


def _experts(module: nn.Module, view: EngineRank) -> tuple[str, str]:
    if view.device.type == "cpu":
        return "", "CPU kernels pack expert weights in place"
    method = getattr(module, "quant_method", None)
    backend = getattr(getattr(method, "unquantized_backend", None), "name", "unknown")
    if backend in ("TRITON", "BATCHED_TRITON"):
        return PLAIN, ""
    return "", f"the layout of the {backend} expert kernels is not known"


def _beside_mxfp8(module: nn.Module, view: EngineRank) -> tuple[str, str]:
    """Biases and the like. Marlin permutes a linear's bias along with its weight."""
    method: Any = getattr(module, "quant_method", None)
    named = (linear_kernel(module), *(getattr(method, n, "") for n in ("fp8_backend", "mxfp8_backend")))
    backend = " ".join(map(str, named))
    if "marlin" in backend.lower():
        return "", "Marlin permutes biases"
    return PLAIN, ""


def _beside_compressed(module: nn.Module, view: EngineRank) -> tuple[str, str]:
    """One class of method serves every scheme of compressed-tensors."""
    if is_mxfp8(module):
        return _beside_mxfp8(module, view)
    return "", f"the layouts of {type(getattr(module, 'scheme', None)).__name__} are not known"


KNOWN: dict[str, Detect] = {
    "UnquantizedLinearMethod": _dense,
    "UnquantizedEmbeddingMethod": _dense,
    "UnquantizedFusedMoEMethod": _experts,
    **dict.fromkeys(LINEAR_METHODS | EXPERT_METHODS, _beside_mxfp8),
    "CompressedTensorsLinearMethod": _beside_compressed,
}


def layout_of(created: Buffer, live: torch.Tensor | None, module: nn.Module, view: EngineRank) -> tuple[str, str]:
    """The layout of a live parameter, and the reason where it is unknown (empty layout).

    created: the parameter as the model created it. live: what the module holds now, or None. module: its owner.
    """
    if live is None or live.is_meta:
        return "", "it is gone after the post-load step"
    if tuple(live.shape) != created.shape or str(live.dtype) != f"torch.{created.dtype}":
        return "", f"the post-load step made it {str(live.dtype).removeprefix('torch.')} {list(live.shape)}"
    if not live.is_contiguous():
        return "", "it is not contiguous"
    method = getattr(module, "quant_method", None)
    if method is None:
        return PLAIN, ""
    detect = KNOWN.get(type(method).__name__)
    if detect is None:
        return "", f"the layouts of {type(method).__name__} are not known"
    return detect(module, view)


def look_at(
    view: EngineRank, created: Iterable[Buffer], live: Mapping[str, torch.Tensor]
) -> tuple[dict[str, StoredParam], dict[str, str]]:
    """The MXFP8 parameters by name, and the parameters that can't be written in place, with the reason."""
    modules = dict(view.model.named_modules(remove_duplicate=False))
    stored: dict[str, StoredParam] = {}
    unknown: dict[str, str] = {}
    for buffer in created:
        owner, _, attribute = buffer.name.rpartition(".")
        module = modules[owner]
        if is_mxfp8(module) and attribute.endswith("weight"):
            found = stored_param(buffer, module, view.device, view.vllm_config.model_config.dtype)
            if isinstance(found, StoredParam):
                stored[buffer.name] = found
            else:
                unknown[buffer.name] = found
            continue
        layout, reason = layout_of(buffer, live.get(buffer.name), module, view)
        if not layout:
            unknown[buffer.name] = reason
    return stored, unknown
