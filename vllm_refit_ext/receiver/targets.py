"""The targets of one engine rank: its routes, turned into boxes of live parameters or of tensors for the engine's own reload.

A parameter whose layout is known takes moves in place. One whose layout is unknown, or that a loader computes, takes the engine's
reload, together with everything its module holds, because the reload works module by module. Tensors for the reload have
checkpoint shape, and only the boxes that this rank's routes read are asked for, so the bytes that are sent stay the same.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from vllm_refit_ext.core.coded import CHECKPOINT, DEQUANTISED, PLAIN, SCALE, coding_of
from vllm_refit_ext.core.dtypes import CASTS, cast_text
from vllm_refit_ext.core.errors import Problem, RouteError, SessionError
from vllm_refit_ext.core.manifest import Manifest, suggest, suggest_each
from vllm_refit_ext.core.placement import Placements
from vllm_refit_ext.receiver.engine import Engine, StoredParam
from vllm_refit_ext.receiver.keep import keep, overwritten
from vllm_refit_ext.receiver.recording import Recording, record
from vllm_refit_ext.receiver.routes.table import Routes
from vllm_refit_ext.receiver.target_places import closure, module_of, place, unaligned

_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")
_CONVERTED = re.compile(r"(\w+) is converted to (\w+)")


class Targets(msgspec.Struct):
    """placements: boxes of buffers of this rank. params: live tensors by buffer name, for buffers in place. stored: the MXFP8
    parameters among them. reload: names that take the engine's reload, with the reason. reloaded: engine parameter -> elements
    that this reload must write. dropped: names that the loaders skip here, with the reason. casts: names whose elements are
    converted, and how. quantise: names whose parameter holds MXFP8. kept: engine parameters and offered tensors that stay as
    they are, with the patterns that say so. problems: what keeps the rank from taking part. module_of: HF name -> the first
    module that it fills. computed: names of `reload` that a loader does more to than copying. filled: engine parameter -> names
    that fill it. slots, second_scales: what `signature` looks at.
    """

    rank: int
    placements: Placements
    params: dict[str, torch.Tensor]
    stored: dict[str, StoredParam]
    reload: dict[str, str]
    reloaded: dict[str, int]
    dropped: dict[str, str]
    casts: dict[str, str]
    quantise: list[str]
    problems: list[Problem]
    slots: list[Any] = []
    second_scales: list[Callable[[], int]] = []
    module_of: dict[str, str] = {}
    kept: dict[str, list[str]] = {}
    computed: frozenset[str] = frozenset()
    filled: dict[str, frozenset[str]] = {}

    @property
    def writer(self) -> str:
        """`in place`, `reload`, or both."""
        kinds = {b.layout.startswith(CHECKPOINT) for b in self.placements.buffers}
        names = [name for reloaded, name in ((False, "in place"), (True, "reload")) if reloaded in kinds]
        return " and ".join(names) or "nothing"

    def written(self) -> list[torch.Tensor]:
        """Every live tensor that moves in place fill."""
        return [*self.params.values(), *(t for one in self.stored.values() for t in (one.values, *one.scales))]

    def reloaded_by(self, names: Collection[str]) -> dict[str, int]:
        """What of `reloaded` a refit of `names` must write. Raises SessionError where it would give the reload a part of a
        module."""
        chosen = frozenset(names) & self.reload.keys()
        modules = {p.rpartition(".")[0] for p, who in self.filled.items() if who & chosen}
        within = {p: who for p, who in self.filled.items() if p.rpartition(".")[0] in modules}
        lacking = sorted(frozenset().union(*within.values()) - frozenset(names)) if within else []
        if lacking:
            what = "the part names some tensors of modules that take the engine's own reload, which writes a module as a whole"
            wanted = "also " + ", ".join(map(repr, lacking[:8])) + (f" and {len(lacking) - 8} more" if len(lacking) > 8 else "")
            raise SessionError(what, where="update_weights, part", got=f"{sorted(chosen)[0]!r} and others", wanted=wanted)
        return {p: count for p, count in self.reloaded.items() if p.rpartition(".")[0] in modules}

    def layouts(self) -> dict[str, int]:
        """Buffers by layout."""
        count: dict[str, int] = {}
        for buffer in self.placements.buffers:
            count[buffer.layout] = count.get(buffer.layout, 0) + 1
        return count

    def signature(self, view: Engine) -> tuple[Any, ...]:
        """Identity of everything the plan writes in place. It changes when a parameter is replaced, moved or retyped."""
        if self.slots and self.slots[0] is not view.model:
            return ()
        now = [module._parameters.get(name, module._buffers.get(name)) for module, name in self.slots[1:]]
        tensors = [t for t in now if t is not None]
        with torch._C.DisableTorchFunction():
            looks = [list(map(look, tensors)) for look in (torch.Tensor.data_ptr, _SHAPE, _DTYPE)]
        return ([t is None for t in now], *looks, [address() for address in self.second_scales])


def _slots(model: nn.Module, params: Iterable[str], stored: Iterable[str]) -> list[Any]:
    """The model, then (module, attribute) of everything written in place. Walking a model's names takes milliseconds, this
    does not."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names = [*params, *(name + ending for name in stored for ending in ("", SCALE))]
    return [model, *((modules[owner], attribute) for owner, _, attribute in (name.rpartition(".") for name in names))]


