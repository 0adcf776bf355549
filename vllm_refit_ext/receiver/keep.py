"""What the engine keeps as it is: frozen parts that the trainer need not offer, named by the user.

A name or glob matches engine parameters, or checkpoint tensors. What it matches is not written: an engine parameter because no
move into it is planned, a checkpoint tensor (offered or not) because the parameters that it fills are kept.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable

import msgspec
import numpy as np

from vllm_refit_ext.core.errors import ConfigError, Problem
from vllm_refit_ext.core.manifest import suggest
from vllm_refit_ext.core.placement import Placements
from vllm_refit_ext.receiver.routes.table import Routes


class Kept(msgspec.Struct):
    """routes: without what is kept. names: engine parameters and offered tensors that are kept -> the patterns that say so.
    problems: patterns that match nothing."""

    routes: Routes
    names: dict[str, list[str]]
    problems: list[Problem]


def patterns_of(value: object) -> tuple[str, ...]:
    """The patterns in an RPC's argument: a list of texts, or None. Raises ConfigError."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(p, str) and p for p in value):
        wanted = "prepare_refit_info(state_dict_info, fp8_config, keep), keep a list of names or globs"
        raise ConfigError(
            "wrong arguments: keep can't be read", where="prepare_refit_info, keep", got=repr(value)[:120], wanted=wanted
        )
    return tuple(value)


def keep(routes: Routes, patterns: Collection[str], rename: Callable[[str], str] = lambda name: "") -> Kept:
    """Take what `patterns` match out of `routes`. rename: the engine's name of a tensor that nobody offers."""
    if not patterns:
        return Kept(routes, {}, [])
    table = routes.placements
    parameters = {*(b.name for b in table.buffers), *routes.unwritten, *routes.exempt, *routes.filled, *routes.aliases}
    offered = {*table.names, *routes.computed, *routes.dropped}
    names: dict[str, list[str]] = {}
    problems = []
    for pattern in patterns:
        found = {n for n in parameters | offered if fnmatch.fnmatchcase(n, pattern)}
        renamed = "" if found else rename(pattern)
        # Only a prefix may be another one: a fused parameter holds more than the tensor that is named.
        if renamed and renamed.split(".")[-2:] == pattern.split(".")[-2:]:
            found = {n for n in parameters if fnmatch.fnmatchcase(n, renamed)}
        if not found:
            what, do = "it matches no engine parameter and no offered tensor", suggest(pattern, [*parameters, *offered])
            problems.append(Problem(what, f"keep {pattern!r}", do=do))
        for name in sorted(found | {routes.aliases[n] for n in found & routes.aliases.keys()}):
            names.setdefault(name, []).append(pattern)
    return Kept(_without(routes, names), names, problems)


def _without(routes: Routes, names: Collection[str]) -> Routes:
    """The routes of all that is not in `names`. A parameter whose tensors are kept in part is written in part."""
    table, kept = _select(routes.placements, names), frozenset(names)
    into: dict[str, set[str]] = {}
    for parameter, (_, who) in routes.filled.items():
        for name in who:
            into.setdefault(name, set()).add(parameter)
    gone = {n for n in routes.computed if n in names or (n in into and into[n] <= kept)}
    unread = {n for n in routes.placements.names if n not in table.names} | gone
    filled = {p: (count, who - kept) for p, (count, who) in routes.filled.items() if p not in names}
    whole = {p: routes.filled[p][1] == who for p, (_, who) in filled.items()}
    return msgspec.structs.replace(
        routes,
        placements=table,
        computed={n: reason for n, reason in routes.computed.items() if n not in gone},
        dropped=routes.dropped | dict.fromkeys(sorted(unread), "the engine keeps it"),
        unwritten={p: what for p, what in routes.unwritten.items() if p not in names},
        filled={p: (count if whole[p] else 1, who) for p, (count, who) in filled.items() if who},
    )


def _select(table: Placements, names: Collection[str]) -> Placements:
    """The rows, tensors and buffers that are not in `names`."""
    stays = np.array([n not in names for n in table.names], bool)[table.tensor]
    stays &= np.array([b.name not in names for b in table.buffers], bool)[table.buffer]
    left = table.select(stays)
    tensors, tensor = np.unique(left.tensor, return_inverse=True)
    buffers, buffer = np.unique(left.buffer, return_inverse=True)
    return Placements(
        [left.names[t] for t in tensors],
        [left.buffers[b] for b in buffers],
        tensor,
        buffer,
        left.lo,
        left.hi,
        left.offset,
        left.strides,
    )


def overwritten(names: Iterable[str], recorded: Routes, reload: Collection[str]) -> list[Problem]:
    """A problem for every kept name that the reload of its module would overwrite. recorded: the routes with what is kept."""
    chosen = frozenset(reload)
    modules = {p.rpartition(".")[0]: min(who & chosen) for p, (_, who) in recorded.filled.items() if who & chosen}
    problems = []
    for name in names:
        filled = {p for p, (_, who) in recorded.filled.items() if name in who} or {name}
        for module in sorted({p.rpartition(".")[0] for p in filled} & modules.keys()):
            what = "it is to be kept, and its module takes the engine's own reload, which writes a module as a whole"
            got, do = f"{modules[module]!r} is offered", f"keep all of {module!r}, or nothing of it"
            problems.append(Problem(what, f"keep: {name!r}", got, do=do))
    return problems
