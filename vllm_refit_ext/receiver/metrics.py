"""What an engine rank does now and what its refits were: Prometheus metrics of the worker's process, and a log line a refit.

With VLLM_REFIT_METRICS_PORT=9400 in the engine's environment rank r (over all data parallel replicas) serves them at
http://127.0.0.1:(9400 + r)/metrics, from its first refit call on, also while a refit runs and the worker answers no other call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Iterator

import msgspec
from prometheus_client import Counter, Gauge, Histogram, start_http_server

from vllm_refit_ext.core.errors import ConfigError, RefitError
from vllm_refit_ext.core.messages import PrepareReply, UpdateReport

PORT = "VLLM_REFIT_METRICS_PORT"
BUCKETS = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)

REFITS = Counter("refit_engine_total", "Refits of this rank by how they ended", ["rank", "result"])
BYTES = Counter("refit_engine_bytes_total", "Bytes that this rank read, of the trainer or of replicas", ["rank", "source"])
SECONDS = Histogram("refit_engine_seconds", "Seconds of a refit by phase", ["rank", "phase"], buckets=BUCKETS)
PHASE = Gauge("refit_engine_phase_began_timestamp_seconds", "When a phase began that this rank is in", ["rank", "phase"])
COMMITTED = Gauge("refit_engine_committed_timestamp_seconds", "When the version was committed that is served", ["rank"])

logger = logging.getLogger("vllm_refit_ext")


class Clock:
    """Seconds by phase, of one call. A phase that is entered again adds up. While it lasts, `PHASE` has it."""

    def __init__(self, rank: int) -> None:
        self.seconds: dict[str, float] = {}
        self.report: UpdateReport | None = None
        self._rank = str(rank)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        PHASE.labels(self._rank, phase).set_to_current_time()
        try:
            yield
        finally:
            with contextlib.suppress(KeyError):
                PHASE.remove(self._rank, phase)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def done(self, report: UpdateReport) -> UpdateReport:
        """What the call ended with."""
        self.report = report
        return report


@contextlib.contextmanager
def counted(rank: int) -> Iterator[Clock]:
    """Count and log a refit of this rank; gives its clock. Raises what the refit does."""
    clock, label = Clock(rank), str(rank)
    try:
        yield clock
    except RefitError as error:
        REFITS.labels(label, type(error).__name__).inc()
        _log(logging.WARNING, rank=rank, result=type(error).__name__, error=str(error), seconds=clock.seconds)
        raise
    report = clock.report
    assert report is not None
    REFITS.labels(label, "ok").inc()
    BYTES.labels(label, "trainer").inc(sum(report.received.values()))
    BYTES.labels(label, "replica").inc(sum(report.forwarded.values()))
    COMMITTED.labels(label).set_to_current_time()
    for phase, seconds in report.seconds.items():
        SECONDS.labels(label, phase).observe(seconds)
    nbytes = sum(report.received.values()) + sum(report.forwarded.values())
    _log(logging.INFO, rank=rank, result="ok", version=report.version, nbytes=nbytes, seconds=report.seconds)


def explained(reply: PrepareReply) -> None:
    """Log what was prepared: counts at INFO, at DEBUG why a tensor takes another way than a copy."""
    ways = {"reload": reply.reload, "dropped": reply.dropped, "cast": reply.casts}
    counts = {way: len(reasons) for way, reasons in ways.items()}
    _log(logging.INFO, rank=reply.rank, prepared=reply.digest[:16], nbytes=reply.wire_bytes, **counts, seconds=reply.seconds)
    for way, reasons in ways.items():
        for name, why in reasons.items():
            _log(logging.DEBUG, rank=reply.rank, tensor=name, way=way, why=why)


def _log(level: int, **fields: object) -> None:
    if logger.isEnabledFor(level):
        logger.log(level, "refit %s", msgspec.json.encode(fields).decode())


@functools.cache
def serve(rank: int) -> None:
    """Serve the metrics where the environment says a port. Raises ConfigError for one that can't be had."""
    base = os.environ.get(PORT, "")
    if not base:
        return
    try:
        start_http_server(int(base) + rank, addr="127.0.0.1")
    except (ValueError, OverflowError, OSError) as error:
        do = "set the first of as many free ports as the engine has ranks, or leave it unset"
        raise ConfigError("the metrics can't be served", where=f"{PORT}, rank {rank}", got=f"{base}: {error}", do=do) from None
