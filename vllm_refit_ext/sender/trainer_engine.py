"""Backend `refit` of vLLM's `WeightTransferTrainerFactory`: a trainer that is written to vLLM's own trainer side refits with us.

    from vllm_refit_ext.sender import RefitTrainerInitInfo

    engine = WeightTransferTrainerFactory.trainer_init(RefitTrainerInitInfo(rank=rank), client=client, source=source)
    ...
    engine.send_weights()

Servers run with `--weight-transfer-config '{"backend": "refit"}'`. client: vLLM's HTTP or Ray client, or any object with their
four methods; they return nothing, so the engines' replies come by a store that trainer rank 0 serves (`wires.answers`). source:
a `WeightSource` (`weight_source`), or any source of ours. Importing this module registers the backend; it does not import vLLM.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import torch.distributed as dist

from vllm_refit_ext import plugin
from vllm_refit_ext.client import EngineClient, HTTPClient
from vllm_refit_ext.core.errors import ConfigError, Problem, RefitError, TornError, as_refit_error
from vllm_refit_ext.sender.config import SenderConfig
from vllm_refit_ext.sender.sender import RefitReport, RefitSender
from vllm_refit_ext.sender.weight_source import WeightSourceAdapter, source_of
from vllm_refit_ext.wires.answers import ANSWER_TO, Answers


@dataclass(kw_only=True)
class RefitTrainerInitInfo:
    """rank: of this process in torch.distributed's default group, all of whose ranks make an engine; 0 without a group.
    config: as `RefitSender` takes it."""

    backend: ClassVar[str] = "refit"
    rank: int
    config: SenderConfig = field(default_factory=SenderConfig)

    @property
    def is_sender(self) -> bool:
        """Whether this rank drives the engines."""
        return self.rank == 0


class WeightSyncClient(EngineClient):
    """All engines behind a weight-sync client of vLLM's, as one whose replies come replica by replica.

    The calls that such a client lacks, as `verify` needs, go to the server or the actors of vLLM's own clients directly.
    """

    def __init__(self, client: Any) -> None:
        """client: four methods: init_weight_transfer_engine, start_weight_update, update_weights, finish_weight_update."""
        self.name = getattr(client, "base_url", "")
        self._client, self._answers = client, Answers()
        self._direct = HTTPClient(self.name) if self.name else None

    def call(self, method: str, args: tuple[Any, ...] = (), timeout_s: float | None = None) -> list[Any]:
        if method == "prepare_refit_info":
            names = ("state_dict_info", "fp8_config", "keep")
            info = {n: base64.b64encode(a).decode() if isinstance(a, bytes) else a for n, a in zip(names, args, strict=False)}
            replies, error = self._answered(lambda to: self._client.init_weight_transfer_engine({**info, ANSWER_TO: to}))
            if error is not None and not any(r["problems"] for r in replies):
                raise error
            return replies
        if method == "update_weights":
            replies, error = self._answered(lambda to: self._update({**args[0], ANSWER_TO: to}))
            if error is not None:
                raise _of_statuses(replies) or error
            return replies
        if self._direct is not None:
            return self._direct.call(method, args, timeout_s)
        do = "use HTTPClient, RayClient or another client of vllm_refit_ext"
        raise ConfigError("vLLM's weight-sync clients have no such call", where=type(self._client).__name__, got=method, do=do)

    def _update(self, update_info: dict[str, Any]) -> None:
        finish = self._client.finish_weight_update
        self._client.start_weight_update()
        self._client.update_weights(update_info)
        if inspect.signature(finish).parameters:
            finish(update_info["version"])
        else:  # before vLLM took a version
            finish()

    def _answered(self, work: Callable[[str], None]) -> tuple[list[Any], RefitError | None]:
        """The replies of all ranks, and what the call raised. Raises it where no rank replied."""
        to, error = self._answers.ask(), None
        try:
            work(to)
        except Exception as raised:  # noqa: BLE001 - whatever carries the calls has errors of its own
            error = as_refit_error(raised)
        try:
            return self._answers.take(to), error
        except RefitError as missing:
            raise error or missing from None


def _of_statuses(statuses: list[Any]) -> RefitError | None:
    """What the engine ranks failed with; None where they say nothing. Ranks that agreed say the same."""
    problems = [msgspec.convert(p, Problem) for s in statuses for p in s["problems"]]
    kind = TornError if any(s["state"] == "torn" for s in statuses) else RefitError
    return kind.of(list(dict.fromkeys(problems))) if problems else None


class RefitTrainerEngine:
    """One trainer rank's engine, on vLLM's terms. Every rank calls everything, in the same order."""

    init_info_cls = RefitTrainerInitInfo

    def __init__(self, sender: RefitSender, init_info: RefitTrainerInitInfo) -> None:
        self.sender, self.is_sender = sender, init_info.is_sender
        self._sent = 0

    @classmethod
    def trainer_init(cls, init_info: RefitTrainerInitInfo, *, client: Any, source: Any = None) -> RefitTrainerEngine:
        """Prepare, see `RefitSender.prepare`. client: used on rank 0 alone. Raises what `prepare` raises."""
        grouped = dist.is_available() and dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        if init_info.rank != rank:
            wanted = f"{rank}, the rank in the default group" if grouped else "0, as torch.distributed is not initialised"
            raise ConfigError("not this process's rank", where="RefitTrainerInitInfo.rank", got=init_info.rank, wanted=wanted)
        engine = WeightSyncClient(client) if init_info.is_sender else None
        made = cls(RefitSender(lambda: source_of(source, rank, size), engine, init_info.config), init_info)
        try:
            made.sender.prepare()
        finally:
            made._release()
        return made

    def send_weights(self, version: str = "") -> RefitReport:
        """One refit. Returns when all engines serve it. version: its name in the engines, the number of the call when empty."""
        self._sent += 1
        try:
            return self.sender.refit(version or f"send-{self._sent}")
        finally:
            self._release()

    def shutdown(self) -> None:
        """Give back what the wire holds."""
        self.sender.close()

    def _release(self) -> None:
        prepared = self.sender.prepared
        if prepared is not None and isinstance(prepared.offered.source, WeightSourceAdapter):
            prepared.offered.source.release()


plugin.register()
