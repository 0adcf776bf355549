"""What planning the shipped recipes costs: each through `vllm-refit plan --json` at full size, in a process of its own.

    python benchmarks/planning_recipes.py [NAME ...]     # parts of recipes' names; none: all of them

No GPU, no weights, no download. Prints the table of docs/how-it-works.md, a row as soon as it is known. A recipe that can't be
planned here is a row that says why, and the exit status is then 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm_refit_ext.tools.plan_traffic import size

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 3600


def measure(recipe: Path) -> tuple[dict[str, Any] | str, float, float, int]:
    """The report of `recipe` or the error; seconds by the clock and of the CPU; and the peak resident MiB of the process."""
    command = [sys.executable, "-m", "vllm_refit_ext.tools.cli", "plan", str(recipe), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
        watch = threading.Timer(LIMIT_S, process.kill)
        watch.start()
        # Not Popen.wait: it drops what the kernel counted for this one process.
        _, status, used = os.wait4(process.pid, 0)
        watch.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begin
        out.seek(0)
        err.seek(0)
        said = err.read().strip().splitlines() or [f"killed after {seconds:.0f} s"]
        answer = json.load(out) if process.returncode == 0 else said[-1]
    return answer, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss >> 10


def main() -> int:
    """Measure and print. The exit status."""
    parts = sys.argv[1:] or [""]
    recipes = [p for p in sorted((ROOT / "examples" / "recipes").glob("*.yaml")) if any(part in p.stem for part in parts)]
    head = ("recipe", "ranks", "moves", "bytes", "predicted seconds", "planning seconds", "of the CPU", "peak MiB")
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    failed = False
    for recipe in recipes:
        found, seconds, cpu, peak = measure(recipe)
        if isinstance(found, str):
            failed = True
            row = ["", "", found, ""]
        else:
            row = [f"{found['trainers']} to {found['engines']}", f"{found['moves']:,}"]
            row += [size(found["nbytes"]), f"{found['seconds']:.3g}"]
        row = [recipe.stem, *row, f"{seconds:.0f}", f"{cpu:.0f}", f"{peak:,}"]
        print("| " + " | ".join(row) + " |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
