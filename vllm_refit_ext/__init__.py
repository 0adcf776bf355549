"""The engine's side of a refit: a vLLM worker extension that receives new weights by plan.

Pass `--worker-extension-cls vllm_refit_ext.RefitWorkerExtension` to vLLM, then call `prepare_refit_info` and `update_weights`
by `collective_rpc`. The extension is loaded on first use, so that `import vllm_refit_ext.core` needs numpy alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_refit_ext.engine.extension import RefitWorkerExtension

__all__ = ["RefitWorkerExtension"]


def __getattr__(name: str) -> object:
    if name == "RefitWorkerExtension":
        from vllm_refit_ext.engine.extension import RefitWorkerExtension

        return RefitWorkerExtension
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
