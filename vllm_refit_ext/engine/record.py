"""Running a model's own weight loader once, on tensors without storage, to learn where every checkpoint tensor goes."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn

from vllm_refit_ext.copies import storage_id
from vllm_refit_ext.core.dtypes import dtype_name
from vllm_refit_ext.core.errors import Problem, RouteError
from vllm_refit_ext.engine import reasons
from vllm_refit_ext.engine.created import as_created
from vllm_refit_ext.receiver.routes.recorder import Recorder, ValueReadError
from vllm_refit_ext.receiver.routes.table import Routes, build

MAX_PROBLEMS = 20
"""Names that a loader may refuse before recording gives up and reports those it has."""

MAX_TEXT = 240
"""Characters of a loader's own message that a problem repeats."""


def record_routes(
    model: nn.Module,
    manifest_entries: Mapping[str, tuple[Sequence[int], str]],
    *,
    rank: int,
    vllm_config: Any = None,
) -> Routes:
    """The routes of `manifest_entries` (HF name -> (shape, dtype name)) into this worker's `model`, as rank `rank`.

    `model` may be a live engine's, new, or built on the meta device; it is left exactly as it was, whatever happens.
    `vllm_config` is made current while the loader runs. Raises RouteError, with every name concerned, when the loader itself
    refuses a tensor (an unknown name, a wrong shape) or when a copy can't be written as boxes.
    """
    began = time.perf_counter()
    names = list(manifest_entries)
    shapes = [tuple(int(n) for n in manifest_entries[name][0]) for name in names]
    dtypes = [_torch_dtype(manifest_entries[name][1]) for name in names]
    excluded: dict[int, str] = {}
    problems: list[Problem] = []
    while True:
        sources = [torch.empty(s, dtype=d, device="meta") for s, d in zip(shapes, dtypes, strict=True)]
        with _config(vllm_config), torch.no_grad(), as_created(model) as created:
            recorder = Recorder(created, sources)
            failure = _load(model, names, sources, recorder, excluded)
            if failure is None:
                recorder.finish(model)
                break
        index, error = failure
        if index is None or index in excluded:
            raise RouteError(f"the weight loader failed: {type(error).__name__}: {error}") from error
        if isinstance(error, ValueReadError) or index in recorder.computed:
            excluded[index] = recorder.computed.get(index, str(error))
        else:
            excluded[index] = "refused"
            problems.append(_refused(names[index], shapes[index], dtypes[index], error))
            if len(problems) == MAX_PROBLEMS:
                break
    if problems:
        raise RouteError.of(problems, f"the engine's weight loader refuses {len(problems)} tensor(s)")
    for index, reason in excluded.items():
        recorder.computed.setdefault(index, reason)
    why = functools.partial(reasons.why_dropped, model)
    return build(reasons.may_stay_unwritten, why, created, recorder, names, shapes, dtypes, rank, began)


def _load(
    model: nn.Module, names: Sequence[str], sources: Sequence[torch.Tensor], recorder: Recorder, excluded: Mapping[int, str]
) -> tuple[int | None, Exception] | None:
    """Run the loader. None if it went through, else (the tensor that it failed on, the error)."""
    last: list[int] = []

    def offered() -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(zip(names, sources, strict=True)):
            if i not in excluded:
                last[:] = [i]
                yield name, tensor

    loader: Any = model
    try:
        with recorder:
            loader.load_weights(offered())
    except Exception as error:  # noqa: BLE001 - any model's loader, any error: it is named and reported
        culprit = _in_hand(error.__traceback__, recorder.sources, excluded)
        return (culprit if culprit is not None else (last[0] if last else None)), error
    return None


def _in_hand(trace: TracebackType | None, sources: Mapping[int, int], excluded: Mapping[int, str]) -> int | None:
    """The checkpoint tensor that the innermost frame of a failed loader was working on."""
    found = None
    while trace is not None:
        for value in list(trace.tb_frame.f_locals.values()):
            if isinstance(value, torch.Tensor) and value.is_meta:
                index = sources.get(storage_id(value))
                if index is not None and index not in excluded:
                    found = index
        trace = trace.tb_next
    return found


def _refused(name: str, shape: tuple[int, ...], dtype: torch.dtype, error: Exception) -> Problem:
    text = str(error)
    shown = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
    return Problem(
        "the engine's weight loader refuses this tensor",
        where=name,
        got=f"{list(shape)} {dtype_name(dtype)}: {type(error).__name__}: {shown}",
        do="Check the name against the engine's checkpoint format, and the shape against its config.",
    )


def _config(vllm_config: Any) -> AbstractContextManager[Any]:
    if vllm_config is None:
        return nullcontext()
    from vllm.config import set_current_vllm_config

    context: AbstractContextManager[Any] = set_current_vllm_config(vllm_config)
    return context


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, dtype_name(name))
    return dtype
