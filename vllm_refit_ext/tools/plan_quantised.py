"""Which tensors an engine holds as MXFP8, as vLLM itself reads the ignore patterns, and which blocks of 32 a cut splits."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm_refit_ext.core.errors import Problem
from vllm_refit_ext.core.mxfp8 import BLOCK

if TYPE_CHECKING:
    from megatron_sender.config import Engine, Recipe
    from megatron_sender.offline import Offered
    from megatron_sender.one_period import Layers
    from vllm_refit_ext.engine.offline_modules import WorkerModules
    from vllm_refit_ext.receiver.routes.table import Routes


def modules_of(recipe: Recipe, engine: Engine, rank: int = 0) -> WorkerModules:
    """The modules of one rank of `engine`."""
    from vllm_refit_ext.engine.offline_modules import worker_modules

    e = engine
    return worker_modules(recipe.model.hf_config, tp=e.tp, ep=e.ep > 1, pp=e.pp, dp=e.dp, rank=rank, dtype=e.dtype)


def quantised_paths(engine: Engine, modules: WorkerModules, layers: Layers | None = None) -> dict[str, float]:
    """Path of each module that vLLM quantises -> the fraction in which it does, of the layers that the module stands for."""
    if engine.quantization is None:
        return {}
    full = {m.name: layers.full_names(m.name) if layers else [m.name] for m in modules.modules}
    ignored = modules.ignored(engine.quantization.ignore, [name for names in full.values() for name in names])
    fractions = {m.path: [ignored[name] is False for name in full[m.name]] for m in modules.modules}
    return {path: sum(each) / len(each) for path, each in fractions.items() if any(each)}


def quantised_names(routes: Routes, paths: dict[str, float]) -> set[str]:
    """Names of the checkpoint's tensors that lie in the modules at `paths`."""
    table = routes.placements
    inside = np.array([b.name.rpartition(".")[0] in paths for b in table.buffers], bool)
    return {table.names[t] for t in np.unique(table.tensor[inside[table.buffer]])} if len(table) else set()


def pattern_violations(recipe: Recipe, engine: Engine, offered: Offered, layers: Layers) -> list[Problem]:
    """Ignore patterns that mean nothing, that vLLM refuses, or that leave nothing to quantise."""
    assert engine.quantization is not None
    patterns = engine.quantization.ignore
    modules = modules_of(recipe, msgspec.structs.replace(engine, tp=1, dp=1, ep=1))
    own = [name for m in modules.modules for name in layers.full_names(m.name)]
    paths = {m.path for m in modules.modules}
    # Routers and convolutions are matrices that vLLM never quantises, prediction layers are in the checkpoint alone.
    plain = [n.rpartition(".")[0] for n, shape in modules.parameters.items() if len(shape) > 1 and "embed" not in n]
    others = {name for path in plain if path not in paths for name in layers.full_names(path)}
    predicts = [name.rpartition(".")[0] for name in offered.manifest.tensors if layers.predicts(name)]
    others |= {full for name in predicts for full in layers.full_names(name)}
    problems = []
    for i, pattern in enumerate(patterns):
        if pattern and any(found is not False for found in modules.ignored([pattern], [*own, *others]).values()):
            continue
        near = difflib.get_close_matches(pattern, own, n=1, cutoff=0.5)
        do = f"A module is called {near[0]}; what the engine joins goes by the joint name." if near else ""
        what, wanted = "the pattern matches no module of the engine", "a name that the engine has"
        problems.append(Problem(what, where=f"quantization.ignore[{i}]", got=repr(pattern), wanted=wanted, do=do))
    ignored = modules.ignored([pattern for pattern in patterns if pattern], own)
    for name in [name for name in own if ignored[name] is None][:1]:
        what = f"the engine joins parts into {name}, so all or none of them are quantised"
        problems.append(Problem(what, where="quantization.ignore", got=", ".join(patterns), wanted="all of its parts, or none"))
    if all(ignored.values()):
        wanted = "quantization null, or fewer patterns"
        what = "the ignore patterns leave nothing to quantise"
        problems.append(Problem(what, where="quantization.ignore", got=", ".join(patterns), wanted=wanted))
    return problems


def block_violations(recipe: Recipe, engine: Engine, offered: Offered, routes: Routes, layers: Layers) -> list[Problem]:
    """MXFP8 blocks along K that a cut of the engine or of the trainer splits, one for each pair of sizes. routes: of rank 0."""
    modules, uncut = modules_of(recipe, engine), modules_of(recipe, msgspec.structs.replace(engine, tp=1, dp=1, ep=1))
    paths = quantised_paths(engine, modules, layers)
    whole = {m.name: m.k for m in uncut.modules}
    found: dict[tuple[int, int, str], Problem] = {}
    for m in modules.modules:
        for full, part in zip(whole[m.name], m.k, strict=True) if m.path in paths else ():
            if part % BLOCK:
                where = "quantization.ignore" if full == part else "tp" if engine.tp > 1 else "dp"
                found.setdefault((full, part, where), _split(where, "would be split", m.name, full, part))
    held, sources = quantised_names(routes, paths), offered.sources
    for t in np.unique(sources.tensor):
        name = sources.names[t]
        shape = offered.manifest.tensors[name].shape
        mine = sources.tensor == t
        ends = np.concatenate([sources.lo[mine, len(shape) - 1], sources.hi[mine, len(shape) - 1]])
        bad = ends[(ends % BLOCK > 0) & (ends < shape[-1])]
        if name in held and len(bad):
            where = f"trainer.parallelism.{'etp' if '.experts.' in name else 'tp'}"
            key = (shape[-1], int(bad.min()), where)
            found.setdefault(key, _split(where, "would lie on two trainer ranks", name, *key[:2]))
    return list(found.values())


def _split(where: str, what: str, name: str, full: int, part: int) -> Problem:
    do = "Cut it into fewer parts, or name it in quantization.ignore."
    what = f"an MXFP8 block of {BLOCK} {what}: K of {name} is {full}"
    return Problem(what, where=where, got=f"{part} elements a rank", wanted=f"a multiple of {BLOCK}", do=do)


def quantised(recipe: Recipe, engine: Engine, routes: list[Routes]) -> Callable[[str], bool]:
    """name -> whether the engine holds it as MXFP8, for a recipe of whole size."""
    names: set[str] = set()
    for rank in range(0, len(routes), engine.tp) if engine.quantization is not None else ():  # one rank of each stage
        names |= quantised_names(routes[rank], quantised_paths(engine, modules_of(recipe, engine, rank)))
    stems = {name.partition(".experts.")[0] for name in names if ".experts." in name}
    return lambda name: name in names or name.partition(".experts.")[0] in stems
