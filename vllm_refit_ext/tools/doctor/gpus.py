"""GPUs, the links between them, and whether one process can read the GPU memory of another."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from vllm_refit_ext.tools.doctor.finding import GIB, Finding
from vllm_refit_ext.tools.doctor.packages import numbers

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def topology_text() -> str:
    """What `nvidia-smi topo -m` prints, or nothing where there is no such program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        return subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def nvlinks(topology: str) -> dict[tuple[int, int], int]:
    """NVLinks between GPU pairs, from the text of `nvidia-smi topo -m`."""
    links = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", topology).splitlines():
        words = line.split()
        row = re.fullmatch(r"GPU(\d+)", words[0]) if len(words) > 1 else None
        if row and not words[1].startswith("GPU"):
            for column, cell in enumerate(words[1:]):
                if count := re.fullmatch(r"NV(\d+)", cell):
                    links[int(row[1]), column] = int(count[1])
    return links


def check_gpus(facts: Mapping[str, Any], topology: str) -> list[Finding]:
    """The driver, each GPU, and how the GPUs reach each other. `facts` is what `probe.facts` answers."""
    if "error" in facts:
        do = "Nothing to do for CPU runs and for planning. For GPUs: install the driver, and give the container its GPUs."
        return [Finding("warn", "GPU driver", str(facts["error"]), "a CUDA driver", do)]
    gpus: list[Mapping[str, Any]] = list(facts["gpus"])
    findings = [Finding("ok", "GPU driver", f"CUDA {facts['cuda']}")]
    if not gpus:
        do = "Nothing to do for CPU runs and for planning. For GPUs: look at CUDA_VISIBLE_DEVICES."
        return [*findings, Finding("warn", "GPUs", "none", "at least one", do)]
    links = nvlinks(topology)
    for index, gpu in enumerate(gpus):
        got = f"{gpu['name']}, {gpu['bytes'] / GIB:.0f} GiB, compute capability {gpu['capability']}, UUID {gpu['uuid']}"
        old = numbers(gpu["capability"]) < (7, 5)
        do = "BF16 weights only: vLLM has no MXFP8 kernel for it." if old else ""
        findings.append(Finding("warn" if old else "ok", f"GPU {index}", got, "7.5 or later" if old else "", do))
    pairs = [(a, b) for a in range(len(gpus)) for b in range(len(gpus)) if a != b]
    if not pairs:
        return findings
    apart = [f"{a} -> {b}" for a, b in pairs if b not in gpus[a]["peers"]]
    do = (
        "The wire ipc can't read between them: use shm or collective, or put trainer and engine ranks on one GPU."
        if apart
        else ""
    )
    got = "none between " + ", ".join(apart) if apart else f"all {len(pairs)} pairs"
    findings.append(Finding("warn" if apart else "ok", "peer access", got, "all pairs", do))
    if not topology:
        findings.append(Finding("warn", "NVLink", "unknown", "nvidia-smi topo -m", "Install nvidia-smi to see the links."))
    else:
        without = [f"{a} - {b}" for a, b in pairs if a < b and (a, b) not in links]
        do = "Reads between them go over PCIe, an order slower." if without else ""
        counts = sorted(set(links.values()))
        got = "none between " + ", ".join(without) if without else "all pairs, links " + ", ".join(map(str, counts))
        findings.append(Finding("warn" if without else "ok", "NVLink", got, "all pairs", do))
    return findings


def judge_hand_over(answer: Mapping[str, Any]) -> list[Finding]:
    """The finding for what `probe.hand_over` answered."""
    what, wanted = "CUDA IPC between two processes", "the same bytes"
    if answer.get("ok"):
        return [Finding("ok", what, "works")]
    got = str(answer.get("error") or "other bytes arrived")
    do = "Give both processes one IPC and PID namespace (docker --ipc=host --pid=host), no MIG slice; or use the wire shm."
    return [Finding("fail", what, got, wanted, do)]


def check_allocator(environment: Mapping[str, str]) -> list[Finding]:
    """Expandable segments, under both names of torch's setting."""
    findings = []
    for name in ALLOCATOR_VARIABLES:
        text = environment.get(name, "")
        options = dict(part.split(":", 1) for part in text.replace(" ", "").split(",") if ":" in part)
        if options.get("expandable_segments", "").lower() in ("true", "1"):
            do = (
                "Unset it for the trainer: such memory has no plain IPC handle, so the wire ipc can't read it directly (staged "
                "buffers can). Unset it for engines that sleep: vLLM refuses both together."
            )
            findings.append(Finding("warn", name, text, "no expandable_segments:True", do))
    return findings or [Finding("ok", "expandable segments", "off", "off")]


def check_visible_devices(environment: Mapping[str, str]) -> list[Finding]:
    """CUDA_VISIBLE_DEVICES: a process can't open memory of a GPU that it does not see."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return []
    do = "For the wire ipc between GPUs, let trainer and engine processes see all GPUs of the host."
    what = "CUDA_VISIBLE_DEVICES"
    if len([part for part in text.split(",") if part.strip()]) > 1:
        return [Finding("ok", what, text)]
    return [Finding("warn", what, repr(text), "all GPUs of the host", do)]
