"""The sender of a Megatron trainer: `vllm_refit_ext.sender` with Megatron's source map.

sender = MegatronSender(model_chunks, bridge, engine)     # engine: a client on rank 0, None elsewhere
sender.prepare()
for step in ...:
    train(...)
    sender.refit(f"step-{step}")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_sender.source import source_map
from vllm_refit_ext.client import EngineClient
from vllm_refit_ext.sender.config import SenderConfig as SenderConfig
from vllm_refit_ext.sender.sender import RefitReport as RefitReport
from vllm_refit_ext.sender.sender import RefitSender


class MegatronSender(RefitSender):
    """One trainer rank's sender; see `RefitSender` for its calls."""

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module] | torch.nn.Module,
        bridge: Any,
        engine: EngineClient | Sequence[EngineClient] | None,
        config: SenderConfig | None = None,
    ) -> None:
        """model_chunks: Megatron's model chunks of this rank. bridge: the `AutoBridge` that made them. engine: a client, or one
        for each engine that is refitted together, on rank 0; None on the others.
        """
        super().__init__(lambda: source_map(model_chunks, bridge, rank=self.ranks.rank), engine, config)