def build_targets(
    view: Engine,
    manifest: Manifest,
    rank: int,
    recording: Recording | None = None,
    refused: Mapping[str, str] | None = None,
    patterns: Collection[str] = (),
) -> Targets:
    """Decide for every parameter that `recording` fills how it is written. `rank` is this rank's number in the plan.

    recording: of the same manifest and rank, made here when None. refused: names that no move can write in place, with the
    reason; they and all that belongs to them take the reload. patterns: what is kept, see `receiver.keep`.

    Raises RouteError with every tensor that the engine's loaders refuse. Other problems are in the result.
    """
    recorded = recording or record(view, manifest, rank)
    kept = keep(recorded.routes, patterns, view.renamed)
    recording = msgspec.structs.replace(recorded, routes=kept.routes)
    routes = kept.routes
    live = live_tensors(view.model)
    found, unknown = view.look(routes.placements.buffers, live)
    reload = closure(routes, unknown, {**unaligned(recording, found, manifest), **(refused or {})})
    placements = place(recording, reload, found, manifest, rank)
    inside = {b.name for b in placements.buffers if b.layout == PLAIN or b.layout.startswith(DEQUANTISED)}
    coded = {b.name for b in placements.buffers if coding_of(b.layout)}
    params = {name: live[name] for name in live if name in inside}
    stored = {name: found[name] for name in found if name in coded}
    slots = _slots(view.model, params, stored)
    return Targets(
        rank=rank,
        placements=placements,
        params=params,
        stored=stored,
        slots=slots,
        second_scales=view.second_scales(slots[1:]),
        reload=reload,
        reloaded=routes.wanted(reload),
        dropped=routes.dropped,
        casts=dict(_casts(routes, manifest)),
        quantise=sorted(_quantisable(routes, found, manifest)),
        problems=[
            *_problems(recording, reload, found, manifest),
            *(() if view.pipelined else kept.problems),
            *overwritten(kept.names, recorded.routes, reload),
        ],
        kept=kept.names,
        module_of=module_of(routes),
        computed=frozenset(routes.computed),
        filled={parameter: frozenset(who) for parameter, (_, who) in routes.filled.items()},
    )


