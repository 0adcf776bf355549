"""The GPUs that a plan's bytes pass on each wire: straight from trainer to engine, or handed on at a rank in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vllm_refit_ext.core.box import Int
from vllm_refit_ext.core.plan import Edge, Plan
from vllm_refit_ext.core.relays import choose_relays
from vllm_refit_ext.core.sites import Sites
from vllm_refit_ext.plan_floor import Traffic

Place = tuple[Sequence[int], Sequence[int]]
"""The GPU of each trainer rank and of each engine rank, numbered over all hosts."""


def sites_of(place: Place, per_host: int) -> Sites:
    """The hosts of both sides. per_host: GPUs of a host."""
    trainers, engines = ([str(gpu // per_host) for gpu in side] for side in place)
    return Sites(trainers, engines)


def forwarded(plan: Plan, sites: Sites, place: Place, bucket_bytes: int, travelling: Callable[[Plan], Int]) -> Traffic:
    """On wire `collective`: what engine ranks of a host have in common comes to one of them, which hands it on.

    plan: of whole hosts, since engine ranks that are planned apart share nothing here. travelling: bytes of each move, int64 [n].
    """
    from vllm_refit_ext.wires.collective_forward import share

    trainers, engines = (np.asarray(side, np.int64) for side in place)
    shared = share(plan, sites, bucket_bytes)
    alone = ~np.isin(plan.target_rank, list(shared))
    source, target = [trainers[plan.source_rank[alone]]], [engines[plan.target_rank[alone]]]
    nbytes = [travelling(plan)[alone]]
    for rank, told in shared.items():
        rows = told.rows
        lands = rows.holder == rank
        source.append(np.where(lands, trainers[rows.origin], engines[rows.holder]))
        target.append(np.full(len(rows.holder), engines[rank]))
        nbytes.append(travelling(rows.plan))
    return merged([Traffic(np.concatenate(source), np.concatenate(target), np.concatenate(nbytes))])


def relayed(edges: Sequence[Edge], sites: Sites, place: Place) -> Traffic:
    """On wire `ipc_staged`: what lies on another host comes to a trainer rank of the engine rank's host, which shows it there."""
    lanes, rows = choose_relays(edges, sites), []
    for edge in edges:
        via = lanes.get((edge.source, edge.target), edge.source)
        if via != edge.source:
            rows.append((place[0][edge.source], place[0][via], edge.nbytes))
        rows.append((place[0][via], place[1][edge.target], edge.nbytes))
    table = np.array(rows, np.int64).reshape(-1, 3)
    return merged([Traffic(*table.T)])


def merged(parts: Sequence[Traffic]) -> Traffic:
    """One row for each pair of GPUs."""
    source, target, nbytes = (np.concatenate([getattr(p, name) for p in parts]) for name in ("source", "target", "nbytes"))
    pairs, which = np.unique(np.stack([source, target]), axis=1, return_inverse=True)
    total = np.zeros(pairs.shape[1], np.int64)
    np.add.at(total, which.reshape(-1), nbytes)
    return Traffic(pairs[0], pairs[1], total)
