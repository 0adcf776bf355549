"""TRL's AsyncGRPOTrainer with a refit in place of its gather and broadcast. Written to TRL 1.16.

    class Trainer(RefitSync, AsyncGRPOTrainer): ...

    Trainer(..., weight_transfer=RefitTransfer("http://127.0.0.1:8000"))

TRL calls the object that is passed as `weight_transfer` on its main process only, which streams whole tensors; the other ranks
take part in gathering them. `RefitSync` stands in for that stream on every rank: each gives its shards where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from vllm_refit_ext.client import HTTPClient
from vllm_refit_ext.core.errors import ConfigError
from vllm_refit_ext.sender import DTensorSource, RefitSender, SenderConfig


class RefitTransfer:
    """TRL's WeightTransferProtocol, five methods for the main process, and `sync` for all ranks.

    TRL pauses the server with requests in flight, so without another `config` these are computed again.
    """

    def __init__(self, url: str, config: SenderConfig | None = None, convert: Callable[..., Any] | None = None) -> None:
        """url: of the server, which was started with VLLM_SERVER_DEV_MODE=1 and our extension or the backend `refit`. convert:
        as `DTensorSource` takes it."""
        from trl.experimental.async_grpo.vllm_client import VLLMClient

        self._server, self._engine = VLLMClient(url), HTTPClient(url)
        self._config, self._convert = config or SenderConfig(caches="reset_running"), convert
        self._sender: RefitSender | None = None
        self._count = 0

    def init_weight_transfer(self) -> None:
        """Wait until the server answers. Raises TimeoutError."""
        self._server.wait_for_server_ready()

    def pause(self) -> None:
        """Stop the server between two steps; requests in flight stay."""
        self._server.pause(timeout=self._config.deadline_s)

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Nothing is left to send: `RefitSync` has refitted when TRL asked it for the stream. Raises ConfigError without it."""
        for name, _ in iterator:
            do = "derive the trainer: class Trainer(RefitSync, AsyncGRPOTrainer)"
            raise ConfigError("TRL streams whole tensors", where="weight_transfer", got=name, wanted="an empty stream", do=do)

    def resume(self) -> None:
        """Let the server go on."""
        self._server.resume(timeout=self._config.deadline_s)

    def destroy(self) -> None:
        """Give back what the sender holds."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def sync(self, model: torch.nn.Module) -> None:
        """Refit, on every rank; prepare at the first call. Raises RefitError, the same on all ranks."""
        if self._sender is None:
            first = not dist.is_initialized() or dist.get_rank() == 0
            source = DTensorSource(model, convert=self._convert)
            self._sender = RefitSender(source, self._engine if first else None, self._config)
            self._sender.prepare()
        self._count += 1
        self._sender.refit(f"sync-{self._count}")


class RefitSync:
    """Put it before AsyncGRPOTrainer among a trainer's bases, and pass a `RefitTransfer` on every rank."""

    accelerator: Any
    model: Any

    def __init__(self, *args: Any, weight_transfer: RefitTransfer, **named: Any) -> None:
        self._refit = weight_transfer
        super().__init__(*args, weight_transfer=weight_transfer, **named)  # type: ignore[call-arg]  # the trainer's

    def _streaming_iter(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What TRL asks for on every rank when weights go to the server; with it empty, nothing is gathered."""
        self._refit.sync(self.accelerator.unwrap_model(self.model))
        return iter(())
