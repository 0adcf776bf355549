"""200 versions by a real trainer while real engines take, stop, die and join at random: what they serve is one version, whole."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from benchmarks.fleet import OTHER, Engine, Fleet
from examples.support.processes import stopped
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.wires.registry import StoreRegistry

pytestmark = [pytest.mark.engine, pytest.mark.long]

VERSIONS = 200


def footprint(pid: int) -> tuple[int, int, int]:
    """Open files, shared files made, resident KiB of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    shared = len(list(Path("/dev/shm").glob(f"refit-*-{pid}-*")))
    return len(os.listdir(f"/proc/{pid}/fd")), shared, int(status.partition("VmRSS:")[2].split()[0])


def test_engines_come_and_go_for_200_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rng = random.Random(11)
    kills = sorted(rng.sample(range(20, VERSIONS), 3))
    with contextlib.closing(Fleet(tmp_path)) as fleet:
        trainer = fleet.trainer(2)
        engines = fleet.engines("tp1", 3)
        asleep: list[Engine] = []
        early: dict[int, tuple[int, int, int]] = {}
        served, refused = 0, 0
        for n in range(VERSIONS):
            factor = (1.0, OTHER)[rng.randrange(2)]
            trainer.publish(f"s{n}", factor)
            if n in kills:
                rng.choice([e for e in engines if e not in asleep]).close()
                engines = fleet.engines("tp1", 3)
                early.clear()
            if not asleep and rng.random() < 0.1:
                asleep = [rng.choice(engines)]
                asleep[0].signal(signal.SIGSTOP)
                assert stopped(asleep[0].pids[0])
            elif asleep and rng.random() < 0.3:
                asleep.pop().signal(signal.SIGCONT)
            for engine in engines:
                if engine in asleep or rng.random() < 0.3:
                    continue
                try:
                    (reply,) = engine.take("latest", trainer.registry)
                except RefitError:
                    refused += 1
                    continue
                assert (reply.taken, reply.version) == (True, f"s{n}")
                served += 1
                if rng.random() < 0.1:
                    assert engine.answers() == fleet.fresh["tp1", factor][1], f"{engine.name} does not serve s{n}"
                    assert engine.weights() == fleet.fresh["tp1", factor][0], f"{engine.name} mixes versions at s{n}"
            if not early and n >= kills[-1] + 5:
                early = {pid: footprint(pid) for pid in (*trainer.pids, *(e.pids[0] for e in engines))}
        for engine in asleep:
            engine.signal(signal.SIGCONT)
        assert refused == 0
        assert served > VERSIONS
        late = {pid: footprint(pid) for pid in early}
        assert trainer.tell("close_publication", 5.0)[0] == []
        registry = StoreRegistry(trainer.registry)
        assert registry.entries(time.monotonic() + 20.0) == []
        assert early
        for pid, before in early.items():
            assert late[pid][0] <= before[0] + 2, (before, late[pid])
            assert late[pid][1] == before[1], (before, late[pid])
            assert late[pid][2] <= before[2] + (48 << 10), (before, late[pid])
