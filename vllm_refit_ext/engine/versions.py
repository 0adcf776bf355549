"""Which vLLM this process runs, decided by what its classes take and have, never by the version string alone.

vLLM 0.24 and 0.32/0.33 differ in the weight-transfer engine that a backend has to be: its constructor, who starts a
layerwise reload, and which methods are called. `version()` accepts a vLLM whose signatures are those of one of the two and
that has every name of `needed`.

Tested: 0.24.0 and 0.32.0 by running (CPU builds), 0.33.0 against its source. Versions between are accepted when every
signature equals one of the two, and a warning says so.
"""

from __future__ import annotations

import functools
import inspect
import logging

from vllm_refit_ext.core.errors import ConfigError, Problem
from vllm_refit_ext.engine import needed

logger = logging.getLogger(__name__)
TESTED = ("0.24", "0.32", "0.33")
WANTED = "vLLM 0.24.x, 0.32.x or 0.33.x (0.25 to 0.31 where their signatures equal one of these)"
GENERATIONS = (
    (("config", "parallel_config", "model"), ("is_checkpoint_format",)),
    (("config", "vllm_config", "device", "model"), ()),
)
"""Parameters of `WeightTransferEngine.__init__` and of `Worker.start_weight_update`, without self: 0.24; 0.32 and 0.33."""


def problems(found: str, engine: tuple[str, ...], start: tuple[str, ...], missing: list[str]) -> list[Problem]:
    """How a vLLM of version `found` does not fit. engine, start: see `GENERATIONS`. missing: names that it has not."""
    unknown = (engine, start) not in GENERATIONS
    if not unknown and not missing:
        return []
    do = "install a supported vLLM, or leave this extension out"
    differences = [Problem("this vLLM is not supported", "vllm", found or "no version", WANTED, do)]
    for where, got, wanted in (
        ("WeightTransferEngine.__init__", engine, [", ".join(g[0]) for g in GENERATIONS]),
        ("Worker.start_weight_update", start, [", ".join(g[1]) or "no parameters" for g in GENERATIONS]),
    ):
        if unknown:
            what = "the signature is unknown"
            differences.append(Problem(what, where, ", ".join(got) or "no parameters", "; or ".join(wanted)))
    return differences + needed.problems(missing)


@functools.cache
def version() -> str:
    """The version of this process's vLLM. Imports vLLM's worker, so call it inside one.

    Raises `ConfigError` (what, got, wanted, do) for a vLLM that does not fit, with every difference.
    """
    try:
        import vllm
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
        from vllm.v1.worker.gpu_worker import Worker
    except ImportError as error:
        raise ConfigError(
            "vLLM's weight transfer can't be imported", where="vllm", got=error, wanted=WANTED, do="install a supported vLLM"
        ) from error
    found = str(getattr(vllm, "__version__", ""))
    start = getattr(Worker, "start_weight_update", None)
    wrong = problems(
        found,
        _parameters(WeightTransferEngine.__init__),
        _parameters(start) if start is not None else ("(absent)",),
        [gone for name in needed.NEEDED for gone in needed.lacking(name)],
    )
    if wrong:
        raise ConfigError.of(wrong, "this vLLM does not fit the refit extension")
    if not any(found == tested or found.startswith(f"{tested}.") for tested in TESTED):
        logger.warning("vLLM %s was not tested with the refit extension; its signatures fit. Tested: %s", found, WANTED)
    return found


def _parameters(function: object) -> tuple[str, ...]:
    assert callable(function)
    return tuple(name for name in inspect.signature(function).parameters if name != "self")
