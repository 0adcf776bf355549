"""How weights reach engines over several hosts: read where they lie, relayed by trainer ranks, or not at all.

The planner reads the copy on an engine rank's own host wherever there is one. What lies on other hosts only must be relayed by a
trainer rank of that host, which the staged wire does; memory of another host can't be mapped.

Shares of a dimension are fractions of it: [0, 1/2) is the first of two tensor parallel parts. Ranks are counted as Megatron
counts them by default (tensor, context, expert, data, pipeline; the first fastest); engines take the trainer's GPUs in the
order written.
"""

from __future__ import annotations

from fractions import Fraction

from megatron_sender.config import Engine, Recipe
from vllm_refit_ext.core.errors import Problem

Interval = tuple[Fraction, Fraction]


def share(rank: int, parts: int, size: int = 0) -> Interval:
    """The part of a dimension that `rank` of `parts` holds; with `size` < `parts` the parts are repeated, as KV heads are."""
    if size and size < parts and parts % size == 0:
        rank, parts = rank * size // parts, size
    return Fraction(rank, parts), Fraction(rank + 1, parts)


def covered(wanted: set[Interval], held: set[Interval]) -> bool:
    """Whether the union of `held` holds all of `wanted`."""
    for low, high in wanted:
        for start, end in sorted(held):
            if start <= low < end:
                low = end
        if low < high:
            return False
    return True


def hosts_suffice(recipe: Recipe, experts: int, kv_heads: int) -> bool:
    """Whether every host's trainer ranks hold all that the engine ranks on that host need. Sizes are known to divide."""
    p, world, per_host = recipe.trainer.parallelism, recipe.trainer.world_size, recipe.hardware.gpus_per_host
    stage_ranks = world // p.pp
    needs: dict[int, set[tuple[str, Interval]]] = {}
    rank = 0
    for engine in recipe.engines:
        size = engine.tp * engine.pp * engine.dp
        for local in range(engine.count * size):
            needs.setdefault((rank + local) // per_host, set()).update(_needs(engine, local % size, experts, kv_heads))
        rank += engine.count * size
    for host, wanted in needs.items():
        ranks = range(host * per_host, min((host + 1) * per_host, world))
        for stage in range(p.pp):
            inside = [r % stage_ranks for r in ranks if r // stage_ranks == stage]
            held = {("dense", share(r % p.tp, p.tp)) for r in inside}
            held |= {("kv", share(r % p.tp, p.tp, kv_heads)) for r in inside}
            experts_held = {(r % p.etp, r // p.etp % p.ep) for r in inside}
            for kind in ("dense", "kv"):
                if not covered({i for k, i in wanted if k == kind}, {i for k, i in held if k == kind}):
                    return False
            for part in range(p.etp):
                have = {share(ep, p.ep) for etp, ep in experts_held if etp == part}
                if experts and not covered({i for k, i in wanted if k == "expert"}, have):
                    return False
    return True


def _needs(engine: Engine, rank: int, experts: int, kv_heads: int) -> set[tuple[str, Interval]]:
    tp = rank % engine.tp
    wanted = {("dense", share(tp, engine.tp)), ("kv", share(tp, engine.tp, kv_heads))}
    if experts:
        # An expert that is cut by tensor parallelism counts as wanted whole: each cut lies in some trainer rank's part.
        group = engine.tp * engine.dp
        wanted.add(("expert", share(rank % group, group) if engine.ep > 1 else (Fraction(0), Fraction(1))))
    return wanted


def check_reach(recipe: Recipe, experts: int, kv_heads: int) -> list[Problem]:
    """A violation when wire and mode can't bring an engine what it needs because that lies on another host."""
    refit, per_host, trainers = recipe.refit, recipe.hardware.gpus_per_host, recipe.trainer.world_size
    engines = sum(e.count * e.tp * e.pp * e.dp for e in recipe.engines)
    colocated = refit.placement == "colocated"
    ranks = max(trainers, engines) if colocated else trainers + engines
    if refit.wire == "collective" or ranks <= per_host:
        return []
    got = f"{ranks} GPUs, {per_host} a host"
    if not colocated:
        what = "memory of another host can't be read, and trainer ranks relay only to engines on their own hosts"
        wanted = f"collective, or trainer and engines on one host (got {got})"
        return [Problem(what, where="refit.wire", got=refit.wire, wanted=wanted)]
    if hosts_suffice(recipe, experts, kv_heads):
        return []
    if -(-engines // per_host) > -(-trainers // per_host):
        what = "engines on a host without trainer ranks can be reached neither through its memory nor by a relay"
        wanted = f"at most {-(-trainers // per_host)} host(s), as many as the trainer has, or collective"
        return [Problem(what, where="engines", got=f"{engines} ranks, {per_host} a host", wanted=wanted)]
    if refit.wire == "ipc" and refit.effective_mode() == "staged":
        return []
    what = "an engine needs weights that no trainer rank of its host holds, and memory of another host can't be read"
    do = "Staged, a trainer rank of the engine's host receives them over the trainer's own network and shows them to the engine."
    if refit.wire == "shm":
        return [Problem(what, where="refit.wire", got=f"shm with {got}", wanted="ipc with mode staged", do=do)]
    return [Problem(what, where="refit.mode", got=f"direct with {got}", wanted="staged", do=do)]
