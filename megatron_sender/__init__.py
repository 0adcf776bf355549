"""The Megatron side: what a trainer holds, and the hook that hands it over. vLLM is not needed here."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_sender.config_sender import sender_config as sender_config
    from megatron_sender.sender import MegatronSender as MegatronSender
    from megatron_sender.sender import SenderConfig as SenderConfig
    from megatron_sender.source import SourceMap as SourceMap
    from megatron_sender.source import source_map as source_map

_HOMES = {
    "MegatronSender": "sender",
    "SenderConfig": "sender",
    "SourceMap": "source",
    "sender_config": "config_sender",
    "source_map": "source",
}

__all__ = ["MegatronSender", "SenderConfig", "SourceMap", "sender_config", "source_map"]


def __getattr__(name: str) -> Any:
    # Imported on first use: the recipes and the preflight of this package work without torch and Megatron.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
