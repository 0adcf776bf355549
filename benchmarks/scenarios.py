"""What versions are for, as seven scenarios on real engines and trainer ranks in processes of one CPU machine.

    python benchmarks/scenarios.py                       # all, some minutes on two cores
    python benchmarks/scenarios.py partial straggler     # some

ep-filter, tp-slice, mixed-sharding and partial are about bytes; elastic, straggler and fan-out about who waits for whom. Bytes
are counted at the copies themselves (`fleet_engine.Meter`), by the memory that they come out of and by the rank where they come
to lie, and compared with each other, with the product's reports, with the plan, and with the sizes in the checkpoint's file.
Engines begin with the very weights that are published, so they are their own fresh engines: what they hold and answer is noted,
every weight is changed, and after the take each byte and token must be back.

Writes a JSON file a scenario: metrics, assertions (name, observed, expected, held), status. A scenario without assertions fails.
Exits with 1 when one failed; what was skipped is printed with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import platform
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import msgspec
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script, from any folder

from benchmarks.fleet import ENGINES, OTHER, Engine, Fleet, Trainer
from benchmarks.scenario_record import Record, check_bytes, check_fresh, check_spoilt, show, sources
from examples.support.processes import stopped
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.core.messages import TakeReply
from vllm_refit_ext.core.part import layers

ROUNDS = 15
"""Takes of each engine whose median counts."""


class Skipped(Exception):  # noqa: N818 - what it is
    """Why a scenario can't run here."""


def take_spoilt(record: Record, fleet: Fleet, kind: str, ep: int) -> tuple[Trainer, Engine]:
    """Publish, spoil an engine, let it take, and compare everything."""
    trainer, (engine,) = fleet.trainer(ep), fleet.engines(kind, 1)
    version = fleet.version()
    trainer.publish(version)
    check_spoilt(record, fleet, kind, engine)
    engine.arm()
    replies = engine.take(version, trainer.registry)
    record.equal("every engine rank serves the version", [r.version for r in replies], [version] * ENGINES[kind][0])
    check_bytes(record, trainer, engine, replies, [sum(p.values()) for p in engine.call("scenario_planned")])
    check_fresh(record, engine, fleet.fresh[kind, 1.0])
    record.metrics["seconds of rank 0 by phase"] = replies[0].seconds
    return trainer, engine


def ep_filter(record: Record, fleet: Fleet) -> None:
    """An engine rank of expert parallelism gets its own experts and no others."""
    trainer, engine = take_spoilt(record, fleet, "tp2-ep2", 2)
    trainer.publish(fleet.version(), part=["*.experts.*"])
    engine.arm()
    replies = engine.take("latest", trainer.registry)
    share = fleet.nbytes(1, r"\.experts\.") // 2
    check_bytes(record, trainer, engine, replies, [share] * 2)
    record.equal("bytes of experts that each rank got", [written for _, written in engine.counted()], [share] * 2)


def tp_slice(record: Record, fleet: Fleet) -> None:
    """An engine rank of tensor parallelism gets its slices."""
    _, engine = take_spoilt(record, fleet, "tp2", 2)
    for rank, (_, written) in enumerate(engine.counted()):
        record.within(f"bytes of rank {rank} are its slices in the checkpoint", written, fleet.nbytes(2))


def mixed_sharding(record: Record, fleet: Fleet) -> None:
    """Trainer and engine cut differently: EP4 to TP1, EP8 to TP2, EP2 to TP2 with EP2."""
    for ep, kind in ((4, "tp1"), (8, "tp2"), (2, "tp2-ep2")):
        trainer, engine = take_spoilt(record, fleet, kind, ep)
        ranks = ENGINES[kind][0]
        wanted = [fleet.nbytes(ranks)] * ranks
        record.equal(f"EP{ep} to {kind}: bytes by engine rank", [written for _, written in engine.counted()], wanted)
        used = sources(trainer, [], sum((read for read, _ in engine.counted()), Counter[str]()))
        record.equal(f"EP{ep} to {kind}: trainer ranks that gave something", len(used), ep)


def partial(record: Record, fleet: Fleet) -> None:
    """A part of the weights travels, and everything else stays bit for bit."""
    trainer, engine = take_spoilt(record, fleet, "tp1", 2)
    fleet.engines("tp1", 2)  # the second one says what the other checkpoint's weights are
    trainer.publish(fleet.version(), OTHER, part=layers(0))
    engine.arm()
    replies = engine.take("latest", trainer.registry)
    part = fleet.nbytes(1, r"\.layers\.0\.")
    check_bytes(record, trainer, engine, replies, [part])
    ((_, written),) = engine.counted()
    record.equal("bytes received are the part's", written, part)
    record.less("and fewer than all", written, fleet.nbytes() - 1)
    (mine,), ((old, _), (new, _)) = engine.weights(), (fleet.fresh["tp1", f] for f in (1.0, OTHER))
    named = {n for n in mine if ".layers.0." in n}
    record.equal("tensors of the part that are not the new ones", sorted(n for n in named if mine[n] != new[0][n]), [])
    record.equal("other tensors that changed", sorted(n for n in mine.keys() - named if mine[n] != old[0][n]), [])
    trainer.publish(fleet.version())
    engine.take("latest", trainer.registry)
    check_fresh(record, engine, fleet.fresh["tp1", 1.0])


