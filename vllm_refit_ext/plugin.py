"""The `vllm.general_plugins` entry point: registers the backend `refit` and installs the hooks of the
engine process and of the front end.

vLLM runs it in every process it starts: front ends, engine processes, workers, and the short-lived one that inspects models. So
it imports nothing heavy: each half is installed when vLLM itself imports the module that it belongs to, or at once where that
has happened.

`VLLM_PLUGINS`, if set, must name `refit`; otherwise none of this runs, and what is left is the workers' backstop
(`engine.guard`).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from vllm_refit_ext.engine.hooks import HOOKS

logger = logging.getLogger(__name__)


class _Later(importlib.abc.MetaPathFinder):
    """Runs a hook right after vLLM imports the module it is for."""

    def __init__(self, hooks: dict[str, Callable[[Any], None]]) -> None:
        self.hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that runs the hook afterwards; None for every other module."""
        hook = self.hooks.pop(fullname, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _run(hook, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run(hook: Callable[[Any], None], module: Any) -> None:
    """Run a hook; a vLLM that it does not fit still starts, and the log says what is missing."""
    try:
        hook(module)
    except Exception:
        logger.exception(
            "vllm_refit_ext does not fit this vLLM (%s); torn engines are stopped by their workers instead", module.__name__
        )


def register() -> None:
    """Called by vLLM once or more per process. Idempotent."""
    later = {}
    for name, hook in HOOKS.items():
        if name in sys.modules:
            _run(hook, sys.modules[name])
        else:
            later[name] = hook
    if later and not any(isinstance(finder, _Later) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Later(later))
