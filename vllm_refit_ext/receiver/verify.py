"""Whether an engine rank holds what the trainer has, by digests.

A tensor whose layout is known is read back from live memory. What the engine's own reload took can't be: its digest is of what
was handed over, which a refit takes only when it is asked to (`UpdateInfo.hash_reloaded`).
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_refit_ext.core.compare import check_hashed
from vllm_refit_ext.core.errors import ConfigError, ManifestError
from vllm_refit_ext.core.messages import Digests, VerifyReply, read_digests
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.receiver.prepared import Prepared
from vllm_refit_ext.receiver.stored_digests import StoredDigests
from vllm_refit_ext.wires.boxes import MODULUS, move_digest


def compare(prepared: Prepared, rank: int, version: str, reloaded: dict[str, int] | None, expected: object) -> VerifyReply:
    """Digests of this rank's part of the plan, and the names that differ from what is expected, in plan order.

    reloaded: digests of what the last refit handed to the engine's reload; None if none was asked for them. expected: nothing,
    or by rank as text, by tensor, hexadecimal. Raises ConfigError and ManifestError for digests that can't be read or are of
    unknown tensors, SessionError when one is expected of a tensor that was not hashed.
    """
    want = _expected(read_digests(expected), rank, prepared)
    names = list(prepared.manifest.tensors)
    writer, plan = prepared.in_place, prepared.reload.plan
    unhashed = set() if reloaded is not None else {plan.names[i] for i in np.unique(plan.tensor)}
    check_hashed([name for name in names if name in want], unhashed)
    if prepared.digests is None:
        prepared.digests = StoredDigests(writer.plan, prepared.targets.params, prepared.targets.stored, prepared.view.device)
    live = prepared.digests(writer.content).get(prepared.targets.rank, {})
    handed = reloaded or {}
    total = {name: (live.get(name, 0) + handed.get(name, 0)) % MODULUS for name in [*live, *handed]}
    digests = {name: f"{total[name]:016x}" for name in names if name in total and name not in unhashed}
    return VerifyReply(
        rank=rank,
        version=version,
        digests=digests,
        reloaded=sorted(handed),
        unhashed=sorted(unhashed),
        differs=[name for name in names if name in want and digests.get(name) != want[name]],
    )


def add_digest(digests: dict[str, int], plan: Plan, move: int, box: torch.Tensor) -> None:
    """Add the digest of a box that goes to the engine's reload to its tensor's."""
    name = plan.names[int(plan.tensor[move])]
    digests[name] = (digests.get(name, 0) + move_digest(plan, move, box)) % MODULUS


def _expected(expected: Digests, rank: int, prepared: Prepared) -> dict[str, str]:
    """This rank's part of what `verify` is given; {} where that is nothing."""
    if not expected:
        return {}
    want = expected.get(str(rank))
    if want is None:
        raise ConfigError("there are no digests for this rank", where="refit_verify", wanted=str(rank))
    if missing := [name for name in want if name not in prepared.manifest.tensors]:
        raise ManifestError("digests for tensors that are not in the manifest", where="refit_verify", got=missing[:5])
    return want
