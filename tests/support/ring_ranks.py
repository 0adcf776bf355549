"""A refit over wire `ring` in one process, a thread a rank; and a plan in which all ranks exchange something."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import torch

from tests.support.rendezvous import own_plan
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.messages import UpdateInfo
from vllm_refit_ext.core.placement import Buffer, Placement, Placements
from vllm_refit_ext.core.plan import Plan, build_plan
from vllm_refit_ext.receiver.writers import InPlaceWriter
from vllm_refit_ext.wires import ring

WAIT_S = 30.0


def crossed(trainers: int, engines: int, rows: int = 64) -> tuple[Plan, list[torch.Tensor], list[torch.Tensor]]:
    """Every trainer rank holds some rows and every engine rank needs some columns, so all pairs exchange something."""
    manifest = Manifest({f"t{i}": TensorSpec((rows, 16), "float32") for i in range(3)})
    whole = [torch.randn(rows, 16) for _ in manifest.tensors]
    cut, columns = rows // trainers, 16 // engines
    sources = Placements.from_rows(
        [Buffer(n, r, "float32", (cut, 16)) for r in range(trainers) for n in manifest.tensors],
        [
            Placement(n, r * 3 + i, (r * cut, 0), ((r + 1) * cut, 16), 0, (64, 4))
            for r in range(trainers)
            for i, n in enumerate(manifest.tensors)
        ],
        list(manifest.tensors),
    )
    targets = Placements.from_rows(
        [Buffer(f"{n}.{e}", e, "float32", (rows, columns)) for e in range(engines) for n in manifest.tensors],
        [
            Placement(n, e * 3 + i, (0, e * columns), (rows, (e + 1) * columns), 0, (columns * 4, 4))
            for e in range(engines)
            for i, n in enumerate(manifest.tensors)
        ],
    )
    tensors = [t[r * cut : (r + 1) * cut].clone() for r in range(trainers) for t in whole]
    return build_plan(manifest, sources, targets), tensors, whole


class Ranks:
    """All ranks of a refit, as threads."""

    def __init__(self, plan: Plan, hosts: Hosts, bucket: int, sources: list[torch.Tensor]) -> None:
        self.plan, self.hosts, self.sources = plan, hosts, sources
        first = np.searchsorted([b.rank for b in plan.sources], np.arange(len(hosts.trainers) + 1))
        self.tensors = [sources[first[r] : first[r + 1]] for r in range(len(hosts.trainers))]
        shares = ring.send_tables(plan, hosts, bucket)
        self.senders = [ring.open_sender(r, share, self.tensors[r]) for r, share in enumerate(shares)]
        self.kept: list[dict[str, Any]] = [{} for _ in hosts.engines]
        self.plans = [own_plan(plan, e) for e in range(len(hosts.engines))]

    def refit(self, targets: dict[str, torch.Tensor], pause: float = 0.0) -> list[dict[int, int]]:
        """One refit; what each engine rank received, by trainer rank. pause: most seconds that a reader dawdles at a step."""
        report = ring.info([s.begin(t) for s, t in zip(self.senders, self.tensors, strict=True)])
        update = UpdateInfo(wire="ring", version="v", session="s", ring=report)
        end, failures = time.monotonic() + WAIT_S, []
        received: list[dict[int, int]] = [{} for _ in self.plans]

        def read(rank: int) -> None:
            if not len(self.plans[rank]):
                return
            reader = ring.open_reader(update, self.plans[rank], self.kept[rank])
            reader.start(end)
            try:
                for step in reader.steps:
                    time.sleep(random.random() * pause)
                    for buffer in np.unique(step.source).tolist():
                        reader.memory(buffer)
                    InPlaceWriter(step, targets).write(reader)
                reader.confirm()
            finally:
                reader.close()
            received[rank] = reader.received

        def guarded(work: Any, *arguments: Any) -> None:
            try:
                work(*arguments)
            except BaseException as error:  # noqa: BLE001 - raised in the test
                failures.append(error)
                for sender in self.senders:
                    sender._ring.words.stop(sender._ring.info.epoch)

        jobs = [(s.transfer, "s", report, end) for s in self.senders] + [(read, e) for e in range(len(self.plans))]
        threads = [threading.Thread(target=guarded, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S + 5)
        if failures:
            raise failures[0]
        assert not any(t.is_alive() for t in threads)
        return received

    def close(self) -> None:
        for kept in self.kept:
            for held in kept.values():
                held.close()
        for sender in self.senders:
            sender.close()
