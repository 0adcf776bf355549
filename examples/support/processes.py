"""Engines and trainers in processes of their own, which come, go, are stopped and are killed while others work.

vLLM and Megatron are imported once each, by processes that fork the ranks. An engine's ranks are asked over pipes; a trainer's
rank 0 over a socket, and all its ranks do what it was asked.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from examples.support.launch import ROOT, RankFailed, engine_memory_name, load, run_ranks
from vllm_refit_ext.client import EngineClient
from vllm_refit_ext.core.errors import DeadlineError, RefitError

START_S = 300.0
TRAINER_S = 1500.0
"""Most seconds that a trainer lives."""


class Engine(EngineClient):
    """An engine of `ranks` ranks, as a client of it. `wait_until_up` before anything else."""

    def __init__(self, name: str, folder: Path, questions: str, ranks: int = 1, **settings: Any) -> None:
        """Start it for the checkpoint in `folder`. questions: `module:function` that is called with the `LLM` and gives what
        `ask` may ask, by name; its module is imported once for all engines. settings: of vLLM's `LLM`.
        """
        self.name, self.ranks = name, ranks
        self._number, self._lock = 0, threading.Lock()
        port = free_port()
        self._memory = engine_memory_name(port)
        common = {"VLLM_REFIT_HOST": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        common |= {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(ranks)}
        if ranks > 1:
            settings |= {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": ranks}
        context = multiprocessing.get_context("forkserver")
        # Both are imported in the process that forks, in this order; its module search path is this variable's.
        context.set_forkserver_preload(["examples.support.processes_engine", questions.partition(":")[0]])
        self._pipes, self._processes = [], []
        with _environment({"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}):
            for rank in range(ranks):
                mine, theirs = context.Pipe()
                own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                arguments = (theirs, str(folder), questions, own, settings)
                process = context.Process(target=serve_engine, args=arguments, name=f"{name} rank {rank}")
                process.start()
                theirs.close()
                self._pipes.append(mine)
                self._processes.append(process)

    def wait_until_up(self) -> None:
        """Until it serves. Raises RefitError for one that does not start, DeadlineError."""
        self._answers(0, START_S)

    @property
    def alive(self) -> bool:
        """Whether all ranks' processes are."""
        return all(process.is_alive() for process in self._processes)

    @property
    def pids(self) -> list[int]:
        """Of the ranks."""
        return [process.pid or 0 for process in self._processes]

    def call(self, method: str, args: tuple[Any, ...] = (), timeout_s: float | None = None) -> list[Any]:
        return [reply for replies in self.ask("rpc", method, args, timeout_s=timeout_s or 120.0) for reply in replies]

    def ask(self, what: str, *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
        """What each rank answers. Raises DeadlineError, and RefitError for a rank that failed or is gone."""
        with self._lock:
            self._number += 1
            for pipe in self._pipes:
                with contextlib.suppress(BrokenPipeError):
                    _send(pipe, (self._number, what, arguments))
            return self._answers(self._number, timeout_s)

    def _answers(self, number: int, timeout_s: float) -> list[Any]:
        end, found = time.monotonic() + timeout_s, []
        for pipe in self._pipes:
            answered = -1
            while answered != number:  # what a stopped rank answers late is of an earlier question
                if not wait([pipe], max(0.0, end - time.monotonic())):
                    raise DeadlineError("it did not answer", where=f"engine {self.name}", wanted=f"within {timeout_s:g} s")
                try:
                    answered, good, result = _receive(pipe)
                except (EOFError, OSError):
                    raise RefitError("its process is gone", where=f"engine {self.name}") from None
            if not good:
                raise RefitError(f"it failed:\n{result}", where=f"engine {self.name}")
            found.append(result)
        return found

    def signal(self, number: int) -> None:
        """Send a signal to all ranks that live."""
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid or 0, number)

    def close(self) -> None:
        """End its processes, whatever they do, and what they left in shared memory."""
        for process in self._processes:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it does not lead its group yet
                    os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        for leftover in Path("/dev/shm").glob(f"*{self._memory}*"):
            leftover.unlink(missing_ok=True)


