"""A trainer that publishes a checkpoint's tensors, whole, from one process. Also a program: it publishes what its input names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.small_engine import PlainSource
from vllm_refit_ext.sender import RefitSender, SenderConfig
from vllm_refit_ext.sender.publication import Publication


class VersionsTrainer:
    """`publish` loads another checkpoint of the same shapes into the same memory."""

    def __init__(self, folder: Path, port: int = 0, config: SenderConfig | None = None, device: str = "cpu") -> None:
        self.tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors", device)
        module = torch.nn.Module()
        module.named_parameters = lambda *_: iter(self.tensors.items())  # type: ignore[assignment, method-assign]
        config = config or SenderConfig(registry_port=port, deadline_s=60.0)
        self.sender = RefitSender(PlainSource(module), None, config)
        self.sender.prepare()
        self.registry = self.sender.registry

    def publish(self, version: str, folder: Path, part: Sequence[str] = ()) -> Publication:
        self.sender._publisher.make_way("load")
        for name, tensor in load_file(folder / "model.safetensors").items():
            self.tensors[name].copy_(tensor)
        return self.sender.publish(version, part=part)

    def close(self) -> None:
        self.sender.close()


if __name__ == "__main__":
    trainer = VersionsTrainer(Path(sys.argv[1]), int(sys.argv[2]))
    print(trainer.registry, flush=True)
    for line in sys.stdin:
        version, folder = line.split()
        trainer.publish(version, Path(folder))
        print("published", flush=True)