def elastic(record: Record, fleet: Fleet) -> None:
    """A late engine joins without a call of the trainer, all of whose ranks but the first, which serves the registry, are
    stopped."""
    trainer, early = fleet.trainer(4), fleet.engines("tp1", 2)
    version = fleet.version()
    trainer.publish(version)
    for engine in early:
        engine.take(version, trainer.registry)
    finished, calls = time.monotonic(), trainer.calls
    for pid in trainer.pids[1:]:
        os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        late = fleet.engines("tp1", 3)[2]
        record.metrics["seconds to start the late engine"] = time.monotonic() - begin
        record.equal("the early engines were done before the late one started", finished < begin, True)
        check_spoilt(record, fleet, "tp1", late)
        late.arm()
        begin = time.monotonic()
        replies = late.take("latest", trainer.registry)
        record.metrics["seconds of the late engine's take"] = time.monotonic() - begin
        check_bytes(record, trainer, late, replies, [fleet.nbytes()], early)
        for engine in (*early, late):
            check_fresh(record, engine, fleet.fresh["tp1", 1.0])
        record.equal("calls of the trainer meanwhile", trainer.calls - calls, 0)
        record.equal("the version that all serve", sorted({e.status()[0].version for e in (*early, late)}), [version])
    finally:
        for pid in trainer.pids[1:]:
            os.kill(pid, signal.SIGCONT)


def straggler(record: Record, fleet: Fleet) -> None:
    """One engine is stopped in the middle of its take; the others take and serve version after version."""
    trainer, (slow, *healthy) = fleet.trainer(2), fleet.engines("tp1", 4)
    for name in ("nobody stopped", "one engine stopped"):
        outcome: list[BaseException | None] = []
        if name == "one engine stopped":
            trainer.publish(fleet.version())
            slow.arm("stop")
            thread = start(lambda: slow.take("latest", trainer.registry), outcome)
            record.equal("an engine is stopped in the middle of its take", stopped(slow.pids[0]), True)
            begin = time.monotonic()
            revoked = trainer.tell("close_publication", 0.5)[0]
            record.metrics["seconds that its lease cost the trainer, whose deadline is 0.5"] = time.monotonic() - begin
            record.equal("leases that were revoked", len(revoked), 1)
        times = rounds(record, fleet, trainer, healthy)
        each = [statistics.median(mine) for mine in times]
        record.metrics[f"{name}: median seconds of a take, by engine"] = each
        record.metrics[f"{name}: slowest take in seconds"] = max(map(max, times))
        if name == "one engine stopped":
            record.equal("it is still stopped", stopped(slow.pids[0], 0.1), True)
            slow.signal(signal.SIGCONT)
            thread.join(60.0)
            record.less("slowest healthy engine over the median of the healthy", max(each) / statistics.median(each), 1.25)
            record.equal("what the stopped engine found", [type(e).__name__ for e in outcome], ["SessionError"])
    slow.take("latest", trainer.registry)
    check_fresh(record, slow, fleet.fresh["tp1", OTHER if ROUNDS % 2 else 1.0])


def rounds(record: Record, fleet: Fleet, trainer: Trainer, engines: Sequence[Engine]) -> list[list[float]]:
    """Versions of both checkpoints in turns; every engine takes each and serves it. Seconds by engine."""
    times: list[list[float]] = [[] for _ in engines]
    wrong: list[str] = []
    for i in range(ROUNDS):
        factor, version = (OTHER, 1.0)[i % 2], fleet.version()
        trainer.publish(version, factor)
        for mine, engine in zip(times, engines, strict=True):
            begin = time.perf_counter()
            engine.take(version, trainer.registry)
            mine.append(time.perf_counter() - begin)
        if i < 2:
            wrong += [e.name for e in engines if e.answers() != fleet.fresh["tp1", factor][1]]
    record.equal("healthy engines that do not answer as fresh ones of the version", wrong, [])
    return times


def fan_out(record: Record, fleet: Fleet) -> None:
    """Three engines take at once from four trainer ranks, each of which gives the same."""
    trainer, engines = fleet.trainer(4), fleet.engines("tp1", 3)
    trainer.publish(fleet.version())
    egress = take_at_once(record, fleet, trainer, engines)
    record.metrics["bytes out of each trainer rank"] = dict(sorted(egress.items()))
    record.equal("bytes out of all trainer ranks", sum(egress.values()), 3 * fleet.nbytes())
    record.equal("trainer ranks that gave something", len(egress), 4)
    record.less("the most that a trainer rank gave over the least", max(egress.values()) / min(egress.values()), 1.05)


