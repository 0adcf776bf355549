"""One READ of 64 MB over NIXL from a process of its own to this one. Prints one JSON object (`python nixl_read.py`).

On GPUs the memory is torch's, of GPU 0 on the offering side and of the last GPU on the reading one: a READ that is slow there
is slow for parameters too. Else it is host memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import numpy as np
import torch

from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.wires.nixl_agent import Agent, Read, kind_of, ranges_of

NBYTES = 64 << 20
WHERE = "vllm-refit doctor"
TIMES = 3


def memory(index: int) -> torch.Tensor:
    """NBYTES of GPU `index` (-1: the last), or of the host where there is none; uint8, each 4 MiB filled with another number."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", index % gpus) if gpus else torch.device("cpu")
    return torch.arange(16, dtype=torch.uint8, device=device).repeat_interleave(NBYTES // 16)


def offer() -> None:
    """Register memory, print where it lies, and keep it until stdin closes."""
    tensor, agent = memory(0), Agent("offer", WHERE)
    agent.register(ranges_of([tensor.data_ptr()], [NBYTES], tensor.device))
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    said = [agent.name, agent.metadata.hex(), kind_of(tensor.device), tensor.device.index or 0, tensor.data_ptr()]
    print(json.dumps(said), flush=True)
    sys.stdin.read()
    agent.close()


def read(said: list[str | int]) -> dict[str, object]:
    """READ what `offer` printed: whether the bytes are those that were offered, and the least seconds of some READs."""
    name, metadata, kind, device, address = said
    wanted, agent = memory(-1), Agent("read", WHERE)
    here = torch.zeros_like(wanted)
    agent.register(ranges_of([here.data_ptr()], [NBYTES], here.device))
    agent.add(str(name), bytes.fromhex(str(metadata)), WHERE)
    far = np.array([[address, NBYTES, device, NBYTES, 1]], np.int64)
    near = np.array([[here.data_ptr(), NBYTES, here.device.index or 0, NBYTES, 1]], np.int64)
    each = Read(agent, str(name), far, near, here.device, str(kind), WHERE)
    seconds = []
    for _ in range(1 + TIMES):  # the first connects
        begin = time.perf_counter()
        each.post()
        each.wait(time.monotonic() + 30)
        seconds.append(time.perf_counter() - begin)
    each.close()
    agent.close()
    return {"same": torch.equal(here, wanted), "seconds": min(seconds[1:]), "nbytes": NBYTES, "memory": str(kind)}


def main() -> None:
    """The command line of this file."""
    if sys.argv[1:] == ["offer"]:
        offer()
        return
    command = [sys.executable, __file__, "offer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        line = child.stdout.readline()
        try:
            answer = read(json.loads(line)) if line else {"error": child.communicate()[1].strip().rsplit("\n", 1)[-1]}
        except (RefitError, ValueError) as error:
            answer = {"error": str(error)}
        finally:
            child.stdin.close()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
