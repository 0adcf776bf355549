"""What is done to vLLM's modules as soon as they are imported. Light: a hook imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_refit_ext.engine import needed


def _register_backend(module: Any) -> None:
    factory = module.WeightTransferEngineFactory
    if "refit" not in factory._registry:
        factory.register_engine("refit", "vllm_refit_ext.engine.weight_transfer", "RefitEngine")
    trainers = getattr(module, "WeightTransferTrainerFactory", None)  # since 0.28
    if trainers is not None and "refit" not in trainers._registry:
        trainers.register_engine("refit", "vllm_refit_ext.sender.trainer_engine", "RefitTrainerEngine")


def _guard_engine(module: Any) -> None:
    from vllm_refit_ext.engine import core_hook

    core_hook.wrap(module)


def _guard_frontend(module: Any) -> None:
    from vllm_refit_ext.engine import frontend

    frontend.wrap(module)


def _reach_replicas(module: Any) -> None:
    from vllm_refit_ext.engine import frontend

    frontend.wrap_client(module)


HOOKS: dict[str, Callable[[Any], None]] = {
    needed.FACTORY: _register_backend,
    needed.CORE: _guard_engine,
    needed.OUTPUT_PROCESSOR: _guard_frontend,
    needed.CORE_CLIENT: _reach_replicas,
}
"""vLLM's module -> what is done to it."""
