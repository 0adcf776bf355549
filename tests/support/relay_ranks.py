"""One rank of a small refit over wire `ring`, without trainer and engine around it. Hosts are played."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.collective_ranks import SHAPE, content, tables
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.messages import RingInfo, UpdateInfo
from vllm_refit_ext.core.placement import concatenate
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.receiver.writers import InPlaceWriter
from vllm_refit_ext.wires import ring
from vllm_refit_ext.wires.ring_relay import Pending


class Rank:
    """Trainer ranks first, then engine ranks; the messages are handed over through a folder."""

    def __init__(self, folder: str, rank: int, trainers: Sequence[str], engines: Sequence[str], bucket: int, device: str = "cpu"):
        self.folder, self.rank, self.kept, self.device = Path(folder), rank, dict[str, Any](), device
        self.hosts, self.bucket = Hosts(trainers, engines), bucket
        self.is_trainer = rank < len(trainers)
        manifest, sources, targets = tables(len(trainers), len(engines))
        if self.is_trainer:
            self.plan = build_plan(manifest, sources, concatenate(targets))
            self.rows = SHAPE[0] // len(trainers)
            self.tensors = [torch.zeros(self.rows, SHAPE[1], device=device)]
            if rank == len(trainers) - 1:
                self.tensors.append(torch.zeros(7, dtype=torch.bfloat16, device=device))
            share = ring.send_tables(self.plan, self.hosts, bucket)[rank]
            self.sender = ring.open_sender(rank, share, self.tensors)
        else:
            self.engine = rank - len(trainers)
            self.plan = build_plan(manifest, sources, targets[self.engine])
            self.params = {
                "t": torch.zeros(SHAPE[0], SHAPE[1] // len(engines), device=device),
                "u": torch.zeros(7, dtype=torch.bfloat16, device=device),
            }

    def refit(
        self,
        name: str,
        version: int,
        deadline_s: float = 20.0,
        step: Callable[[int], None] = lambda _: None,
        watch: Callable[[str, float], None] = lambda *_: None,
    ) -> dict[int, int]:
        """One refit under `name`; bytes of this rank by engine or by trainer rank. step: called by an engine before each step.
        watch: called on a trainer rank before it transfers.
        """
        if self.is_trainer:
            t, u = content(version)
            self.tensors[0].copy_(t[self.rank * self.rows : (self.rank + 1) * self.rows])
            for tensor in self.tensors[1:]:
                tensor.copy_(u)
            part = self.folder / f"{name}.{self.rank}.part"
            part.write_bytes(self.sender.begin(self.tensors))
            part.rename(self.folder / f"{name}.{self.rank}")
        info = ring.info([self.read(f"{name}.{r}", deadline_s) for r in range(len(self.hosts.trainers))])
        end = time.monotonic() + deadline_s
        if self.is_trainer:
            watch(name, end)
            return self.sender.transfer(name, info, end)
        return self._read(name, version, info, deadline_s, end, step)

    def _read(
        self, name: str, version: int, info: RingInfo, deadline_s: float, end: float, step: Callable[[int], None]
    ) -> dict[int, int]:
        update = UpdateInfo(wire="ring", version=name, session=name, deadline_s=deadline_s, ring=info)
        reader = ring.open_reader(update, self.plan, self.kept)
        try:
            reader.start(end)
            for number, plan in enumerate(reader.steps):
                step(number)
                InPlaceWriter(plan, self.params).write(reader)
            reader.confirm()
        finally:
            reader.close()
        t, u = content(version)
        columns = SHAPE[1] // len(self.hosts.engines)
        assert torch.equal(self.params["t"].cpu(), t[:, self.engine * columns : (self.engine + 1) * columns])
        assert torch.equal(self.params["u"].cpu(), u)
        return dict(reader.received)

    def read(self, name: str, wait_s: float) -> bytes:
        end = time.monotonic() + wait_s
        while not (self.folder / name).exists():
            assert time.monotonic() < end, f"{name} did not come"
            time.sleep(0.01)
        return (self.folder / name).read_bytes()

    def barrier(self, name: str) -> None:
        """Wait for all ranks, as the sender's own exchange and the engines' calls do after every refit."""
        (self.folder / f"{name}.met.{self.rank}").touch()
        for rank in range(len(self.hosts.trainers) + len(self.hosts.engines)):
            self.read(f"{name}.met.{rank}", 60)

    def failure(self, name: str, **arguments: Any) -> tuple[str, str, float]:
        """Class, text and seconds of a refit that must fail."""
        begin = time.monotonic()
        try:
            self.refit(name, 99, **arguments)
        except RefitError as error:
            return type(error).__name__, str(error), time.monotonic() - begin
        raise AssertionError("the refit did not fail")

    def close(self) -> None:
        """Give everything back."""
        if self.is_trainer:
            self.sender.close()
        for held in self.kept.values():
            held.close()


def at_message(kind: str, number: int, act: Callable[[], None]) -> None:
    """Run `act` before this rank starts to `send` or `receive` its message `number` from now on, once."""
    original, count = getattr(Pending, kind), [0]

    def started(self: Pending, task: Any, data: torch.Tensor) -> None:
        count[0] += 1
        if count[0] == number:
            setattr(Pending, kind, original)
            act()
        original(self, task, data)

    setattr(Pending, kind, started)
