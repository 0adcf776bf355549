"""What reaches other hosts: NICs with RDMA, and the time of a READ over NIXL between two processes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_refit_ext.tools.doctor.finding import Finding

NIXL = ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm")
SLOW = {"DRAM": 0.5, "VRAM": 10.0}
"""GB/s below which a READ on one host takes a path that it should not. Loopback TCP, the slowest path measured, has 0.7 in host
memory; PCIe has 20 and more between GPUs, a way through host memory a few."""


def check_nics(folder: Path) -> list[Finding]:
    """The ports of NICs with RDMA. `folder` is /sys/class/infiniband."""
    wanted = "active ports, where refits go to other hosts"
    ports = sorted(folder.glob("*/ports/*"))
    if not ports:
        do = "Nothing to do on one host. Between hosts NIXL and NCCL use TCP: give the container its NICs (/dev/infiniband)."
        return [Finding("warn", "NICs with RDMA", "none", wanted, do)]
    findings = []
    for port in ports:
        state, rate, layer = (_read(port / name) for name in ("state", "rate", "link_layer"))
        what = f"NIC {port.parent.parent.name} port {port.name}"
        if state.endswith("ACTIVE"):
            findings.append(Finding("ok", what, f"{rate}, {layer}", wanted))
        else:
            do = "Connect it and bring its link up, or leave it out of UCX_NET_DEVICES and NCCL_IB_HCA."
            findings.append(Finding("warn", what, state or "unknown state", wanted, do))
    return findings


def has_nixl() -> bool:
    """Whether a build of NIXL is installed here; nothing is imported."""
    return any(importlib.util.find_spec(name) for name in NIXL)


def judge_read(answer: Mapping[str, Any] | None) -> Finding:
    """What `nixl_read.py` answered; None: NIXL is not installed."""
    what, wanted = "READ of 64 MB over NIXL", "the bytes that were offered, between two processes of this host"
    if answer is None:
        do = "Only wire nixl needs it: pip install 'vllm-refit[nixl]' on the trainer's and on the engine's side."
        return Finding("warn", what, "not tried: NIXL is not installed", wanted, do)
    if "error" in answer:
        do = "See NIXL's log (NIXL_LOG_LEVEL=DEBUG) and UCX's (UCX_LOG_LEVEL=info), or use another wire."
        return Finding("fail", what, str(answer["error"]), wanted, do)
    if not answer["same"]:
        return Finding("fail", what, "other bytes", wanted, "Do not use wire nixl here; look for an update of NIXL and UCX.")
    memory, speed = answer["memory"], answer["nbytes"] / answer["seconds"] / 1e9
    got = f"{1e3 * answer['seconds']:.1f} ms, {speed:.1f} GB/s in {'GPU' if memory == 'VRAM' else 'host'} memory"
    if speed >= SLOW[memory]:
        return Finding("ok", what, got, wanted)
    do = "UCX takes a slow path: look at UCX_TLS and UCX_NET_DEVICES" + (
        "; on GPUs at expandable segments (PYTORCH_ALLOC_CONF), NVLink and peer access above." if memory == "VRAM" else "."
    )
    return Finding("warn", what, got, f"{SLOW[memory]:g} GB/s or more", do)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
