"""Prometheus metrics of a trainer's refits, in the process of trainer rank 0.

Serve them with `prometheus_client.start_http_server(port, addr="127.0.0.1")`, or through whatever registry the trainer already
serves.
"""

from __future__ import annotations

from prometheus_client import Counter, Histogram

REFITS = Counter("refit_total", "Refits by how they ended", ["result"])
BYTES = Counter("refit_bytes_total", "Bytes that were sent to all engine ranks")
SECONDS = Histogram("refit_seconds", "Seconds of a refit by phase", ["phase"], buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100))


def succeeded(seconds: dict[str, float], nbytes: int) -> None:
    """Count a refit that every engine rank committed. seconds: by phase."""
    REFITS.labels("ok").inc()
    BYTES.inc(nbytes)
    for phase, value in seconds.items():
        SECONDS.labels(phase).observe(value)


def failed(kind: str) -> None:
    """Count a refit that raised `kind`, the name of an error class."""
    REFITS.labels(kind).inc()
