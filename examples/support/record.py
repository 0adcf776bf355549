"""The beginning of a run: what vLLM finds in its environment. Its end: a JSON record, and the verdict."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console


def set_up(out: Path) -> None:
    """Make the folder, and keep vLLM off the network, unbound to cores and quiet."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    out.mkdir(parents=True, exist_ok=True)


def conclude(
    out: Path,
    settings: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    problems: Sequence[str],
    seconds: float,
    summary: str,
) -> int:
    """Write `out`/record.json and print `summary` and the problems. Returns the exit status: 1 when there are any."""
    record = {"settings": {**settings, "out": str(out)}, "seconds": seconds, "problems": problems, "steps": steps}
    (out / "record.json").write_text(json.dumps(record, indent=1))
    console = Console(width=110)
    console.print(f"{seconds:.0f} s in all; {summary} in {out}")
    for problem in problems:
        console.print(f"FAILED: {problem}")
    return 1 if problems else 0
