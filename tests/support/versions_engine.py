"""A real engine in a process of its own that takes what its input says, for tests of several engines at once.

Input: lines of JSON, (version, registry, serve, seconds). Output: lines of JSON: what was answered, bytes by trainer rank and by
engine rank that they were copied of, and the answers to the prompts; or the error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.engines import ROOT

PLAIN = "tests.support.plain_cpu.PlainCpuExtension"


class VersionsEngine:
    """One such process. host: the host that it plays."""

    def __init__(self, folder: Path, host: str = "", extension: str = PLAIN, **settings: Any) -> None:
        environment = dict(os.environ) | {"VLLM_REFIT_HOST": "127.0.0.1"} | ({"VLLM_REFIT_HOSTID": host} if host else {})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.versions_engine", str(folder), extension, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
            process_group=0,
        )

    def ready(self) -> VersionsEngine:
        """Wait until it serves."""
        assert self.answer() == "ready"
        return self

    def take(self, version: str, registry: str, serve: str = "shm", seconds: float = 60.0) -> None:
        """Begin a take; `answer` waits for its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([version, registry, serve, seconds]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The next line of its output that is JSON."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("> "):
                return json.loads(line[2:])
        raise AssertionError("the engine has ended")

    def close(self) -> None:
        """End it, and the engine's own processes with it, which would live on."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def say(value: Any) -> None:
    """One line of output."""
    print("\n> " + json.dumps(value), flush=True)


def main(folder: str, extension: str, settings: str) -> None:
    """Serve and take."""
    from tests.support.engine_bridge import one_by_one
    from tests.support.engines import open_llm
    from vllm_refit_ext.client import LLMClient
    from vllm_refit_ext.core.errors import RefitError

    with open_llm(folder, extension=extension, in_process=True, **json.loads(settings)) as llm:
        client = LLMClient(llm)
        say("ready")
        for line in sys.stdin:
            version, registry, serve, seconds = json.loads(line)
            try:
                (reply,) = client.take(version, registry, deadline_s=seconds, serve=serve)
            except RefitError as error:
                say({"error": str(error), "state": client.status()[0].state})
                continue
            (status,) = client.status()
            assert status.last is not None
            say(
                {
                    "version": status.version,
                    "epoch": status.epoch,
                    "taken": reply.taken,
                    "replica": status.replica,
                    "received": status.last.received,
                    "forwarded": status.last.forwarded,
                    "seconds": status.last.seconds,
                    "answers": [dataclasses.astuple(a) for a in one_by_one(llm)],
                }
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
