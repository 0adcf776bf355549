"""Engines and trainers of the scenarios, real ones, each rank in a process of its own (`examples.support.processes`)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from examples.support import processes
from examples.support.tiny_model import save_model
from tests.support.engines import SETTINGS

OTHER = 1.5
"""Factor of the weights of the second checkpoint."""
CUT = re.compile(r"(embed_tokens|lm_head|[qkvo]_proj|experts\.\d+\.\w+_proj)\.weight$")
"""Checkpoint tensors that engine ranks cut among themselves; they hold all others whole."""
ENGINES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {}),
    "tp2-ep2": (2, {"enable_expert_parallel": True}),
}


class Engine(processes.Engine):
    """An engine of the scenarios. fresh: the weights' digests and the answers that it began with, those of a new engine of its
    checkpoint."""

    def __init__(self, name: str, folder: Path, ranks: int, **settings: Any) -> None:
        values = SETTINGS | {"seed": 0, "worker_extension_cls": "benchmarks.fleet_engine.ScenarioExtension"} | settings
        super().__init__(name, folder, "benchmarks.fleet_engine:questions", ranks, **values)
        self.fresh: tuple[Any, Any] = ((), ())

    def wait_until_up(self) -> None:
        super().wait_until_up()
        self.fresh = (self.weights(), self.answers())

    def answers(self) -> Any:
        """Greedy answers of rank 0; all ranks have the same."""
        return self.ask("answers")[0]

    def weights(self) -> list[dict[str, str]]:
        """Of each rank: sha256 by parameter."""
        return self.call("scenario_weights")

    def spoil(self) -> None:
        """Change every weight."""
        self.call("scenario_spoil")

    def arm(self, fault: str = "", slow_s: float = 0.0) -> None:
        """Count the next take, and let a fault happen in it."""
        self.call("scenario_arm", (fault, slow_s))

    def counted(self) -> list[tuple[Counter[str], int]]:
        """Of each rank's last counted take: bytes read by shared file, and bytes written."""
        return [(Counter(reply["read"]), reply["written"]) for reply in self.call("scenario_counted")]


class Trainer(processes.Trainer):
    """A trainer of `ep` Megatron ranks that cut the experts, prepared to publish."""

    def __init__(self, folder: Path, ep: int, **config: Any) -> None:
        super().__init__(ep, "benchmarks.fleet_trainer:Rank", str(folder), {"ep": ep}, config)
        described = self.tell("prepare")
        self.registry: str = described[0]["registry"]
        self.pids = [d["pid"] for d in described]

    def publish(self, version: str, factor: float = 1.0, retain: str = "snapshot", part: Sequence[str] = ()) -> dict[str, Any]:
        """Publish the checkpoint's weights times `factor`. Returns what rank 0 says of it."""
        first: dict[str, Any] = self.tell("publish", version, factor, retain, list(part))[0]
        return first


class Fleet:
    """The checkpoints, the engines that run, and the one trainer. fresh: of a kind of engine and a factor, what a new engine of
    these weights holds and answers."""

    def __init__(self, out: Path) -> None:
        self.folders = {1.0: save_model("qwen3_moe", out / "model", seed=1, vocab_size=384), OTHER: out / "other"}
        self.tensors: dict[str, torch.Tensor] = load_file(self.folders[1.0] / "model.safetensors")
        save_model("qwen3_moe", self.folders[OTHER], seed=1, vocab_size=384)
        scaled = {n: t * OTHER for n, t in self.tensors.items()}
        save_file(scaled, self.folders[OTHER] / "model.safetensors", metadata={"format": "pt"})
        self.fresh: dict[tuple[str, float], tuple[Any, Any]] = {}
        self._engines: dict[str, list[Engine]] = {}
        self._trainer: Trainer | None = None
        self._versions = 0

    def engines(self, kind: str, count: int) -> list[Engine]:
        """So many engines of a kind that are alive. Every second one began with the other checkpoint."""
        known = self._engines.get(kind, [])
        for engine in known:
            if not engine.alive:
                engine.close()
        mine = self._engines[kind] = [engine for engine in known if engine.alive]
        new = []
        while len(mine) < count:
            factor = (1.0, OTHER)[len(mine) % 2]
            ranks, settings = ENGINES[kind]
            mine.append(Engine(f"{kind}-{len(mine)}", self.folders[factor], ranks, **settings))
            new.append((mine[-1], factor))
        for engine, factor in new:
            engine.wait_until_up()
            self.fresh[kind, factor] = engine.fresh
        return mine[:count]

    def trainer(self, ep: int) -> Trainer:
        """A trainer of `ep` ranks that cut the experts; the one before ends."""
        if self._trainer is None or self._trainer.ranks != ep or not self._trainer.alive:
            if self._trainer is not None:
                self._trainer.close()
            self._trainer = Trainer(self.folders[1.0], ep, deadline_s=60.0)
        return self._trainer

    def version(self) -> str:
        self._versions += 1
        return f"v{self._versions}"

    def nbytes(self, ranks: int = 1, wanted: str = "") -> int:
        """Bytes of the checkpoint's tensors that one of `ranks` engine ranks needs, of those whose names match `wanted`."""
        return sum(t.nbytes // (ranks if CUT.search(n) else 1) for n, t in self.tensors.items() if re.search(wanted, n))

    def close(self) -> None:
        for engine in [e for engines in self._engines.values() for e in engines]:
            engine.close()
        if self._trainer is not None:
            self._trainer.close()
