"""What travels from where on wire `collective`, counted from the travels themselves."""

from __future__ import annotations

import msgspec
import numpy as np

from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.sites import Sites
from vllm_refit_ext.wires.collective_forward import schedules


class Traffic(msgspec.Struct, frozen=True):
    """Payload bytes of one refit on wire `collective`. sent: by trainer rank. crossed: how many of them go to another site.
    landed, forwarded: by engine rank, received from trainer ranks and from engine ranks of its site."""

    sent: list[int]
    crossed: int
    landed: list[int]
    forwarded: list[int]


def traffic(plan: Plan, sites: Sites, bucket_bytes: int) -> Traffic:
    """Which bytes of `plan`, the joint one, travel from where, and how many of them between sites."""
    trainers = len(sites.trainers)
    sent, landed, forwarded, crossed = [0] * trainers, [], [], 0
    for rank, schedule in enumerate(schedules(plan, sites, bucket_bytes)[0]):
        by_source = np.bincount(schedule.source, schedule.plan.nbytes, trainers) if len(schedule.plan) else np.zeros(trainers)
        direct = by_source[:trainers].astype(np.int64).tolist()
        for source, nbytes in enumerate(direct):
            sent[source] += nbytes
            crossed += nbytes if sites.trainers[source] != sites.engines[rank] else 0
        landed.append(sum(direct))
        forwarded.append(int(schedule.plan.nbytes.sum()) - landed[-1])
    return Traffic(sent, crossed, landed, forwarded)