def take_at_once(record: Record, fleet: Fleet, trainer: Trainer, engines: Sequence[Engine], serve: str = "") -> Counter[str]:
    """All spoilt engines take the latest version together. serve: as in `EngineClient.take`. Returns bytes by source."""
    for engine in engines:
        check_spoilt(record, fleet, "tp1", engine)
        engine.arm()
    replies: dict[str, list[TakeReply]] = {}
    handing_on = {"serve": serve} if serve else {}

    def take(engine: Engine) -> None:
        replies[engine.name] = engine.take("latest", trainer.registry, **handing_on)

    outcomes: list[BaseException | None] = []
    threads = [start(functools.partial(take, engine), outcomes) for engine in engines]
    for thread in threads:
        thread.join(120.0)
    record.equal("takes that failed", [str(e) for e in outcomes if e], [])
    egress = Counter[str]()
    for engine in engines:
        egress += check_bytes(record, trainer, engine, replies[engine.name], [fleet.nbytes()], engines)
        check_fresh(record, engine, fleet.fresh["tp1", 1.0])
    return egress


def replicas(record: Record, fleet: Fleet) -> None:
    """Engines hand on what they have: to a late one when the trainer has none, to each other, and past one that dies."""
    if "serve" not in inspect.signature(Engine.take).parameters:
        raise Skipped("engines of this version do not hand on what they have")
    trainer, engines = fleet.trainer(4), fleet.engines("tp1", 3)
    parent, other, child = engines
    version = fleet.version()
    trainer.publish(version)
    parent.take(version, trainer.registry, serve="shm")
    trainer.tell("close_publication", 5.0)
    check_spoilt(record, fleet, "tp1", other)
    other.arm()
    by_source = check_bytes(record, trainer, other, other.take(version, trainer.registry, serve="shm"), [fleet.nbytes()], engines)
    record.equal(
        "a late engine's bytes, the trainer having closed the version", dict(by_source), {"tp1-0 rank 0": fleet.nbytes()}
    )
    check_fresh(record, other, fleet.fresh["tp1", 1.0])

    check_spoilt(record, fleet, "tp1", child)
    child.arm("slow", 3.0)
    outcomes: list[BaseException | None] = []
    replies: dict[str, list[TakeReply]] = {}
    begin = time.monotonic()
    thread = start(lambda: replies.update(child=child.take(version, trainer.registry)), outcomes)
    time.sleep(1.0)
    parent.close()
    thread.join(120.0)
    record.metrics["seconds of a take whose parent died, 3 of which it slept"] = time.monotonic() - begin
    record.equal("takes that failed as the parent died", [str(e) for e in outcomes if e], [])
    check_fresh(record, child, fleet.fresh["tp1", 1.0])

    engines = fleet.engines("tp1", 3)
    version = fleet.version()
    trainer.publish(version)
    egress = take_at_once(record, fleet, trainer, engines, "shm")
    given = {source: n for source, n in egress.items() if source.startswith("trainer")}
    record.equal("bytes out of all trainer ranks for three engines that hand on", sum(given.values()), fleet.nbytes())


def start(work: Callable[[], Any], outcomes: list[BaseException | None]) -> threading.Thread:
    """Run in a thread; what it raised, or None, is added to `outcomes`."""

    def run() -> None:
        try:
            work()
            outcomes.append(None)
        except RefitError as error:
            outcomes.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


SCENARIOS: dict[str, Callable[[Record, Fleet], None]] = {
    "partial": partial,
    "ep-filter": ep_filter,
    "tp-slice": tp_slice,
    "mixed-sharding": mixed_sharding,
    "elastic": elastic,
    "fan-out": fan_out,
    "straggler": straggler,
    "replicas": replicas,
}


def run(names: Sequence[str], out: Path, note: str = "") -> list[Record]:
    """Run scenarios, and write a file of each to `out`."""
    import vllm

    out.mkdir(parents=True, exist_ok=True)
    machine = {"cpu cores": len(os.sched_getaffinity(0)), "torch": str(torch.__version__), "vllm": vllm.__version__}
    machine |= {"python": platform.python_version(), "note": note}
    records = []
    with contextlib.closing(Fleet(out)) as fleet:
        for name in names:
            record = Record(name, machine=machine | {"load before": os.getloadavg()[0]})
            begin = time.monotonic()
            try:
                SCENARIOS[name](record, fleet)
                record.status = "passed" if record.assertions and all(a.held for a in record.assertions) else "failed"
            except Skipped as reason:
                record.status, record.reason = "skipped", str(reason)
            except Exception:  # noqa: BLE001 - the others run all the same, and this one has failed
                record.status, record.reason = "failed", traceback.format_exc()
            record.seconds = time.monotonic() - begin
            (out / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
            show(record)
            records.append(record)
    return records


app = cyclopts.App(help=(__doc__ or "").partition("\n")[0])


@app.default
def main(
    *names: Annotated[str, cyclopts.Parameter(help="scenarios; all without any")],
    out: Path = Path("out/scenarios"),
    note: str = "",
) -> None:
    """Run scenarios.

    Parameters
    ----------
    out: folder for the JSON files and the models.
    note: of the machine, for the files.
    """
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise SystemExit(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    records = run(names or list(SCENARIOS), out.resolve(), note)
    sys.exit(any(record.status == "failed" for record in records))


if __name__ == "__main__":
    app()
