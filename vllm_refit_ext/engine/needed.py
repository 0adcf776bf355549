"""The private names of vLLM that a refit needs, by the module where they stand, and which of them an installed vLLM lacks.

What all supported versions have in common stands here. Names that only some versions have are asked for where they are used.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

from vllm_refit_ext.core.errors import ConfigError, Problem

CORE = "vllm.v1.engine.core"
CORE_CLIENT = "vllm.v1.engine.core_client"
OUTPUT_PROCESSOR = "vllm.v1.engine.output_processor"
FACTORY = "vllm.distributed.weight_transfer.factory"
LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"

NEEDED: dict[str, tuple[str, ...]] = {
    FACTORY: ("WeightTransferEngineFactory._registry", "WeightTransferEngineFactory.register_engine"),
    "vllm.distributed.weight_transfer.base": ("WeightTransferEngine",),
    LAYERWISE: (
        "LAYERWISE_INFO",
        "LOADING_LAYERS",
        "_layerwise_process",
        "_place_kernel_tensors",
        "finalize_layerwise_reload",
        "get_layerwise_info",
        "get_numel_loaded",
        "initialize_layerwise_reload",
        "materialize_layer",
    ),
    "vllm.model_executor.model_loader.reload.meta": ("SKIP_TENSORS", "materialize_meta_tensor"),
    CORE: (
        "EngineCore.collective_rpc",
        "EngineCore.preprocess_add_request",
        "EngineCore.add_request",
        "EngineCore.reset_prefix_cache",
        "EngineCore.reset_encoder_cache",
        "EngineCore.step",
        "EngineCore.step_with_batch_queue",
        "EngineCore.scheduler",
        "EngineCore.model_executor",
        "EngineCore.request_block_hasher",
        "EngineCoreProc._handle_client_request",
        "Request.cache_salt",
        "Request.block_hashes",
    ),
    CORE_CLIENT: ("DPLBAsyncMPClient.call_utility_async", "DPLBAsyncMPClient._call_utility_async"),
    OUTPUT_PROCESSOR: ("OutputProcessor.process_outputs", "OutputProcessor.abort_requests", "OutputProcessor.request_states"),
    "vllm.v1.engine": ("EngineCoreOutput", "EngineCoreOutputs", "FinishReason"),
    "vllm.v1.request": ("RequestStatus.FINISHED_ERROR",),
    "vllm.v1.worker.gpu_worker": (
        "Worker.init_weight_transfer_engine",
        "Worker.start_weight_update",
        "Worker.update_weights",
        "Worker.finish_weight_update",
        "Worker.execute_model",
        "Worker.weight_transfer_engine",
        "Worker._weight_update_active",
    ),
}
"""Module -> functions, classes, and attributes of classes, those that constructors set included."""


def lacking(name: str, module: Any = None) -> list[str]:
    """Which of the names of module `name` it has not, each in full. module: it, where it is imported already."""
    if module is None:
        try:
            module = importlib.import_module(name)
        except ImportError:
            return [name]
    return [f"{name}.{path}" for path in NEEDED[name] if not _has(module, path)]


def require(name: str, module: Any) -> None:
    """Raise ConfigError with all names that `module`, vLLM's module `name`, has not."""
    if gone := lacking(name, module):
        raise ConfigError.of(problems(gone))


def problems(gone: list[str]) -> list[Problem]:
    """A sentence for each name that is gone."""
    version = getattr(sys.modules.get("vllm"), "__version__", "")
    do = "install a supported vLLM, or leave this extension out"
    return [Problem("a name that a refit needs is gone", name, f"vLLM {version}, which has not got it", "", do) for name in gone]


def _has(module: Any, path: str) -> bool:
    owner, _, name = path.rpartition(".")
    holder = getattr(module, owner, None) if owner else module
    if holder is None:
        return False
    if hasattr(holder, name):
        return True
    constructors = [base.__dict__["__init__"] for base in getattr(holder, "__mro__", ()) if "__init__" in base.__dict__]
    codes = [getattr(inspect.unwrap(constructor), "__code__", None) for constructor in constructors]
    return any(code is not None and name in code.co_names for code in codes)