def live_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers of the running model by full name, shared ones under every name."""
    named: Iterable[tuple[str, torch.Tensor]] = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: tensor.detach() for name, tensor in named}


def _casts(routes: Routes, manifest: Manifest) -> Iterable[tuple[str, str]]:
    """Names that a parameter takes in another dtype than they are sent in, with how they are converted."""
    table = routes.placements
    for code in np.unique(table.tensor * len(table.buffers) + table.buffer).tolist():
        t, b = divmod(code, len(table.buffers))
        pair = manifest.tensors[table.names[t]].dtype, table.buffers[b].dtype
        if pair in CASTS:
            yield table.names[t], cast_text(*pair)


def _quantisable(routes: Routes, stored: Mapping[str, StoredParam], manifest: Manifest) -> Iterable[str]:
    """Names that the engine wants as MXFP8: those of its MXFP8 parameters whose last dimension has whole blocks."""
    table = routes.placements
    coded = np.array([b.name in stored for b in table.buffers], bool)
    for t in np.unique(table.tensor[coded[table.buffer]]) if len(table) else []:
        spec = manifest.tensors[table.names[t]]
        if len(spec.shape) >= 2 and spec.shape[-1] % 32 == 0:
            yield table.names[t]


def _problems(
    recording: Recording, reload: dict[str, str], stored: Mapping[str, StoredParam], manifest: Manifest
) -> list[Problem]:
    """What is missing: parameters that no offered tensor fills, names that nothing here knows, tensors in a form that can't be
    loaded."""
    routes = recording.routes
    filled = {b.name for b in routes.placements.buffers}
    odd = _odd_shapes(routes, manifest)
    problems = [
        Problem(
            "no offered tensor fills it",
            f"engine parameter {name!r}",
            what,
            "every element written",
            odd.get(name) or _hint(name, manifest),
        )
        for name, what in routes.unwritten.items()
        if not (name.endswith(SCALE) and name.removesuffix(SCALE) in filled & (stored.keys() | _coded_when_made(routes)))
    ]
    for name, reason in routes.computed.items():
        pair = _CONVERTED.match(reason)
        if pair and ("float" in pair[1]) != ("float" in pair[2]):
            problems.append(Problem("the engine would convert bytes to numbers or back", f"tensor {name!r}", pair[1], pair[2]))
    unknown = [name for name in routes.dropped if name not in reload and routes.dropped[name].startswith("unknown")]
    known = [n for n in routes.placements.names if n not in unknown]
    problems += [Problem("the engine does not know it", f"tensor {name!r}", do=do) for name, do in suggest_each(unknown, known)]
    problems += [
        Problem(
            "the engine loads it as MXFP8 and it can't be written in place, so the engine's own reload needs it quantised",
            f"tensor {name!r}",
            manifest.tensors[name].dtype,
            "float8_e4m3fn with its scales",
            "let the trainer quantise it (fp8_config prequantize)",
        )
        for name in sorted(recording.rerouted & set(reload) - set(recording.partners))
    ]
    return problems


def _odd_shapes(routes: Routes, manifest: Manifest) -> dict[str, str]:
    """For a parameter that several tensors fill, those whose shape is not that of their kind: names that differ in numbers
    only."""
    table = routes.placements
    found: dict[str, str] = {}
    for index, buffer in enumerate(table.buffers):
        if buffer.name not in routes.unwritten:
            continue
        kinds: dict[str, dict[tuple[int, ...], list[str]]] = {}
        for name in (table.names[t] for t in np.unique(table.tensor[table.buffer == index])):
            kinds.setdefault(re.sub(r"\d+", "*", name), {}).setdefault(manifest.tensors[name].shape, []).append(name)
        for shapes in kinds.values():
            usual = max(shapes, key=lambda shape: len(shapes[shape]))
            odd = [f"{name} {list(shape)}" for shape, names in shapes.items() if shape != usual for name in names]
            if odd:
                found[buffer.name] = f"correct the shape of {', '.join(odd[:3])}: others of its kind have {list(usual)}"
    return found


def _coded_when_made(routes: Routes) -> set[str]:
    """Parameters that the model creates as E4M3: their scales are filled with them."""
    return {b.name for b in routes.placements.buffers if b.dtype == "float8_e4m3fn"}


def _hint(parameter: str, manifest: Manifest) -> str:
    return suggest(parameter, manifest.tensors) or "offer the checkpoint's tensors that it is made of"


__all__ = ["Recording", "RouteError", "Targets", "build_targets", "live_tensors", "record"]
