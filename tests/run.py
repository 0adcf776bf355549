"""Run test files, each in a process of its own, and print what each took.

python -m tests.run [-j N] FILE... [-- PYTEST ARGUMENT...]

vLLM keeps groups, patches and registries in the process, so each file gets one. An import of vLLM takes longer than most tests:
it is done once here, and the files' processes are forked. N of them run side by side: one more than there are cores unless N is
given, for many wait. A file's output is printed when it ends, so that two don't mix. PLAYED_CPU=avx2 or avx512 plays a lesser
CPU. Exits with 1 when a file failed, and with 2 when none ran a test.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

NO_TESTS = 5
"""pytest's exit status when every test is left out."""


@dataclass(frozen=True)
class Run:
    """One file. status: exit status of its process, or minus the signal that ended it. Seconds of the clock and of the CPU,
    with the processes that it started and waited for."""

    file: str
    status: int
    seconds: float
    cpu_seconds: float


def play(cpu: str) -> None:
    """Start anew as on a CPU that has no more than `avx2` or `avx512`, unless that was done."""
    folder = str(Path(__file__).parent / "lesser_cpu")
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in path:
        isa = {"avx2": "AVX2", "avx512": "AVX512_CORE"}[cpu]
        os.environ |= {"PYTHONPATH": os.pathsep.join([folder, *filter(None, path)]), "ATEN_CPU_CAPABILITY": cpu}
        os.environ |= {"ONEDNN_MAX_CPU_ISA": isa, "DNNL_MAX_CPU_ISA": isa}
        os.execv(sys.executable, [sys.executable, "-m", "tests.run", *sys.argv[1:]])


def preload() -> None:
    """Import what the files' processes share. Nothing in it may start a thread or a process group."""
    import hypothesis  # noqa: F401
    import msgspec  # noqa: F401
    import pytest  # noqa: F401

    from tests.support.forked import fork_engines

    fork_engines()


def start(file: str, arguments: list[str], output: int) -> int:
    """Fork a process that runs pytest on `file` and writes to the descriptor `output`; returns its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        import pytest

        from tests.support.forked import start_server

        start_server()
        status = int(pytest.main([*arguments, file]))
        atexit._run_exitfuncs()  # they end what the tests started
    except BaseException:  # noqa: BLE001 - this process goes no further up
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_files(files: list[str], arguments: list[str], jobs: int) -> list[Run]:
    """Run all, `jobs` at a time, in this order."""
    waiting, running, done = list(files), {}, []
    while waiting or running:
        while waiting and len(running) < jobs:
            file, output = waiting.pop(0), tempfile.TemporaryFile()  # noqa: SIM115 - closed when the file has ended
            running[start(file, arguments, output.fileno())] = (file, output, time.monotonic())
        pid, status, used = os.wait4(-1, 0)
        if pid not in running:
            continue
        file, output, begin = running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        done.append(Run(file, code, time.monotonic() - begin, used.ru_utime + used.ru_stime))
        output.seek(0)
        print(f"\n===== {file}\n{output.read().decode(errors='replace').strip()}", flush=True)
        output.close()
    return done


def table(runs: list[Run], seconds: float) -> str:
    """Every file with its time, the longest first."""
    words = {0: "passed", NO_TESTS: "left out"}
    rows = [f"{'file':<48} {'outcome':<10} {'seconds':>8} {'CPU s':>8}"]
    for run in sorted(runs, key=lambda run: -run.seconds):
        rows.append(f"{run.file:<48} {words.get(run.status, 'FAILED'):<10} {run.seconds:8.1f} {run.cpu_seconds:8.1f}")
    rows.append(f"{f'{len(runs)} files, side by side':<59} {seconds:8.1f} {sum(run.cpu_seconds for run in runs):8.1f}")
    return "\n".join(rows)


def main() -> int:
    """Run the files that the command line names."""
    words = sys.argv[1:]
    arguments = words[words.index("--") + 1 :] if "--" in words else []
    parser = argparse.ArgumentParser(description="Run test files, each in a process of its own.")
    parser.add_argument("-j", type=int, default=1 + len(os.sched_getaffinity(0)), dest="jobs")
    parser.add_argument("files", nargs="+")
    options = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    if os.environ.get("PLAYED_CPU"):
        play(os.environ["PLAYED_CPU"])
    begin = time.monotonic()
    preload()
    runs = run_files(options.files, ["-q", *arguments], options.jobs)
    print(f"\n{table(runs, time.monotonic() - begin)}")
    failed = [run for run in runs if run.status not in (0, NO_TESTS)]
    if all(run.status == NO_TESTS for run in runs):
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
