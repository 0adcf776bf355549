"""The Megatron side stands without vLLM, and its package without torch and Megatron."""

from __future__ import annotations

import subprocess
import sys

BLOCK = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError("blocked: " + name)

sys.meta_path.insert(0, Block())
"""


def run(blocked: set[str], code: str) -> subprocess.CompletedProcess[str]:
    script = BLOCK.replace("{names}", repr(blocked)) + code
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)


def test_the_package_needs_neither_torch_nor_megatron_nor_vllm():
    result = run(
        {"torch", "megatron", "vllm", "transformers"}, "import megatron_sender; assert 'source_map' in megatron_sender.__all__"
    )
    assert result.returncode == 0, result.stderr


def test_the_source_map_needs_no_vllm_and_loads_no_megatron():
    code = "from megatron_sender import SourceMap, source_map; assert 'megatron' not in sys.modules"
    result = run({"vllm", "transformers"}, code)
    assert result.returncode == 0, result.stderr


def test_the_sender_needs_no_vllm():
    result = run({"vllm"}, "from megatron_sender import MegatronSender")
    assert result.returncode == 0, result.stderr


def test_an_unknown_name_is_an_attribute_error():
    result = run(set(), "import megatron_sender; assert not hasattr(megatron_sender, 'SourceMpa')")
    assert result.returncode == 0, result.stderr
