"""What the plan of one period says about hosts and memory of the whole recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.errors import PlanError, Problem
from vllm_refit_ext.core.placement import Placements, concatenate
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.tools.plan_quantised import modules_of, quantised_paths
from vllm_refit_ext.tools.plan_report import MXFP8_BYTES
from vllm_refit_ext.wires.staging import RING

if TYPE_CHECKING:
    from megatron_sender.config import Engine, Recipe
    from megatron_sender.offline import Offered
    from megatron_sender.one_period import Layers


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one rank needs at a refit, at least: its weights, spread evenly over pipeline stages, and what is staged."""

    where: str
    weights: int
    staging: int

    @property
    def total(self) -> int:
        """Weights and staging together, in bytes."""
        return self.weights + self.staging


def host_violations(recipe: Recipe, offered: Offered, targets: Sequence[Sequence[Placements]]) -> list[Problem]:
    """A problem when the wire can't bring an engine what lies on another host. targets: of the ranks of each kind of engine."""
    from megatron_sender.preflight_rules import engine_ranks

    refit, per_host, trainers = recipe.refit, recipe.hardware.gpus_per_host, recipe.trainer.world_size
    ranks = max(trainers, engine_ranks(recipe))
    if refit.wire in ("collective", "nixl") or refit.placement != "colocated" or ranks <= per_host:
        return []
    if hosts_suffice(recipe, offered, targets):
        return []
    what = "an engine needs weights that no trainer rank of its host holds, and this wire can't read memory of another host"
    return [Problem(what, where="refit.wire", got=f"{refit.wire} with {ranks} GPUs, {per_host} a host", wanted="nixl")]


def hosts_suffice(recipe: Recipe, offered: Offered, targets: Sequence[Sequence[Placements]]) -> bool:
    """Whether every host's trainer ranks of each pipeline stage hold all that the engine ranks on that host need."""
    p, world, per_host = recipe.trainer.parallelism, recipe.trainer.world_size, recipe.hardware.gpus_per_host
    period, stage_ranks = math.lcm(p.tp, p.ep * p.etp), world // p.pp
    needs: dict[int, set[tuple[int, int]]] = {}
    rank = 0
    for index, engine in enumerate(recipe.engines):
        size = engine.tp * engine.pp * engine.dp
        for local in range(engine.count * size):
            copy, within = divmod(local % size, engine.tp * engine.pp)
            needs.setdefault((rank + local) // per_host, set()).add((index, copy * engine.tp + within % engine.tp))
        rank += engine.count * size
    asked = set()
    for host, wanted in needs.items():
        ranks = range(host * per_host, min((host + 1) * per_host, world))
        for stage in range(p.pp):
            inside = {r % stage_ranks % period for r in ranks if r // stage_ranks == stage}
            asked.add((frozenset(inside), frozenset(wanted)))
    for held, ranks_of_host in asked:
        sources = offered.sources.select(np.isin(offered.sources.rank, list(held)))
        try:
            build_plan(
                offered.manifest, sources, concatenate([targets[i][r].as_rank(n) for n, (i, r) in enumerate(ranks_of_host)])
            )
        except PlanError:
            return False
    return True


def refit_memory(
    recipe: Recipe, small: Recipe, offered: Offered, layers: Layers, targets: Sequence[Sequence[Placements]]
) -> list[Memory]:
    """What a trainer rank and a rank of each engine need at a refit, at least; the trainer first. small: one period of it."""
    refit = recipe.refit
    staged = RING * refit.bucket_bytes if refit.effective_mode() == "staged" else 0
    theirs = staged if refit.wire in ("collective", "nixl") else 0  # with the others engines read the sender's memory
    first = [b for b in offered.sources.buffers if b.rank == 0]
    held = sum(b.nbytes * layers.copies(b.name) for b in first) // recipe.trainer.parallelism.pp
    result = [Memory(where="trainer rank", weights=held, staging=0 if refit.wire == "nixl" else staged)]
    for i, (engine, cut) in enumerate(zip(recipe.engines, small.engines, strict=True)):
        held = (_engine_bytes(small, cut, layers) + _draft_bytes(cut, offered, targets[i])) // engine.pp
        result.append(Memory(where=f"engines[{i}] rank", weights=held, staging=theirs))
    return result


def _engine_bytes(recipe: Recipe, engine: Engine, layers: Layers) -> int:
    modules, size = modules_of(recipe, engine), ITEMSIZE[engine.dtype]
    shares, total = quantised_paths(engine, modules, layers), 0.0
    for name, shape in modules.parameters.items():
        share = shares.get(name.rpartition(".")[0], 0.0) if len(shape) > 1 else 0.0
        total += math.prod(shape) * layers.copies(name) * (share * MXFP8_BYTES + (1 - share) * size)
    return int(total)


def _draft_bytes(engine: Engine, offered: Offered, targets: Sequence[Placements]) -> int:
    """The model that is planned has no prediction layers; what it leaves unread is spread over all ranks."""
    if engine.draft == "none":
        return 0
    read = {table.names[t] for table in targets for t in np.unique(table.tensor)}
    unread = sum(math.prod(spec.shape) for name, spec in offered.manifest.tensors.items() if name not in read)
    return int(unread * (MXFP8_BYTES if engine.quantization else ITEMSIZE[engine.dtype])) // (engine.tp * engine.dp)


def memory_violations(
    recipe: Recipe, small: Recipe, offered: Offered, layers: Layers, targets: Sequence[Sequence[Placements]]
) -> list[Problem]:
    """Weights that do not fit the memory of a GPU, or the engine's share of it."""
    limit = recipe.hardware.gpu_memory_bytes
    if limit is None or recipe.hardware.device == "cpu":
        return []
    trainer, *engines = refit_memory(recipe, small, offered, layers, targets)
    problems, most = [], f"at most {limit} (hardware.gpu_memory_bytes)"
    if trainer.total > limit:
        what, got = "the trainer's weights don't fit", f"{trainer.total} bytes a rank"
        problems.append(Problem(what, where="trainer.parallelism", got=got, wanted=most))
    for i, (memory, engine) in enumerate(zip(engines, recipe.engines, strict=True)):
        share = int(limit * engine.gpu_memory_utilization)
        if memory.weights > share:
            got = f"{engine.gpu_memory_utilization} of {limit} bytes is {share}, weights take {memory.weights}"
            what, at = "the engine's weights don't fit its share", f"engines[{i}].gpu_memory_utilization"
            problems.append(Problem(what, where=at, got=got, wanted="a larger share or more ranks"))
        elif recipe.refit.placement == "colocated" and trainer.total + memory.total > limit:
            got = f"{trainer.total} (trainer) + {memory.total} (engine) bytes"
            what = "trainer and engine weights don't fit one GPU together, and a refit needs both"
            problems.append(Problem(what, where=f"engines[{i}]", got=got, wanted=most))
    return problems