class Trainer:
    """A trainer of `ranks` Megatron ranks. calls: how often it was asked for something."""

    def __init__(self, ranks: int, make: str, *arguments: Any) -> None:
        """Start it. make: `module:class` that each rank makes one of, with `arguments`; `tell` calls its methods."""
        self.ranks, self.calls = ranks, 0
        self._folder = tempfile.TemporaryDirectory(prefix="trainer-")
        self._failed: RankFailed | None = None
        key, address = secrets.token_bytes(16), str(Path(self._folder.name) / "socket")
        with Listener(address, authkey=key) as listener:
            self._thread = threading.Thread(target=self._run, args=(address, key, make, arguments), daemon=True)
            self._thread.start()
            self._socket = listener.accept()

    def _run(self, *arguments: Any) -> None:
        try:
            run_ranks(serve_trainer, self.ranks, *arguments, timeout=TRAINER_S)
        except RankFailed as error:
            self._failed = error

    @property
    def alive(self) -> bool:
        """Whether its processes are."""
        return self._thread.is_alive()

    def tell(self, method: str, *arguments: Any, timeout_s: float = 300.0) -> list[Any]:
        """Call a method on all ranks; what each returned. Raises RefitError where one raised or is gone, DeadlineError."""
        self.calls += 1
        try:
            _send(self._socket, (method, arguments))
            if not self._socket.poll(timeout_s):
                raise DeadlineError("it did not answer", where=f"trainer, {method}", wanted=f"within {timeout_s:g} s")
            good, found = _receive(self._socket)
        except (EOFError, OSError):
            self._thread.join(10.0)
            raise RefitError("its processes are gone", where=f"trainer, {method}", got=self._failed) from None
        if not good:
            raise RefitError(f"it failed:\n{found}", where=f"trainer, {method}")
        results: list[Any] = found
        return results

    def close(self) -> None:
        """Let its ranks end."""
        self._socket.close()
        self._thread.join(60.0)
        self._folder.cleanup()


def serve_engine(pipe: Connection, folder: str, questions: str, environment: dict[str, str], settings: dict[str, Any]) -> None:
    """One engine rank's process: start vLLM and answer until the pipe closes. environment: set before it starts."""
    os.setpgid(0, 0)  # vLLM's own processes end with it
    os.environ.update(environment)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import torch
    from vllm import LLM

    torch.set_num_threads(1)
    work: dict[str, Any] = {}

    def start() -> None:
        llm = LLM(model=folder, **settings)
        work["rpc"] = lambda method, args: llm.collective_rpc(method, args=tuple(args))
        work.update(load(questions)(llm))

    work["start"] = start
    number, what, arguments = 0, "start", ()
    while True:
        try:
            _send(pipe, (number, True, work[what](*arguments)))
        except Exception:  # noqa: BLE001 - whoever asked gets it, whatever it is
            _send(pipe, (number, False, traceback.format_exc()))
        try:
            number, what, arguments = _receive(pipe)
        except EOFError:
            os._exit(0)


def serve_trainer(address: str, key: bytes, make: str, arguments: Sequence[Any]) -> None:
    """One trainer rank: do on all ranks what rank 0 is asked over its socket, until it closes; at the end `close`."""
    import torch.distributed as dist

    rank = load(make)(*arguments)
    asked = Client(address, authkey=key) if dist.get_rank() == 0 else None
    while True:
        request: list[Any] = [("close", ())]
        if asked is not None:
            with contextlib.suppress(EOFError):
                request = [_receive(asked)]
        dist.broadcast_object_list(request, 0)
        method, arguments = request[0]
        try:
            mine = (True, getattr(rank, method)(*arguments))
        except Exception:  # noqa: BLE001 - whoever asked gets it, whatever it is
            mine = (False, traceback.format_exc())
        if method == "close":
            return
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        if asked is not None:
            errors = [text for good, text in found if not good]
            _send(asked, (not errors, "\n".join(errors) if errors else [result for _, result in found]))


def stopped(pid: int, within_s: float = 60.0) -> bool:
    """Whether a process is stopped, or will be within so many seconds."""
    end = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.01)


def free_port() -> int:
    """A port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _send(end: Connection, value: Any) -> None:
    # Not by `send`, which would hand over tensors as memory of a process that may be killed before they are read.
    end.send_bytes(pickle.dumps(value))


def _receive(end: Connection) -> Any:
    return pickle.loads(end.recv_bytes())


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
