"""What torch compiles for tests is kept apart by the CPU's instructions: no other CPU's code is ever loaded. And torch asks the
name service for the name of every address that it connects to, where a lost answer is waited for: for a second, and not for five.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import tempfile
from importlib.metadata import version
from pathlib import Path

CHOOSES = ("PLAYED_CPU", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables by which torch and its libraries take a CPU for a lesser one."""


def compiled() -> str:
    """The folder for what torch compiles here. It differs with the CPU's instructions, `CHOOSES`, torch and the user."""
    cpu = Path("/proc/cpuinfo")
    known = re.findall(r"^(?:flags|Features)\s*:.*", cpu.read_text(), re.M)[:1] if cpu.exists() else [platform.processor()]
    parts = [platform.machine(), version("torch"), *known, *(f"{name}={os.environ.get(name, '')}" for name in CHOOSES)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return os.path.join(tempfile.gettempdir(), f"vllm-refit-tests-{os.getuid()}", digest)


os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled())
