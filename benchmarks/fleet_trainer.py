"""One Megatron rank of a trainer of the scenarios."""

from __future__ import annotations

import os
from typing import Any

import torch

from examples.support.tiny_model import build_megatron


class Rank:
    """What `Trainer.tell` may ask; all ranks do it together."""

    def __init__(self, folder: str, geometry: dict[str, Any], config: dict[str, Any]) -> None:
        from megatron_sender.sender import MegatronSender, SenderConfig

        bridge, self.chunks = build_megatron(folder, **geometry)
        self._saved = [p.data.clone() for chunk in self.chunks for p in chunk.parameters()]
        self.sender = MegatronSender(self.chunks, bridge, None, SenderConfig(registry_port=0, **config))
        self.publication: Any = None

    def prepare(self) -> dict[str, Any]:
        self.sender.prepare()
        return {"registry": self.sender.registry, "pid": os.getpid(), "retained": self.sender.retained_bytes}

    def publish(self, version: str, factor: float, retain: str, part: list[str]) -> dict[str, Any]:
        """Publish the checkpoint's weights times `factor`."""
        if self.publication is not None and retain == "in_place":
            self.publication.close()
        with torch.no_grad():
            for p, saved in zip((p for chunk in self.chunks for p in chunk.parameters()), self._saved, strict=True):
                torch.mul(saved, factor, out=p.data)
        self.publication = self.sender.publish(version, retain, part)
        return {"epoch": self.publication.epoch, "seconds": self.publication.seconds}

    def close_publication(self, deadline_s: float) -> list[str]:
        """End the open version. Returns holders of leases that were revoked."""
        revoked: list[str] = self.publication.close(deadline_s)
        return revoked

    def close(self) -> None:
        self.sender.close()
