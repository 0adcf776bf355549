"""How long others take to hand the same weights to the same engine on one GPU: the bars beside ours in the README's plot.

    python benchmarks/peers.py --engine bf16

Weights of the published shapes lie on the GPU, whole and in the checkpoint's names, as these ways want them; what a trainer
needs to gather its shards into that form is not counted. Measured are vLLM's own IPC transfer, a loop that packs a layer into a
buffer and has the engine load it, checkpoint-engine's worker fed from the device (not from the host, as its server does), and
the install step of ModelExpress' reshard receiver, from buffers that are in the engine already (no wire). What a package lacks
or refuses is a row with its error. The ceiling is a device-to-device copy in the same run.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import torch
from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script, from any folder

from benchmarks.shards import MODELS, Shards
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.wires import cuda_ipc

COPY_BYTES = 8 << 30
"""Size of the copy that measures the ceiling."""
BUCKET_BYTES = 2 << 30
"""checkpoint-engine's bucket; it has two of them."""


@Parameter(name="*")
@dataclass(frozen=True)
class Settings:
    """Settings of the run.

    Parameters
    ----------
    model: whose published shapes.
    layers: decoder layers; 0 means all.
    engine: bf16 or mxfp8.
    repeats: runs of each way; the fastest is what the record calls `seconds`.
    out: folder for the record.
    """

    model: str = "qwen3-30b-a3b"
    layers: int = 0
    engine: str = "bf16"
    repeats: int = 2
    out: Path = Path("out/peers")


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


