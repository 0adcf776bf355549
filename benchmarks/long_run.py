"""Many pushes and takes into a CPU engine with requests in flight, engine and trainer restarted at random: what grows.

    python benchmarks/long_run.py [--rounds 1000] [--seed 0] [--out FOLDER]

Each round changes the weights and hands them on: by a push, or by a publication that the engine takes, as the seed says. Now and
then the sender or the engine is closed and made anew. After every round it is counted, over this process and the engine's: open
descriptors, threads, resident memory (MiB), files of ours in /dev/shm, keys of the sender's store. Ends with `verify`. Writes
long-run.json and long-run.png, and exits with 1 where a count grew in the life of an engine and its sender, or
no life was long enough to tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cyclopts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script, from any folder

from benchmarks.refit_cpu import SETTINGS, weights_of
from examples.support.tiny_model import save_model
from vllm_refit_ext.client import AsyncLLMClient
from vllm_refit_ext.sender import DTensorSource, RefitSender, SenderConfig
from vllm_refit_ext.wires.rendezvous import Store
from vllm_refit_ext.wires.shared_file import FOLDER

WARM = 10
"""Rounds of an engine or a sender before its counts are compared: caches and pools fill meanwhile."""
SPARE = {"descriptors": 4, "threads": 4, "resident": 64, "shared": 0, "keys": 0}
"""How much more a count may be in the last third of a life than in the first, of those that requests in flight move."""


class Engine:
    """An `AsyncLLM` whose loop runs in a thread, with requests that never end."""

    def __init__(self, folder: Path) -> None:
        self._loop, self._done, self._requests = asyncio.new_event_loop(), False, list[Any]()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._engine = self._wait(self._start(folder))
        self.client = AsyncLLMClient(self._engine, self._loop)

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(300)

    async def _start(self, folder: Path) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(folder), max_num_seqs=8, **SETTINGS))
        self._requests = [asyncio.create_task(self._ask(engine, n)) for n in range(3)]
        return engine

    async def _ask(self, engine: Any, number: int) -> None:
        from vllm import SamplingParams

        turn = 0
        while not self._done:
            async for _ in engine.generate("some words", SamplingParams(max_tokens=200, ignore_eos=True), f"{number}-{turn}"):
                pass
            turn += 1

    def close(self) -> None:
        self._done = True

        async def end() -> None:
            await asyncio.gather(*self._requests)
            self._engine.shutdown()

        self._wait(end())
        self._loop.call_soon_threadsafe(self._loop.stop)


def tree() -> list[int]:
    """This process and all below it."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def counts(sender: RefitSender) -> dict[str, float]:
    """What is open and held now."""
    total = dict.fromkeys(SPARE, 0.0)
    for pid in tree():
        with contextlib.suppress(OSError):
            total["descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
            total["threads"] += len(os.listdir(f"/proc/{pid}/task"))
            total["resident"] += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    total["shared"] = len(list(FOLDER.glob(f"refit-*-{os.getpid()}-*")))
    host, _, port = sender.registry.rpartition(":")
    total["keys"] = Store(host, int(port), time.monotonic() + 20).raw.num_keys()
    return total


def run(folder: Path, number: int, seed: int) -> Iterator[dict[str, Any]]:
    """What was counted after each round."""
    draw, weights = random.Random(seed), weights_of(folder)
    config = SenderConfig(wire="shm", registry_port=0, caches="reset_running", hash_reloaded=True, deadline_s=120.0)
    lives, age, engine, sender = -1, 0, None, None
    for turn in range(number):
        new_engine = engine is None or draw.random() < 4 / number
        if new_engine or draw.random() < 10 / number:
            if sender is not None:
                sender.close()
            if new_engine and engine is not None:
                engine.close()
            engine = Engine(folder) if new_engine or engine is None else engine
            sender = RefitSender(DTensorSource(weights), engine.client, config)
            sender.prepare()
            lives, age = lives + 1, 0
        assert engine is not None
        assert sender is not None
        for tensor in weights.values():
            tensor.mul_(1.0009765625 if turn % 2 else 1 / 1.0009765625)
        form = draw.choice(("push", "take"))
        begun = time.perf_counter()
        if form == "push":
            sender.refit(f"v{turn}")
        else:
            with sender.publish(f"v{turn}"):
                (reply,) = engine.client.take(f"v{turn}", sender.registry, 120.0, "reset_running")
                assert (reply.taken, reply.version) == (True, f"v{turn}")
        took, age = time.perf_counter() - begun, age + 1
        restarted = "engine" if age == 1 and new_engine else "sender" if age == 1 else ""
        yield {"round": turn, "form": form, "seconds": took, "life": lives, "restarted": restarted, **counts(sender)}
    assert engine is not None
    assert sender is not None
    sender.refit("last")
    print(f"verify: {sender.verify()} tensors equal")
    sender.close()
    engine.close()


def grown(rows: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """How many lives were long enough to be compared, and counts that are higher in the last third of one than in its first,
    beside the rounds in which it warms up."""
    compared, found = 0, []
    for life in {r["life"] for r in rows}:
        own = [r for r in rows if r["life"] == life][WARM:]
        third = len(own) // 3
        compared += third >= WARM
        for name, spare in SPARE.items() if third >= WARM else ():
            first, last = (max(r[name] for r in part) for part in (own[:third], own[-third:]))
            if last > first + spare:
                found.append(f"life {life}: {name} grew from {first:g} to {last:g}")
    return compared, found


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A curve for each count; lines where the engine (black) or the sender (gray) was restarted."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(SPARE) + 1, sharex=True, figsize=(8, 10), layout="constrained")
    for axis, name in zip(axes, [*SPARE, "seconds"], strict=True):
        axis.plot([r["round"] for r in rows], [r[name] for r in rows], linewidth=0.8)
        axis.set_ylabel({"resident": "MiB resident", "shared": "files in shm", "keys": "store keys"}.get(name, name))
        axis.set_ylim(bottom=0)
        for r in rows:
            if r["restarted"]:
                axis.axvline(r["round"], color="black" if r["restarted"] == "engine" else "0.7", linewidth=0.6)
    axes[-1].set_xlabel("round")
    figure.savefig(path, dpi=110)


def main(*, rounds: int = 1000, seed: int = 0, out: Path = Path("out/long-run")) -> int:
    """Run and write."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        rows = list(run(save_model("qwen3_moe", place, seed=5), rounds, seed))
    compared, problems = grown(rows)
    record = {
        "seed": seed,
        "rounds": len(rows),
        "compared": compared,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "grown": problems,
    }
    (out / "long-run.json").write_text(json.dumps(record | {"rows": rows}, indent=1))
    plot(rows, out / "long-run.png")
    print("\n".join(problems) or f"nothing grew in the {compared} life or lives of {len(rows)} rounds that could be compared")
    return int(bool(problems) or not compared)


if __name__ == "__main__":
    sys.exit(cyclopts.run(main))
