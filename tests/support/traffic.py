"""What is sent from where on wire `collective`, counted from the messages themselves."""

from __future__ import annotations

import msgspec
import numpy as np

from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.wires.collective_forward import schedules


class Traffic(msgspec.Struct, frozen=True):
    """Payload bytes of one refit on wire `collective`. sent: by trainer rank. crossed: how many of them go to another host.
    landed, forwarded: by engine rank, received from trainer ranks and from engine ranks of its host."""

    sent: list[int]
    crossed: int
    landed: list[int]
    forwarded: list[int]


def traffic(plan: Plan, hosts: Hosts, bucket_bytes: int) -> Traffic:
    """Which bytes of `plan`, the joint one, go from where, and how many of them between hosts."""
    trainers = len(hosts.trainers)
    sent, landed, forwarded, crossed = [0] * trainers, [], [], 0
    for rank, schedule in enumerate(schedules(plan, hosts, bucket_bytes)[0]):
        by_source = np.bincount(schedule.source, schedule.plan.nbytes, trainers) if len(schedule.plan) else np.zeros(trainers)
        direct = by_source[:trainers].astype(np.int64).tolist()
        for source, nbytes in enumerate(direct):
            sent[source] += nbytes
            crossed += nbytes if hosts.trainers[source] != hosts.engines[rank] else 0
        landed.append(sum(direct))
        forwarded.append(int(schedule.plan.nbytes.sum()) - landed[-1])
    return Traffic(sent, crossed, landed, forwarded)
