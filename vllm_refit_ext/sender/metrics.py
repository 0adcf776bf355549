"""Prometheus metrics of a trainer's refits, in the process of trainer rank 0, and a log line a refit.

Serve them with `prometheus_client.start_http_server(port, addr="127.0.0.1")`, or through whatever registry the trainer already
serves.
"""

from __future__ import annotations

import logging

import msgspec
from prometheus_client import Counter, Histogram

from vllm_refit_ext.core.errors import RefitError

REFITS = Counter("refit_total", "Refits by how they ended", ["result"])
BYTES = Counter("refit_bytes_total", "Bytes that were sent to all engine ranks")
SECONDS = Histogram("refit_seconds", "Seconds of a refit by phase", ["phase"], buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100))


logger = logging.getLogger("vllm_refit_ext")


def succeeded(version: str, seconds: dict[str, float], nbytes: int) -> None:
    """Count and log a refit that every engine rank committed. seconds: by phase."""
    REFITS.labels("ok").inc()
    BYTES.inc(nbytes)
    for phase, value in seconds.items():
        SECONDS.labels(phase).observe(value)
    _log(logging.INFO, result="ok", version=version, nbytes=nbytes, seconds=seconds)


def failed(version: str, error: RefitError) -> None:
    """Count and log a refit that raised `error`."""
    REFITS.labels(type(error).__name__).inc()
    _log(logging.WARNING, result=type(error).__name__, version=version, error=str(error))


def _log(level: int, **fields: object) -> None:
    if logger.isEnabledFor(level):
        logger.log(level, "refit %s", msgspec.json.encode(fields, enc_hook=str).decode())
