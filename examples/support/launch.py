"""Run a function in N ranks: heavy modules are imported once, then the ranks are forked.

A clean helper process does the imports and the forking, because the caller (pytest, a notebook, an engine) may have threads,
and a fork of a process with threads can hang. The helper stays for later calls, so only the first one pays for the imports.
"""

from __future__ import annotations

import atexit
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class RankFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """A rank raised, died or ran out of time. The message holds the traceback of every rank that failed by itself."""


def run_ranks(
    function: Callable[..., Any],
    ranks: int,
    *args: Any,
    timeout: float = 300.0,
    preload: Sequence[str] = ("examples.support.tiny_model:import_megatron",),
    init_process_group: bool = True,
) -> list[Any]:
    """Call `function(*args)` in `ranks` processes and return what each returned, in rank order.

    `function` must be importable by name (no lambda, no closure); arguments and results are pickled on this machine only. The
    usual variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) are set. With `init_process_group` a gloo group on
    loopback is ready; without it a launcher such as vLLM's `external_launcher` may make its own at MASTER_PORT.
    `preload` names modules, or `module:function` to call, loaded once before forking.
    After `timeout` seconds, or when one rank fails, the others are ended. Raises RankFailed.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    if function.__module__ == "__main__":
        name = f"{_main_name()}:{function.__qualname__}"
    helper = _Helper.shared(tuple(preload))
    return helper.run(
        {"function": name, "ranks": ranks, "args": args, "timeout": timeout, "init": init_process_group, "path": sys.path}
    )


def _main_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name:
        return str(spec.name)
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        raise ValueError("run_ranks needs a function of a module; put it into a file")
    path = Path(file).resolve()
    if path.is_relative_to(ROOT):
        return ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return str(path)


class _Helper:
    """The parent's end of the process that imports once and forks."""

    _shared: dict[tuple[str, ...], _Helper] = {}  # noqa: RUF012 - one registry for the process

    def __init__(self, preload: tuple[str, ...]) -> None:
        request, self._request = os.pipe()
        self._reply, reply = os.pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        paths = [str(ROOT), *(p for p in sys.path if p)]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
        code = "from examples.support.launch import serve; import sys; serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(request), str(reply), *preload],
            pass_fds=(request, reply),
            env=environment,
        )
        os.close(request)
        os.close(reply)
        atexit.register(self.close)

    @classmethod
    def shared(cls, preload: tuple[str, ...]) -> _Helper:
        helper = cls._shared.get(preload)
        if helper is None or helper._process.poll() is not None:
            helper = cls._shared[preload] = cls(preload)
        return helper

    def run(self, job: dict[str, Any]) -> list[Any]:
        try:
            _send(self._request, job)
            reply = _receive(self._reply)
        except (BrokenPipeError, EOFError) as error:
            raise RankFailed("the process that forks the ranks died; its output is above") from error
        except BaseException:
            # The caller was interrupted with a job under way: a later reply would be taken for the next job's.
            self.close()
            raise
        if "failed" in reply:
            raise RankFailed(reply["failed"])
        results: list[Any] = reply["results"]
        return results

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(30)
        for end in (self._request, self._reply):
            try:
                os.close(end)
            except OSError:
                continue


def serve(request: int, reply: int, preload: Sequence[str]) -> None:
    """The helper's loop: import `preload`, then one set of forked ranks for each job."""
    signal.signal(signal.SIGTERM, _end_on_signal)
    os.set_inheritable(request, False)
    os.set_inheritable(reply, False)
    import torch

    torch.set_num_threads(1)
    for item in preload:
        target = load(item)
        if ":" in item:
            target()
    while True:
        try:
            job = _receive(request)
        except EOFError:
            return
        _send(reply, _run_job(job, (request, reply)))


def import_engine() -> None:
    """Import vLLM (5 to 10 s) for engines that live in the ranks themselves; give it as a `preload` item.

    vLLM names the shared memory of a CPU engine by its launcher, the same name in every run, and leaves the files behind. Here
    the name carries the port of this set of ranks, so that runs don't meet, and `run_ranks` removes the files.
    """
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1")
    import vllm  # noqa: F401
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    def group_name(communicator: Any) -> str:
        members = "-".join(str(rank) for rank in communicator.ranks)
        return f"{engine_memory_name(int(os.environ['MASTER_PORT']))}-{communicator.unique_name}-[{members}]-cpushm"

    _CPUSHMDistributed.make_group_name = staticmethod(group_name)


def engine_memory_name(port: int) -> str:
    return f"ranks-{os.getuid()}-{port}"


_children: dict[int, int] = {}
"""pid -> rank of ranks that run now."""


def _end_on_signal(*_: Any) -> None:
    for pid in _children:
        _kill_group(pid)
    os._exit(1)


