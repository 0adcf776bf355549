"""A plan as a message, for the trainer ranks that did not build it."""

from __future__ import annotations

import msgspec
import numpy as np

from vllm_refit_ext.core.manifest import Manifest
from vllm_refit_ext.core.placement import Buffer
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.core.table import Column, pack, unpack


class PackedPlan(msgspec.Struct, frozen=True):
    """`Plan` as a message, without its manifest, which both ends have. Columns as in `Plan.COLUMNS`."""

    sources: list[Buffer]
    targets: list[Buffer]
    columns: list[Column]


def pack_plan(plan: Plan) -> PackedPlan:
    """`plan` as a message, with the buffers that its moves name and no others."""
    columns = {c: getattr(plan, c) for c in Plan.COLUMNS}
    used, columns["source"] = np.unique(plan.source, return_inverse=True)
    written, columns["target"] = np.unique(plan.target, return_inverse=True)
    sources, targets = [plan.sources[i] for i in used.tolist()], [plan.targets[i] for i in written.tolist()]
    return PackedPlan(sources, targets, [pack(c) for c in columns.values()])


def unpack_plan(message: PackedPlan, manifest: Manifest) -> Plan:
    """The plan of `message`. Raises ValueError when the columns don't fit."""
    columns = dict(zip(Plan.COLUMNS, (unpack(c) for c in message.columns), strict=True))
    if len({len(c) for c in columns.values()}) != 1:
        raise ValueError("the columns of a plan differ in length")
    return Plan(manifest, message.sources, message.targets, **columns)
