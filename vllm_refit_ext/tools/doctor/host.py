"""What the kernel and the container allow: processes, shared memory, limits, loopback."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from pathlib import Path

from vllm_refit_ext.tools.doctor.finding import GIB, Finding

FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The name that Linux gives the machine's own process namespace."""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def check_isolation(proc: Path) -> list[Finding]:
    """What the kernel lets one process see of another: ptrace scope and process namespace. `proc` is /proc."""
    scope = _read(proc / "sys" / "kernel" / "yama" / "ptrace_scope")
    if scope in ("", "0"):
        findings = [Finding("ok", "ptrace scope", scope or "not restricted")]
    else:
        do = "Only memory from expandable segments needs it (pidfd_getfd): keep those off, or set kernel.yama.ptrace_scope=0."
        findings = [Finding("warn", "ptrace scope", scope, "0", do)]
    try:
        namespace = os.readlink(proc / "self" / "ns" / "pid")
    except OSError:
        return [*findings, Finding("warn", "process namespace", "unknown", "", "Trainer and engine must share one.")]
    inside = namespace != FIRST_PID_NAMESPACE
    got = f"{namespace}, {'a container' if inside else 'the machine itself'}"
    return [*findings, Finding("ok", "process namespace", got, "the same for trainer and engine")]


def check_shared_memory(folder: Path) -> list[Finding]:
    """Size and room of the shared memory that the wire shm uses."""
    what, wanted = f"shared memory {folder}", "room for the bytes that a refit moves, at least 1 GiB"
    if not os.access(folder, os.W_OK):
        return [Finding("fail", what, "missing or not writable", wanted, "Mount a tmpfs there; the wire shm needs it.")]
    room = shutil.disk_usage(folder)
    return [judge_shared_memory(what, room.total, room.free, wanted)]


def judge_shared_memory(what: str, total: int, free: int, wanted: str) -> Finding:
    """The finding for `total` and `free` bytes of shared memory."""
    got = f"{free / GIB:.2f} GiB free of {total / GIB:.2f} GiB"
    if free >= GIB:
        return Finding("ok", what, got, wanted)
    if total < GIB:
        return Finding("warn", what, got, wanted, "Containers get 64 MiB by default: use docker --shm-size, or --ipc=host.")
    return Finding("warn", what, got, wanted, "Something fills it: look for files that ended processes left there.")


def check_limits(files: int, locked: int) -> list[Finding]:
    """Soft limits of open files and of locked memory (bytes); `resource.RLIM_INFINITY` for none."""
    endless = resource.RLIM_INFINITY
    enough_files = files == endless or files >= 4096
    enough_locked = locked == endless or locked >= GIB
    return [
        Finding(
            "ok" if enough_files else "warn",
            "open files",
            "unlimited" if files == endless else str(files),
            "4096 or more",
            "" if enough_files else "ulimit -n 65536: a process per GPU with NCCL and vLLM opens thousands.",
        ),
        Finding(
            "ok" if enough_locked else "warn",
            "locked memory",
            "unlimited" if locked == endless else f"{locked / GIB:.2f} GiB",
            "unlimited, or 1 GiB or more",
            "" if enough_locked else "ulimit -l unlimited, for NCCL over InfiniBand. Nothing to do on one host.",
        ),
    ]


def check_loopback() -> list[Finding]:
    """Whether a port on the loopback interface can be held and reached."""
    what, wanted = "port on 127.0.0.1", "can be held and reached"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            with socket.create_connection(server.getsockname(), timeout=5), server.accept()[0]:
                return [Finding("ok", what, f"port {server.getsockname()[1]}", wanted)]
    except OSError as error:
        do = "Bring the loopback interface up (ip link set lo up); rendezvous needs it."
        return [Finding("fail", what, error.strerror or str(error), wanted, do)]
