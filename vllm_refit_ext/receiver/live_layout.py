"""Which layout a live parameter has after the engine's post-load step. What is not known exactly has none and is reloaded.

A module without a quantisation method uses its parameters as it created them. With one, its class decides: `KNOWN` maps the
class name to a function that looks at the live module. A function must be certain, since a wrong answer writes weights where
the kernel does not read them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vllm_refit_ext.core.placement import Buffer
from vllm_refit_ext.receiver.worker_view import WorkerView
from vllm_refit_ext.receiver.writers import PLAIN

Detect = Callable[[nn.Module, WorkerView], tuple[str, str]]
"""(module, view) -> (layout, reason); an empty layout means unknown, and the reason says why."""


def _dense(module: nn.Module, view: WorkerView) -> tuple[str, str]:
    if view.device.type == "cpu":
        return "", "CPU kernels pack linear weights into handles of their own"
    return PLAIN, ""


def _experts(module: nn.Module, view: WorkerView) -> tuple[str, str]:
    if view.device.type == "cpu":
        return "", "CPU kernels pack expert weights in place"
    method = getattr(module, "quant_method", None)
    backend = getattr(getattr(method, "unquantized_backend", None), "name", "unknown")
    if backend in ("TRITON", "BATCHED_TRITON"):
        return PLAIN, ""
    return "", f"the layout of the {backend} expert kernels is not known"


KNOWN: dict[str, Detect] = {
    "UnquantizedLinearMethod": _dense,
    "UnquantizedEmbeddingMethod": _dense,
    "UnquantizedFusedMoEMethod": _experts,
}


def layout_of(created: Buffer, live: torch.Tensor | None, module: nn.Module, view: WorkerView) -> tuple[str, str]:
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


def derived_from(model: nn.Module) -> dict[str, str]:
    """Modules whose weights the engine also keeps in a derived form: module path -> what is derived.

    Absorbed MLA projections (`W_UV`, `W_UK_T` and their relatives) are made from `kv_b_proj` once, after loading.
    """
    found = {}
    paths = {id(m): path for path, m in model.named_modules()}
    for module in model.modules():
        absorbed = [n for n in ("W_UV", "W_UK_T", "W_UK", "W_K", "W_V") if isinstance(module.__dict__.get(n), torch.Tensor)]
        projection = getattr(module, "kv_b_proj", None)
        if absorbed and isinstance(projection, nn.Module):
            found[paths[id(projection)]] = f"{', '.join(absorbed)} are derived from it"
    return found
