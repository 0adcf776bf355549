"""The trainer's side of a refit, for any trainer. vLLM is not needed here.

from vllm_refit_ext.sender import RefitSender, SenderConfig
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_refit_ext.sender.config import SenderConfig as SenderConfig
    from vllm_refit_ext.sender.dtensor import DTensorSource as DTensorSource
    from vllm_refit_ext.sender.sender import RefitReport as RefitReport
    from vllm_refit_ext.sender.sender import RefitSender as RefitSender
    from vllm_refit_ext.sender.source import Source as Source
    from vllm_refit_ext.sender.trainer_engine import RefitTrainerInitInfo as RefitTrainerInitInfo

_HOMES = {
    "DTensorSource": "dtensor",
    "RefitReport": "sender",
    "RefitSender": "sender",
    "SenderConfig": "config",
    "Source": "source",
    "RefitTrainerInitInfo": "trainer_engine",
}

__all__ = ["DTensorSource", "RefitReport", "RefitSender", "RefitTrainerInitInfo", "SenderConfig", "Source"]


def __getattr__(name: str) -> Any:
    # Imported on first use: a source can be made for planning without the wires.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
