"""Engines' processes are forked from a process that has imported vLLM and done nothing else.

An import of vLLM takes some 9 s of a core, an engine of two ranks has three processes, and vLLM spawns each anew on a CPU, since
OpenMP's threads don't survive a fork. Tests run with one thread. What a test's own process holds (threads, process groups) would
not survive a fork either, so Python's fork server forks for it, which `start_server` begins while the process is new.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from multiprocessing import forkserver
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any

import torch

_server = False
"""Whether this process has a fork server."""
_forked = False
"""Whether this process comes from one: it was new a moment ago, and forks by itself."""


class Process(ForkServerProcess):
    """A process with the environment of the one that asked for it, and not with the server's."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._environment = dict(os.environ)

    def run(self) -> None:
        global _forked
        os.environ.clear()
        os.environ.update(self._environment)
        _forked = True
        super().run()


class Context(ForkServerContext):
    """Starts a `Process`."""

    Process = Process


def start_server() -> None:
    """Fork this process's fork server. To be called before there are threads.

    Not on a CPU without AVX-512: there a forked engine of two ranks answered with tokens that are not in its vocabulary, and a
    spawned one does not. Why was not found.
    """
    global _server
    if not torch.cpu._is_avx512_supported():
        return
    address = arbitrary_address("AF_UNIX")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive, keep = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(keep)
            try:
                forkserver.main(listener.fileno(), alive, [])
            finally:
                os._exit(0)
    os.close(alive)
    server: Any = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, keep, pid
    _server = True


def fork_engines() -> None:
    """Import vLLM, and have it start its processes here and in whatever is forked from here by a fork server, if there is one."""
    import vllm.utils.system_utils as utils
    import vllm.v1.engine.utils
    import vllm.v1.executor.multiproc_executor
    import vllm.v1.worker.cpu_worker
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

    original = utils.get_mp_context

    def context() -> BaseContext:
        if _forked:
            return multiprocessing.get_context("fork")
        return Context() if _server else original()

    for module in list(sys.modules.values()):
        if getattr(module, "get_mp_context", None) is original:
            module.get_mp_context = context  # type: ignore[attr-defined]
