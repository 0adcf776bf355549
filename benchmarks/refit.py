"""One refit of a large model on one GPU, from the call to the commit, beside what an engine and a usual loop need for the same.

    python -m benchmarks.refit --model qwen3-30b-a3b

Trainer-format shards at full published shapes (synthetic weights) and a real vLLM engine (`load_format=dummy`) share one GPU.
For a BF16 and for an MXFP8 engine the run measures wires `ipc` and `ring`, MXFP8 quantised by the trainer, vLLM's own
IPC transfer, and a loop that gathers tensors of the checkpoint into a buffer and has the engine load them, layer by layer. The
ceiling is a device-to-device copy measured in the same run. Writes a table, a JSON record and a plot.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import torch
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script, from any folder

from benchmarks.shards import MODELS, Shards
from tests.support.loose_sender import LooseSender
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.core.coded import coding_of
from vllm_refit_ext.core.dtypes import ITEMSIZE
from vllm_refit_ext.core.plan import Plan
from vllm_refit_ext.sender.prequantize import Prequantised
from vllm_refit_ext.wires import cuda_ipc

COPY_BYTES = 8 << 30
"""Size of the copy that measures the ceiling."""


@Parameter(name="*")
@dataclass(frozen=True)
class Settings:
    """Settings of the run.

    Parameters
    ----------
    model: whose published shapes.
    layers: decoder layers; 0 means all.
    repeats: measured refits of each kind, after two that are not.
    baselines: measured runs of vLLM's transfer and of the loop, none of them before; 0 leaves them out.
    engines: which engines.
    out: folder for the record and the plot.
    """

    model: str = "qwen3-30b-a3b"
    layers: int = 0
    repeats: int = 10
    baselines: int = 2
    engines: tuple[str, ...] = ("bf16", "mxfp8")
    out: Path = Path("out/refit")


@dataclass
class Row:
    """One way of handing weights over. seconds: median from the call to the commit; worst: the slowest. phases: medians in
    seconds. moved: bytes read and written at least. share: of the time that a copy of as many bytes takes. trainer_bytes,
    engine_bytes: peak memory beyond weights."""

    engine: str
    way: str
    seconds: float
    worst: float
    phases: dict[str, float]
    wire_bytes: int
    moved: int
    gbytes_per_s: float
    share: float
    trainer_bytes: int
    engine_bytes: int
    launches: int


def copy_ceiling() -> float:
    """GB/s, read plus written, of a device-to-device copy: the median of nine."""
    a, b = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    a.zero_()
    found = []
    for _ in range(11):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        b.copy_(a)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    del a, b
    torch.cuda.empty_cache()
    return 2 * COPY_BYTES / statistics.median(found[2:]) / 1e9


def bytes_moved(plan: Plan) -> int:
    """What a plan reads and writes at least: each source element once, each target element once with its scales."""
    total = 0
    for t, s, n in zip(plan.target.tolist(), plan.source.tolist(), plan.nbytes.tolist(), strict=True):
        target, item = plan.targets[t], ITEMSIZE[plan.sources[s].dtype]
        coded = coding_of(target.layout)
        wide = ITEMSIZE[target.dtype] if not coded else (1 + 1 / 32 if target.dtype not in ("uint8", "float8_e4m3fn") else 1)
        total += n + int(n / item * wide)
    return total


class Bench:
    """One engine beside the shards."""

    def __init__(self, kind: str, folder: Path, shards: Shards, ceiling: float, settings: Settings) -> None:
        self.kind, self.shards, self.ceiling, self.settings = kind, shards, ceiling, settings
        from vllm import LLM

        self.llm = LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            attention_backend="TRITON_ATTN",
            gpu_memory_utilization=0.5,
            kv_cache_memory_bytes=256 << 20,
            max_model_len=256,
            max_num_seqs=4,
            worker_extension_cls="benchmarks.engine_probe.BenchExtension",
            weight_transfer_config={"backend": "ipc"},
            **({"quantization": "mxfp8"} if kind == "mxfp8" else {}),
        )
        self.client = LLMClient(self.llm)
        self.rows: list[Row] = []

    def ours(self, way: str, wire: str, quantise: bool = False) -> None:
        """Measure our own refit over a wire."""
        sender = LooseSender(self.client, {}, wire_name=wire, resident=True)
        sender.offer(self.shards.specs, self.shards.placements, self.shards.tensors)
        coded = None
        if quantise:
            names = sender.prepare({"prequantize": True})[0].quantise
            sender.close()
            coded = Prequantised(self.shards.specs, self.shards.placements, self.shards.tensors, names)
            sender.offer(coded.specs, coded.placements, coded.tensors)
        begin = time.perf_counter()
        reply = sender.prepare({"prequantize": quantise})[0]
        prepared = time.perf_counter() - begin
        assert not reply.reload, reply.reload
        assert sender.plan is not None
        before = self._reset()
        phases: list[dict[str, float]] = []
        launches = 0
        for i in range(self.settings.repeats + 2):
            begin = time.perf_counter()
            quantised = 0.0
            if coded is not None:
                coded.fill(self.shards.tensors)
                quantised = time.perf_counter() - begin
            report = sender.refit(f"{way}-{i}")[0]
            total = time.perf_counter() - begin
            launches = report.launches
            inside = sum(report.seconds.values())
            rest = total - inside - sender.seconds["publish"] - quantised
            found = {"total": total, "publish": sender.seconds["publish"], **report.seconds, "calls": rest}
            phases.append({"quantise": quantised, **found} if coded is not None else found)
        extra = coded.nbytes if coded is not None else 0
        self._add(way, phases[2:], sender.plan, before, launches, extra + int(getattr(sender._sender, "staging_bytes", 0)))
        print(f"{self.kind} {way}: prepare {prepared:.2f} s {reply.seconds}, first refit {phases[0]['total']:.2f} s", flush=True)
        sender.close()
        self.client.abort()

    def native(self) -> None:
        """Measure vLLM's own IPC transfer, packed, of tensors of the checkpoint."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerSendWeightsArgs, IPCWeightTransferEngine

        def send(info: Any) -> None:
            told = {k: v for k, v in vars(info).items() if v is not None}
            told["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(told.pop("ipc_handles"))).decode()
            self.client.call("update_weights", (told,), 300)

        def run() -> None:
            self.client.call("start_weight_update")
            arguments = IPCTrainerSendWeightsArgs(send_mode=send, packed=True)
            IPCWeightTransferEngine.trainer_send_weights(iter(self.shards.gathered()), arguments)
            self.client.call("finish_weight_update")

        self._measure_whole("vLLM's IPC transfer", run)

    def loop(self) -> None:
        """Measure gathering a layer's tensors into one buffer and loading them in the engine, layer after layer."""
        layerwise = self.kind == "mxfp8"
        tensors = self.shards.gathered()
        groups: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in tensors:
            groups.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else name, []).append((name, tensor))
        room = max(sum(t.nbytes for _, t in group) for group in groups.values())
        device = torch.device("cuda", 0)
        address = cuda_ipc.allocate(room, device)
        handle = base64.b64encode(cuda_ipc.export(address)).decode()
        ring = cuda_ipc.as_tensor(address, room, device)

        def run() -> None:
            self.client.call("bench_start", (layerwise,))
            for group in groups.values():
                entries, at = [], 0
                for name, tensor in group:
                    ring[at : at + tensor.nbytes].view(torch.bfloat16).view(tensor.shape).copy_(tensor)
                    entries.append([name, at, list(tensor.shape)])
                    at += tensor.nbytes
                torch.cuda.synchronize()
                self.client.call("bench_load", (handle, entries, layerwise), 300)
            self.client.call("bench_finish", (layerwise,))

        self._measure_whole("gather and load", run, room)

    def _measure_whole(self, way: str, run: Callable[[], None], extra: int = 0) -> None:
        before = self._reset()
        phases = []
        for _ in range(self.settings.baselines):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            phases.append({"total": time.perf_counter() - begin})
        self._add(way, phases, None, before, 0, extra)

    def _reset(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated(), self.client.call("bench_memory", (True,))[0]["now"]

    def _add(
        self, way: str, phases: list[dict[str, float]], plan: Plan | None, before: tuple[int, int], launches: int, extra: int
    ) -> None:
        totals = [p["total"] for p in phases]
        seconds = statistics.median(totals)
        wire_bytes = int(plan.nbytes.sum()) if plan is not None else self.shards.nbytes
        elements = self.shards.nbytes // 2
        moved = bytes_moved(plan) if plan is not None else int(elements * (4 if self.kind == "bf16" else 3 + 1 / 32))
        engine = self.client.call("bench_memory")[0]["peak"] - before[1]
        row = Row(
            engine=self.kind,
            way=way,
            seconds=seconds,
            worst=max(totals),
            phases={k: statistics.median(p[k] for p in phases) for k in phases[0] if k != "total"},
            wire_bytes=wire_bytes,
            moved=moved,
            gbytes_per_s=wire_bytes / seconds / 1e9,
            share=moved / self.ceiling / 1e9 / seconds,
            trainer_bytes=torch.cuda.max_memory_allocated() - before[0] + extra,
            engine_bytes=engine,
            launches=launches,
        )
        self.rows.append(row)
        print(json.dumps(vars(row)), flush=True)

    def close(self) -> None:
        """End the engine and wait for its memory."""
        self.llm.llm_engine.engine_core.shutdown()
        time.sleep(3)


def report(rows: list[Row], ceiling: float, console: Console) -> None:
    """Print the table."""
    table = Table(title=f"From the call to the commit; a device-to-device copy here: {ceiling:.0f} GB/s read and written")
    for column in (
        "engine",
        "way",
        "seconds",
        "worst",
        "GB/s",
        "share of the copy",
        "trainer extra",
        "engine extra",
        "launches",
        "phases, ms",
    ):
        table.add_column(column)
    for r in rows:
        phases = ", ".join(f"{k} {1e3 * v:.2f}" for k, v in r.phases.items())
        gib = [f"{b / 2**30:.2f} GiB" for b in (r.trainer_bytes, r.engine_bytes)]
        table.add_row(
            r.engine,
            r.way,
            f"{r.seconds:.4f}",
            f"{r.worst:.4f}",
            f"{r.gbytes_per_s:.0f}",
            f"{r.share:.2f}",
            *gib,
            str(r.launches),
            phases,
        )
    console.print(table)


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Seconds of every way, on a logarithmic axis, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1.5))
    labels = [f"{r.engine}: {r.way}" for r in rows]
    bars = axis.barh(labels, [r.seconds for r in rows], color=["tab:blue" if r.launches else "tab:gray" for r in rows])
    axis.bar_label(bars, [f"{1e3 * r.seconds:.0f} ms" for r in rows], padding=3)
    axis.set_xscale("log")
    axis.set_xlabel("seconds from the call to the commit")
    axis.invert_yaxis()
    axis.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(settings: Settings) -> int:
    """Measure everything and write it down."""
    os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    config = dict(MODELS[settings.model])
    config["num_hidden_layers"] = settings.layers or config["num_hidden_layers"]
    settings.out.mkdir(parents=True, exist_ok=True)
    folder = settings.out.resolve() / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    ceiling = copy_ceiling()
    print(f"copy ceiling {ceiling:.0f} GB/s", flush=True)
    shards = Shards(config, "cuda")
    print(f"shards: {len(shards.tensors)} buffers, {shards.nbytes / 1e9:.1f} GB", flush=True)
    rows: list[Row] = []
    failures: list[str] = []
    for kind in settings.engines:
        begin = time.perf_counter()
        bench = Bench(kind, folder, shards, ceiling, settings)
        print(f"{kind} engine after {time.perf_counter() - begin:.0f} s", flush=True)
        steps: list[tuple[str, Callable[[], None]]] = [
            ("ipc", lambda b=bench: b.ours("ipc", "ipc")),  # type: ignore[misc]
            ("ring", lambda b=bench: b.ours("ring", "ring")),  # type: ignore[misc]
        ]
        if kind == "mxfp8":
            steps.append(("quantised", lambda b=bench: b.ours("ipc, trainer quantises", "ipc", quantise=True)))  # type: ignore[misc]
        steps += [("loop", bench.loop), ("native", bench.native)] if settings.baselines else []
        for name, step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - the other ways are still worth their figures; the exit status tells
                failures.append(f"{kind} {name}: {type(error).__name__}: {error}")
                print(failures[-1][:3000], flush=True)
            torch.cuda.empty_cache()
            torch.cuda.ipc_collect()
        bench.close()
        rows += bench.rows
    record = {
        "model": settings.model,
        "layers": config["num_hidden_layers"],
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gbytes_per_s": ceiling,
        "rows": [vars(r) for r in rows],
        "failures": failures,
    }
    (settings.out / "refit.json").write_text(json.dumps(record, indent=1))
    report(rows, ceiling, Console(width=200))
    plot(rows, settings.out / "refit.png", f"{settings.model}, {config['num_hidden_layers']} layers, {record['gpu']}")
    return 1 if failures else 0


app = cyclopts.App(help=(__doc__ or "").partition("\n")[0])


@app.default
def cli(settings: Annotated[Settings | None, Parameter()] = None) -> None:
    """Run the benchmark."""
    sys.exit(main(settings or Settings()))


if __name__ == "__main__":
    app()
