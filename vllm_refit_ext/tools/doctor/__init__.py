"""What on this machine will make a refit fail, and what to do about it. Runs without a GPU, torch, vLLM or Megatron, and says so.

Nothing is changed. Each check is a function of what it reads, so that each can be tried on any machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_refit_ext.tools.doctor import gpus, host, network, packages, probe
from vllm_refit_ext.tools.doctor.finding import Finding, Level

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Finding", "Level", "run", "table"]


def run(environment: Mapping[str, str] | None = None) -> list[Finding]:
    """All findings for this machine, this Python and `environment` (default: this process's).

    Takes seconds. GPUs are asked in processes of their own, so CUDA is not started here. The hand-over of GPU memory is tried
    for real on GPU 0, where there is one, and a READ over NIXL where that is installed.
    """
    values = os.environ if environment is None else environment
    facts = probe.ask("facts")
    return [
        *packages.check_versions(packages.installed_versions()),
        *packages.check_plugin(values, [point.name for point in importlib.metadata.entry_points(group=packages.GROUP)]),
        *gpus.check_gpus(facts, gpus.topology_text()),
        *(gpus.judge_hand_over(probe.ask("ipc", "0")) if facts.get("gpus") else []),
        *gpus.check_allocator(values),
        *gpus.check_visible_devices(values),
        *host.check_isolation(Path("/proc")),
        *host.check_shared_memory(Path("/dev/shm")),
        *host.check_limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        *host.check_loopback(),
        *network.check_nics(Path("/sys/class/infiniband")),
        network.judge_read(probe.ask(program=str(Path(__file__).with_name("nixl_read.py"))) if network.has_nixl() else None),
    ]


def table(findings: Sequence[Finding]) -> Table:
    """`findings` as a rich table for people."""
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    result = Table(title="vllm-refit doctor", title_justify="left")
    for name in ("", "what", "got", "wanted", "do"):
        result.add_column(name, overflow="fold")
    for f in findings:
        result.add_row(Text(f.level, style=colours[f.level]), *(Text(text) for text in (f.what, f.got, f.wanted, f.do)))
    return result
