"""Arrows point one way: what each package may load, tested in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

CASES = [
    (", ".join(f"vllm_refit_ext.core.{m}" for m in ("plan", "manifest", "messages", "mxfp8", "layouts", "digest")),
     ("torch", "vllm", "megatron", "triton")),
    ("vllm_refit_ext", ("torch", "vllm", "megatron", "triton")),
    ("megatron_sender", ("torch", "vllm", "megatron")),
    ("megatron_sender.sender", ("vllm", "vllm_refit_ext.receiver")),
    ("vllm_refit_ext.client", ("torch", "vllm", "megatron")),
    ("vllm_refit_ext.plugin", ("torch", "triton", "megatron")),
    ("vllm_refit_ext.wires.shm", ("vllm", "megatron")),
]  # fmt: skip


@pytest.mark.parametrize(("modules", "absent"), CASES, ids=lambda value: value.split(",")[0] if isinstance(value, str) else "")
def test_import_loads_no_more_than_it_may(modules: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {modules}; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_name_of_the_extension_is_ours() -> None:
    """vLLM refuses an extension that shares a name with its worker; two names are the users', the rest begin with refit."""
    code = (
        "from vllm_refit_ext import RefitWorkerExtension as E; from vllm.v1.worker.gpu_worker import Worker\n"
        "names = [n for n in dir(E) if not n.startswith('__')]\n"
        "print(sorted(n for n in names if not n.startswith('refit') and n != 'prepare_refit_info'), end=' ')\n"
        "print([n for n in names if hasattr(Worker, n)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[] []"
