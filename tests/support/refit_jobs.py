"""What the trainer's ranks do in the refit tests. Run by `run_ranks`; the engine is behind a URL."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from examples.support.tiny_model import build_megatron, import_megatron
from megatron_sender.sender import MegatronSender, RefitReport, SenderConfig
from vllm_refit_ext.client import HTTPClient


@contextlib.contextmanager
def context_parallel_attention() -> Iterator[None]:
    """Let Megatron's plain attention be built in a context parallel group. It can't compute there, and here it only holds
    weights: those of a context parallel rank are the same as its peers'."""
    import_megatron()
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    native = DotProductAttention.__init__

    def alone(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        config = copy.copy(config)
        config.context_parallel_size = 1
        native(self, config, *arguments, **named)

    DotProductAttention.__init__ = alone
    try:
        yield
    finally:
        DotProductAttention.__init__ = native


class Trainer:
    """Megatron with a sender to the engine at `url`."""

    def __init__(self, folder: str, geometry: dict[str, Any], url: str, **config: Any) -> None:
        with context_parallel_attention():
            self.bridge, self.chunks = build_megatron(folder, **geometry)
        self.rank = dist.get_rank()
        self.client = HTTPClient(url)
        settings = SenderConfig(hash_reloaded=True, **config)
        self.sender = MegatronSender(self.chunks, self.bridge, self.client if self.rank == 0 else None, settings)

    def parameters(self) -> dict[str, torch.Tensor]:
        return {f"{i}.{n}": p.data for i, chunk in enumerate(self.chunks) for n, p in chunk.named_parameters()}

    def answers(self) -> Any:
        return self.client.post("/answers", {}, 300) if self.rank == 0 else None

    def scale(self, factor: float) -> None:
        for p in self.parameters().values():
            p.mul_(factor)

    def digests(self) -> list[dict[str, str]]:
        return [r.digests for r in self.client.verify()] if self.rank == 0 else []


def cycle(folder: str, geometry: dict[str, Any], url: str) -> dict[str, Any]:
    """Other weights, then the checkpoint's three times, then one tensor changed. Rank 0 reports what the engine did."""
    trainer = Trainer(folder, geometry, url)
    saved = {n: p.clone() for n, p in trainer.parameters().items()}
    plan = trainer.sender.prepare()
    trainer.scale(1.5)
    trainer.sender.refit("other")
    other = trainer.answers()
    for name, p in trainer.parameters().items():
        p.copy_(saved[name])
    repeated, reports = [], []
    for i in range(3):
        reports.append(trainer.sender.refit(f"same-{i}"))
        repeated.append(trainer.answers())
    compared = trainer.sender.verify()
    before = trainer.digests()
    for name, p in trainer.parameters().items():
        if name.endswith("final_layernorm.weight"):
            p.add_(0.25)
    trainer.sender.refit("one tensor")
    after = trainer.digests()
    changed = [sorted(n for n in b if b[n] != a[n]) for b, a in zip(before, after, strict=True)]
    # The engine is left with the checkpoint's weights.
    for name, p in trainer.parameters().items():
        p.copy_(saved[name])
    trainer.sender.refit("checkpoint")
    trainer.sender.close()
    return {
        "other": other,
        "repeated": repeated,
        "compared": compared,
        "changed": changed,
        "edges": [msgspec.to_builtins(e) for e in plan.edges()],
        "report": msgspec.to_builtins(reports[-1]),
        "status": [msgspec.to_builtins(s) for s in trainer.client.status()] if trainer.rank == 0 else [],
    }


def train_and_export(folder: str, geometry: dict[str, Any], url: str, out: str) -> Any:
    """One training step, a refit, and the bridge's own export to `out`. Rank 0 returns the engine's answers."""
    import shutil

    from megatron.core.pipeline_parallel import get_forward_backward_func
    from safetensors.torch import save_file

    trainer = Trainer(folder, geometry, url)
    trainer.sender.prepare()
    tokens = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(3))
    mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
    optimizer = torch.optim.SGD([p for chunk in trainer.chunks for p in chunk.parameters()], lr=0.5)

    def forward(batches: Any, model: Any) -> Any:
        batch = next(batches)
        loss = model(batch[:, :-1], torch.arange(16)[None].expand(4, -1), mask, labels=batch[:, 1:])
        return loss, lambda value: (value.float().mean(), {})

    run = get_forward_backward_func()
    data = [iter([tokens]) for _ in trainer.chunks]
    run(
        forward_step_func=forward,
        data_iterator=data if len(data) > 1 else data[0],
        model=trainer.chunks,
        num_microbatches=1,
        seq_length=16,
        micro_batch_size=4,
        forward_only=False,
    )
    optimizer.step()
    trainer.sender.refit("trained")
    trainer.sender.verify()
    exported = {
        name: tensor.clone().contiguous()
        for name, tensor in trainer.bridge.export_hf_weights(trainer.chunks, cpu=True, show_progress=False)
    }
    found = trainer.answers()
    if trainer.rank == 0:
        shutil.copytree(folder, out, dirs_exist_ok=True)
        save_file(exported, str(Path(out) / "model.safetensors"), metadata={"format": "pt"})
    trainer.sender.close()
    return found


def simple(folder: str, geometry: dict[str, Any], url: str, version: str) -> Any:
    """Prepare, refit, verify. Rank 0 returns the engine's answers and the report."""
    trainer = Trainer(folder, geometry, url)
    trainer.sender.prepare()
    report: RefitReport = trainer.sender.refit(version)
    compared = trainer.sender.verify()
    found = trainer.answers()
    trainer.sender.close()
    return found, msgspec.to_builtins(report), compared


def die_while_publishing(folder: str, geometry: dict[str, Any], url: str) -> str:
    """Rank 1 is killed between its preparation and its publication; the others report what they learned."""
    import os
    import signal

    trainer = Trainer(folder, geometry, url, deadline_s=20.0)
    trainer.sender.ranks = type(trainer.sender.ranks)(20.0)
    trainer.sender.prepare()
    if trainer.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        trainer.sender.refit("never")
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__} after {time.monotonic() - begin:.0f} s: {error}"
    return "no error"
