"""Which vLLM this process runs, decided by what its classes take, never by the version string alone.

vLLM 0.24 and 0.32/0.33 differ in the weight-transfer engine that a backend has to be: its constructor, who starts a
layerwise reload, and which methods are called. `adapter()` looks at the signatures and names the one that fits.

Tested: 0.24.0 and 0.32.0 by running (CPU builds), 0.33.0 against its source. Versions between are accepted when every
signature equals one of the two, and say so by `tested=False`.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass

from vllm_refit_ext.core.errors import ConfigError, Problem
from vllm_refit_ext.engine import needed

TESTED = ("0.24", "0.32", "0.33")
WANTED = "vLLM 0.24.x, 0.32.x or 0.33.x (0.25 to 0.31 where their signatures equal one of these)"


@dataclass(frozen=True)
class Adapter:
    """What differs between the supported generations of vLLM.

    `name`: "0.24" or "0.32" (which 0.33 shares). `version`: as vLLM reports it. `tested`: this version was tried.
    `engine_parameters`: of `WeightTransferEngine.__init__`, without self. `starts_reload`: the worker itself starts a
    layerwise reload in `start_weight_update` (0.24), so an engine that is handed an update must first undo it.
    """

    name: str
    version: str
    tested: bool
    engine_parameters: tuple[str, ...]
    starts_reload: bool


_GENERATIONS = {
    "0.24": (("config", "parallel_config", "model"), ("is_checkpoint_format",)),
    "0.32": (("config", "vllm_config", "device", "model"), ()),
}


def parameters(function: object) -> tuple[str, ...]:
    """Names of the parameters of `function`, without self."""
    assert callable(function)
    return tuple(name for name in inspect.signature(function).parameters if name != "self")


def choose(version: str, engine: tuple[str, ...], start: tuple[str, ...], missing: list[str]) -> Adapter:
    """The adapter for these signatures. Raises `ConfigError` with every difference when none fits."""
    for name, (wanted_engine, wanted_start) in _GENERATIONS.items():
        if engine == wanted_engine and start == wanted_start and not missing:
            tested = any(version == prefix or version.startswith(f"{prefix}.") for prefix in TESTED)
            return Adapter(name, version, tested, engine, starts_reload=bool(wanted_start))
    do = "install a supported vLLM, or leave this extension out"
    problems = [
        Problem("this vLLM is not supported", "vllm", version or "no version", WANTED, do),
        Problem(
            "the signature is unknown",
            "WeightTransferEngine.__init__",
            ", ".join(engine),
            "; or ".join(", ".join(g[0]) for g in _GENERATIONS.values()),
        ),
        Problem(
            "the signature is unknown",
            "Worker.start_weight_update",
            ", ".join(start) or "no parameters",
            "is_checkpoint_format; or no parameters",
        ),
        *needed.problems(missing),
    ]
    raise ConfigError.of(problems, "this vLLM does not fit the refit extension")


@functools.cache
def adapter() -> Adapter:
    """The adapter for the vLLM of this process. Imports vLLM's worker, so call it inside one.

    Raises `ConfigError` (what, got, wanted, do) for a vLLM whose classes fit neither generation.
    """
    try:
        import vllm
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
        from vllm.v1.worker.gpu_worker import Worker
    except ImportError as error:
        raise ConfigError(
            "vLLM's weight transfer can't be imported", where="vllm", got=error, wanted=WANTED, do="install a supported vLLM"
        ) from error
    start = getattr(Worker, "start_weight_update", None)
    return choose(
        str(getattr(vllm, "__version__", "")),
        parameters(WeightTransferEngine.__init__),
        parameters(start) if start is not None else ("(absent)",),
        [gone for name in needed.NEEDED for gone in needed.lacking(name)],
    )
