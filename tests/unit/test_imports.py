"""Arrows point one way: what each package may load, tested in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("examples", "tests", "benchmarks")
"""What is not installed with the packages, so nothing in them may need it."""
ENGINE_SIDE = ("vllm_refit_ext.receiver", "vllm_refit_ext.engine")
FORBIDDEN = [
    ("vllm_refit_ext/core", (*OUTSIDE, "vllm", "megatron", "torch", "triton", "megatron_sender", *ENGINE_SIDE,
                             "vllm_refit_ext.kernels", "vllm_refit_ext.wires", "vllm_refit_ext.client")),
    ("vllm_refit_ext/kernels", (*OUTSIDE, "vllm", "megatron", "megatron_sender", *ENGINE_SIDE, "vllm_refit_ext.wires")),
    ("vllm_refit_ext/wires", (*OUTSIDE, "vllm", "megatron", "megatron_sender", *ENGINE_SIDE)),
    ("vllm_refit_ext/receiver", (*OUTSIDE, "vllm", "megatron", "megatron_sender", "vllm_refit_ext.engine",
                                 "vllm_refit_ext.client", "vllm_refit_ext.sender")),
    ("vllm_refit_ext/engine", (*OUTSIDE, "megatron", "megatron_sender", "vllm_refit_ext.client", "vllm_refit_ext.sender")),
    ("vllm_refit_ext/sender", (*OUTSIDE, "vllm", "megatron", "megatron_sender", *ENGINE_SIDE)),
    ("vllm_refit_ext/tools", (*OUTSIDE, "vllm")),
    ("vllm_refit_ext", OUTSIDE),
    ("megatron_sender", (*OUTSIDE, "vllm", *ENGINE_SIDE, "vllm_refit_ext.tools")),
]  # fmt: skip
"""Folder -> what no file in it names in an import, at the top or in a function. `vllm-refit plan` alone joins both packages."""

CASES = [
    (", ".join(f"vllm_refit_ext.core.{m}" for m in ("plan", "manifest", "messages", "mxfp8", "layouts", "digest")),
     ("torch", "vllm", "megatron", "triton")),
    ("vllm_refit_ext", ("torch", "vllm", "megatron", "triton")),
    ("megatron_sender", ("torch", "vllm", "megatron")),
    ("megatron_sender.sender", ("vllm", *ENGINE_SIDE)),
    ("vllm_refit_ext.client", ("torch", "vllm", "megatron")),
    ("vllm_refit_ext.sender", ("torch", "vllm", "megatron")),
    ("vllm_refit_ext.sender.source", ("vllm", "megatron", "triton")),
    ("vllm_refit_ext.sender.geometry", ("torch", "vllm", "megatron")),
    ("vllm_refit_ext.sender.dtensor", ("vllm", "megatron", "triton", "transformers")),
    ("vllm_refit_ext.sender.sender", ("vllm", "megatron", *ENGINE_SIDE)),
    ("vllm_refit_ext.plugin", ("torch", "triton", "megatron")),
    ("vllm_refit_ext.wires.shm", ("vllm", "megatron")),
]  # fmt: skip


def imported(file: Path) -> Iterator[str]:
    """Every module that `file` names in an import, also in a function, and in a call of `import_module`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


@pytest.mark.parametrize(("folder", "forbidden"), FORBIDDEN, ids=lambda value: value if isinstance(value, str) else "")
def test_arrows_point_one_way(folder: str, forbidden: tuple[str, ...]) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imported(file)
        if any(name == other or name.startswith(f"{other}.") for other in forbidden)
    ]
    assert wrong == []


def test_nothing_but_the_tools_imports_the_tools() -> None:
    files = [f for f in (ROOT / "vllm_refit_ext").rglob("*.py") if "tools" not in f.relative_to(ROOT).parts]
    assert files
    assert [str(f.relative_to(ROOT)) for f in files if any(n.startswith("vllm_refit_ext.tools") for n in imported(f))] == []


def test_an_import_in_a_function_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "def f():\n    from examples.support import launch\n    import benchmarks.a\n"
        "    importlib.import_module('tests.support')\n"
    )
    assert {"examples.support.launch", "tests.support", "benchmarks.a"} <= set(imported(file))


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
