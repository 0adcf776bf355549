"""One rank of a small refit over wire `collective`, without trainer and engine around it, on CPUs or GPUs."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.messages import UpdateInfo
from vllm_refit_ext.core.placement import Buffer, Placement, Placements, concatenate
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.receiver.writers import InPlaceWriter
from vllm_refit_ext.wires import collective

SHAPE = (24, 10)


def tables(trainers: int = 2, engines: int = 2) -> tuple[Manifest, Placements, list[Placements]]:
    """`t` cut by rows over the trainers and by columns over the engines, so that every pair exchanges something; `u` on the
    last trainer."""
    manifest = Manifest({"t": TensorSpec(SHAPE, "float32"), "u": TensorSpec((7,), "bfloat16")})
    rows, columns = SHAPE[0] // trainers, SHAPE[1] // engines
    buffers = [Buffer(f"t{r}", r, "float32", (rows, SHAPE[1])) for r in range(trainers)] + [
        Buffer("u", trainers - 1, "bfloat16", (7,))
    ]
    places = [Placement("t", r, (r * rows, 0), ((r + 1) * rows, SHAPE[1]), 0, (40, 4)) for r in range(trainers)]
    sources = Placements.from_rows(buffers, [*places, Placement("u", trainers, (0,), (7,), 0, (2,))], list(manifest.tensors))
    targets = []
    for e in range(engines):
        mine = [Buffer("t", e, "float32", (SHAPE[0], columns)), Buffer("u", e, "bfloat16", (7,))]
        first = e * columns
        place = Placement("t", 0, (0, first), (SHAPE[0], first + columns), 0, (columns * 4, 4))
        targets.append(Placements.from_rows(mine, [place, Placement("u", 1, (0,), (7,), 0, (2,))]))
    return manifest, sources, targets


def content(version: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(240.0).reshape(SHAPE) + 1000 * version, torch.arange(7).bfloat16() + version


class Rank:
    """One rank of a small refit, trainer or engine, with the messages handed over through a folder."""

    def __init__(
        self,
        folder: str,
        rank: int,
        bucket: int = 64,
        trainers: int = 2,
        engines: int = 2,
        device: str = "cpu",
    ) -> None:
        self.bucket = bucket
        self.trainers, self.engines, self.device = trainers, engines, device
        self.folder, self.rank, self.kept = Path(folder), rank, {}
        manifest, sources, targets = tables(trainers, engines)
        self.columns = SHAPE[1] // engines
        self.is_trainer = rank < trainers
        if self.is_trainer:
            self.plan = build_plan(manifest, sources, concatenate(targets))
            self.open()
        else:
            self.plan = build_plan(manifest, sources, targets[rank - trainers])
            self.params = {
                "t": torch.zeros(SHAPE[0], self.columns, device=device),
                "u": torch.zeros(7, dtype=torch.bfloat16, device=device),
            }

    def open(self) -> None:
        self.rows = SHAPE[0] // self.trainers
        self.tensors = [torch.zeros(self.rows, SHAPE[1], device=self.device)]
        if self.rank == self.trainers - 1:
            self.tensors.append(torch.zeros(7, dtype=torch.bfloat16, device=self.device))
        shares = collective.send_tables(self.plan, Hosts.single(self.trainers, self.engines), self.bucket)
        self.sender = collective.open_sender(self.rank, shares[self.rank], self.tensors)

    def refit(
        self, name: str, version: int, deadline_s: float = 20.0, before=lambda: None, during=lambda: None
    ) -> dict[int, int]:
        """One refit under `name`; returns this rank's bytes by rank of the other side. `before` the meeting, `during` the
        transfer."""
        if self.is_trainer:
            t, u = content(version)
            self.tensors[0].copy_(t[self.rank * self.rows : (self.rank + 1) * self.rows])
            for tensor in self.tensors[1:]:
                tensor.copy_(u)
            part = self.sender.begin(self.tensors)
            (self.folder / f"{name}.{self.rank}.part").write_bytes(part)
            (self.folder / f"{name}.{self.rank}.part").rename(self.folder / f"{name}.{self.rank}")
        parts = [self.read(f"{name}.{r}", deadline_s) for r in range(self.trainers)]
        info = collective.info(parts)
        before()
        end = time.monotonic() + deadline_s
        if self.is_trainer:
            during()
            return self.sender.transfer(name, info, end)
        update = UpdateInfo(wire="collective", version=name, session=name, deadline_s=deadline_s, collective=info)
        reader = collective.open_reader(update, self.plan, self.kept)
        try:
            reader.start(end)
            during()
            for step in reader.steps:
                InPlaceWriter(step, self.params).write(reader)
            reader.confirm()
        finally:
            reader.close()
        t, u = content(version)
        first = (self.rank - self.trainers) * self.columns
        assert torch.equal(self.params["t"].cpu(), t[:, first : first + self.columns])
        assert torch.equal(self.params["u"].cpu(), u)
        return dict(reader.received)

    def read(self, name: str, wait_s: float) -> bytes:
        end = time.monotonic() + wait_s
        while not (self.folder / name).exists():
            assert time.monotonic() < end, f"{name} did not come"
            time.sleep(0.01)
        return (self.folder / name).read_bytes()

    def failure(self, name: str, **arguments) -> tuple[str, str, float]:
        """Class, text and seconds of a refit that must fail."""
        begin = time.monotonic()
        try:
            self.refit(name, 99, **arguments)
        except RefitError as error:
            return type(error).__name__, str(error), time.monotonic() - begin
        raise AssertionError("the refit did not fail")
