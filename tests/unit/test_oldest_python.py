"""What a trainer imports runs on the oldest Python that `pyproject.toml` allows. `make test-oldest` runs its unit tests there."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDEST = re.findall(r'^requires-python = ">=(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
FILES = sorted(file for package in ("vllm_refit_ext", "megatron_sender") for file in (ROOT / package).rglob("*.py"))

LOOK = """
import ast, importlib, importlib.util, sys
def known(module, name):
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None
for file in sys.argv[1:]:
    tree = ast.parse(open(file).read(), file)
    compile(tree, file, "exec")
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names if not a.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] in sys.stdlib_module_names:
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    print(f"{file}:{node.lineno}: {node.module} has no {alias.name}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            if node.value.id in sys.stdlib_module_names and not known(node.value.id, node.attr):
                print(f"{file}:{node.lineno}: {node.value.id} has no {node.attr}")
"""


def interpreter() -> str:
    """A Python of the oldest version, from the PATH or from pyenv; empty where there is none."""
    place = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    pyenv = sorted(place.glob(f"{OLDEST}.*/bin/python3"))
    candidates = [shutil.which(f"python{OLDEST}"), *map(str, pyenv)]
    for candidate in filter(None, candidates):
        asked = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False)
        if asked.stdout.startswith(f"Python {OLDEST}."):
            return candidate
    return ""


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_syntax_is_known_to_the_oldest_python(file: Path) -> None:
    major, minor = map(int, OLDEST.split("."))
    ast.parse(file.read_text(), str(file), feature_version=(major, minor))


@pytest.mark.skipif(not interpreter(), reason=f"needs a Python {OLDEST} on the PATH or in pyenv")
def test_the_oldest_python_compiles_every_file_and_has_every_standard_name() -> None:
    done = subprocess.run([interpreter(), "-c", LOOK, *map(str, FILES)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not interpreter(), reason=f"needs a Python {OLDEST} on the PATH or in pyenv")
@pytest.mark.parametrize(
    "code", ["from typing import Self\n", "import datetime\nx = datetime.UTC\n", "def f[T](x: T) -> T: ...\n", "x = f'{'a'}'\n"]
)
def test_what_is_newer_is_seen(tmp_path: Path, code: str) -> None:
    file = tmp_path / "a.py"
    file.write_text(code)
    done = subprocess.run([interpreter(), "-c", LOOK, str(file)], capture_output=True, text=True, check=False)
    assert done.stdout or done.returncode