def _run_job(job: dict[str, Any], pipes: tuple[int, int]) -> dict[str, Any]:
    import torch.distributed as dist

    ranks, deadline = job["ranks"], time.monotonic() + job["timeout"]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        # All ranks are forked before the store exists: its thread asks for host names while ranks connect, and a rank forked in
        # such a moment would inherit the C library's lock for that, held for ever.
        gates = []
        for rank in range(ranks):
            sys.stdout.flush()
            sys.stderr.flush()
            gate, opener = os.pipe()
            pid = os.fork()
            if pid == 0:
                for end in (*pipes, opener, *gates):
                    os.close(end)
                (port,) = struct.unpack("<Q", _read(gate, 8))
                os.close(gate)
                _be_rank(job, rank, port, Path(folder))
            os.close(gate)
            gates.append(opener)
            _children[pid] = rank
        # The store is the rendezvous itself, bound here with a port of the kernel's choice: no gap in which another takes it.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=job["timeout"]))
        for opener in gates:
            os.write(opener, struct.pack("<Q", store.port))
            os.close(opener)
        failed = _wait_for_ranks(deadline, job["timeout"], caller=pipes[0])
        for pid, rank in list(_children.items()):
            failed.setdefault(rank, "ended, because another rank failed or time ran out")
            _kill_group(pid)
            os.waitpid(pid, 0)
            del _children[pid]
        outcome = [_read_outcome(Path(folder) / str(rank)) for rank in range(ranks)]
    for leftover in Path("/dev/shm").glob(f"*{engine_memory_name(store.port)}*"):
        leftover.unlink()
    own = [f"rank {rank} of {ranks}:\n{text}" for rank, (ok, text) in enumerate(outcome) if ok is False]
    if own or failed:
        rest = [f"rank {rank} of {ranks}: {why}" for rank, why in sorted(failed.items()) if outcome[rank][0] is None]
        return {"failed": "\n".join([f"{job['function']} failed", *own, *rest])}
    return {"results": [result for _, result in outcome]}


def _wait_for_ranks(deadline: float, timeout: float, caller: int) -> dict[int, str]:
    """Wait until all ranks are gone, one failed, time is up, or the caller is gone. Returns rank -> why, of those not well."""
    failed: dict[int, str] = {}
    grace: float | None = None
    hang_up = select.poll()
    hang_up.register(caller, select.POLLHUP)
    while _children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if pid == 0:
            if any(event & select.POLLHUP for _, event in hang_up.poll(0)):
                return failed | dict.fromkeys(_children.values(), "the caller is gone")
            if now > deadline:
                return failed | dict.fromkeys(_children.values(), f"not done after {timeout:g} s")
            # Others often fail of the same cause within moments; their tracebacks help.
            if grace is not None and now > grace:
                return failed
            time.sleep(0.005)
        elif pid in _children:
            rank = _children.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            if code != 0:
                failed[rank] = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                grace = grace or now + 2.0
    return failed


def _kill_group(pid: int) -> None:
    """A rank leads its own process group, so that what it started goes with it."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def _be_rank(job: dict[str, Any], rank: int, port: int, folder: Path) -> None:
    """The forked child's whole life; never returns."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sys.path.extend(entry for entry in job["path"] if entry not in sys.path)
        ranks = str(job["ranks"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
        # torchrun's own variable: the store exists already, so no rank may try to become its server.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if job["init"]:
            import torch.distributed as dist

            dist.init_process_group("gloo", timeout=timedelta(seconds=job["timeout"]))
        payload: tuple[bool, Any] = (True, load(job["function"])(*job["args"]))
        blob = pickle.dumps(payload)
        status = 0
    except BaseException:  # noqa: BLE001 - the traceback goes to the caller, whatever it is
        blob = pickle.dumps((False, traceback.format_exc()))
    (folder / f"{rank}.part").write_bytes(blob)
    (folder / f"{rank}.part").rename(folder / str(rank))
    sys.stdout.flush()
    sys.stderr.flush()
    # Others may still read what this rank serves, such as a store. Where one fails, the parent ends all.
    while status == 0 and not all((folder / other).exists() for other in map(str, range(job["ranks"]))):
        time.sleep(0.005)
    # Not sys.exit: the parent's exit handlers and threads of gloo are no business of this process.
    os._exit(status)


def _read_outcome(path: Path) -> tuple[bool | None, Any]:
    if not path.exists():
        return None, None
    outcome: tuple[bool, Any] = pickle.loads(path.read_bytes())
    return outcome


def load(name: str) -> Any:
    """The module or the function that `module`, `module:qualname` or `/path/file.py:qualname` names."""
    import importlib
    import importlib.util

    module_name, _, qualname = name.partition(":")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
        assert spec is not None
        assert spec.loader is not None
        target: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(target)
    else:
        target = importlib.import_module(module_name)
    for part in qualname.split(".") if qualname else ():
        target = getattr(target, part)
    return target


def _send(end: int, message: Any) -> None:
    blob = pickle.dumps(message)
    view = memoryview(struct.pack("<Q", len(blob)) + blob)
    while view:
        view = view[os.write(end, view) :]


def _receive(end: int) -> Any:
    (size,) = struct.unpack("<Q", _read(end, 8))
    return pickle.loads(_read(end, size))


def _read(end: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = os.read(end, size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