class Peers:
    """One engine, the weights, and a method for each way."""

    def __init__(self, folder: Path, settings: Settings, config: dict[str, Any]) -> None:
        from vllm import LLM

        self.layerwise = settings.engine == "mxfp8"
        self.tensors = Shards(config, "cuda").gathered()
        self.nbytes = sum(t.nbytes for _, t in self.tensors)
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
            **({"quantization": "mxfp8"} if self.layerwise else {}),
        )
        self.client = LLMClient(self.llm)

    @cached_property
    def groups(self) -> list[list[tuple[str, torch.Tensor]]]:
        """The tensors, a list for each layer."""
        found: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in self.tensors:
            found.setdefault(".".join(name.split(".")[:3]) if ".layers." in name else name, []).append((name, tensor))
        return list(found.values())

    @cached_property
    def buffer(self) -> tuple[str, torch.Tensor]:
        """Room for the largest layer, and its handle."""
        device = torch.device("cuda", 0)
        room = max(sum(t.nbytes for _, t in group) for group in self.groups)
        address = cuda_ipc.allocate(room, device)
        return base64.b64encode(cuda_ipc.export(address)).decode(), cuda_ipc.as_tensor(address, room, device)

    def loop(self) -> None:
        """Pack a layer into one buffer, load it in the engine, layer after layer."""
        handle, buffer = self.buffer
        self.client.call("bench_start", (self.layerwise,))
        for group in self.groups:
            entries, at = [], 0
            for name, tensor in group:
                buffer[at : at + tensor.nbytes].view(torch.bfloat16).view(tensor.shape).copy_(tensor)
                entries.append([name, at, list(tensor.shape)])
                at += tensor.nbytes
            torch.cuda.synchronize()
            self.client.call("bench_load", (handle, entries, self.layerwise), 300)
        self.client.call("bench_finish", (self.layerwise,))

    def native(self) -> None:
        """vLLM's own IPC transfer, packed."""
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerSendWeightsArgs, IPCWeightTransferEngine

        def send(info: Any) -> None:
            message = {k: v for k, v in vars(info).items() if v is not None}
            message["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(message.pop("ipc_handles"))).decode()
            self.client.call("update_weights", (message,), 300)

        self.client.call("start_weight_update")
        arguments = IPCTrainerSendWeightsArgs(send_mode=send, packed=True)
        IPCWeightTransferEngine.trainer_send_weights(iter(self.tensors), arguments)
        self.client.call("finish_weight_update")

    def checkpoint_engine(self) -> None:
        """checkpoint-engine's worker: metadata over ZMQ, weights in a buffer of two buckets. Raises with what it answers."""
        import zmq
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.empty(2 * BUCKET_BYTES, dtype=torch.uint8, device="cuda")
        path = f"ipc://@refit-peers-{os.getpid()}-{time.monotonic_ns()}"
        socket = zmq.Context.instance().socket(zmq.REQ)
        socket.setsockopt(zmq.RCVTIMEO, 120_000)
        socket.bind(path)
        failed: list[BaseException] = []

        def work() -> None:
            try:
                self.client.call("bench_checkpoint_engine", (path,), 300)
            except Exception as error:  # noqa: BLE001 - raised by the caller below
                failed.append(error)

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        try:
            socket.send_pyobj(reduce_tensor(buffer))
            turn = 0
            for bucket in self._buckets():
                entries, at = [], turn * BUCKET_BYTES
                for name, tensor in bucket:
                    buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                    entries.append({"name": name, "shape": tensor.shape, "dtype": tensor.dtype, "offset": at})
                    at += -(-tensor.nbytes // 256) * 256
                torch.cuda.synchronize()
                self._answered(socket)
                socket.send_pyobj(entries)
                turn = 1 - turn
            for _ in range(2):  # release the buffer, then what runs after loading
                self._answered(socket)
                socket.send_pyobj(None)
            self._answered(socket)
        except BaseException as error:
            with contextlib.suppress(zmq.ZMQError):  # it listens only after an answer
                socket.send_pyobj(RuntimeError(str(error)[:200]))
            raise
        finally:
            worker.join(60)
            socket.close(0)
        if failed:
            raise failed[0]

    def _buckets(self) -> list[list[tuple[str, torch.Tensor]]]:
        buckets: list[list[tuple[str, torch.Tensor]]] = [[]]
        size = 0
        for name, tensor in self.tensors:
            room = -(-tensor.nbytes // 256) * 256
            if size + room > BUCKET_BYTES:
                buckets.append([])
                size = 0
            buckets[-1].append((name, tensor))
            size += room
        return buckets

    @staticmethod
    def _answered(socket: Any) -> None:
        answer = socket.recv()
        if answer:
            raise RuntimeError(answer.decode()[-600:])

    def modelexpress(self, repeats: int) -> list[float]:
        """The install step in the engine. The weights here make room for its receive buffers, so it comes last."""
        self.tensors.clear()
        self.groups.clear()
        torch.cuda.empty_cache()
        found: list[float] = self.client.call("bench_modelexpress", (repeats,), 300)[0]
        return found


def row(way: str, run: Callable[[], list[float]]) -> dict[str, Any]:
    """One row of the record."""
    try:
        times = run()
    except Exception as error:  # noqa: BLE001 - that a way fails is a result
        found: dict[str, Any] = {"way": way, "error": f"{type(error).__name__}: {error}"[-900:]}
    else:
        found = {"way": way, "seconds": min(times), "runs": times}
    print(json.dumps(found), flush=True)
    return found


def main(settings: Annotated[Settings, Parameter(name="*")] = Settings()) -> None:
    """Measure and write the record."""
    os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "HF_HUB_OFFLINE": "1"}
    config = dict(MODELS[settings.model])
    config["num_hidden_layers"] = settings.layers or config["num_hidden_layers"]
    folder = settings.out.resolve() / "model"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    ceiling = copy_ceiling()
    peers = Peers(folder, settings, config)

    def timed(way: Callable[[], None]) -> Callable[[], list[float]]:
        def run() -> list[float]:
            times = []
            for _ in range(settings.repeats):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                way()
                times.append(time.perf_counter() - begin)
            return times

        return run

    rows = [
        row("gather and load", timed(peers.loop)),
        row("vLLM's IPC transfer", timed(peers.native)),
        row("checkpoint-engine's worker", timed(peers.checkpoint_engine)),
        row("ModelExpress' install step alone", lambda: peers.modelexpress(settings.repeats)),
    ]
    record = {
        "model": settings.model,
        "layers": config["num_hidden_layers"],
        "engine": settings.engine,
        "gpu": torch.cuda.get_device_name(),
        "bytes": peers.nbytes,
        "copy_gbytes_per_s": ceiling,
        "rows": rows,
    }
    (settings.out / f"peers-{settings.engine}.json").write_text(json.dumps(record, indent=1))
    peers.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    cyclopts.run(main)
