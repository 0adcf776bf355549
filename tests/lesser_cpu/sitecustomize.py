"""On the path of a Python process, with PLAYED_CPU=avx2 or avx512: torch says that the CPU has no newer instructions than those.

vLLM chooses its library, kernels and layouts by what torch says. `tests.run` puts this folder on the path of every process, and
sets the variables that oneDNN and ATen read themselves.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable
from typing import Any

HAS = {"avx2": {"_is_avx2_supported"}, "avx512": {"_is_avx2_supported", "_is_avx512_supported", "_is_vnni_supported"}}


def answer(value: bool) -> Callable[[], bool]:
    """A function that says `value`."""
    return lambda: value


class AfterTorch(importlib.abc.MetaPathFinder):
    """Changes `torch.cpu` when it has been imported."""

    def __init__(self, level: str) -> None:
        self.has = HAS[level]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The usual finder's, whose module is changed at the end."""
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def run_and_change(module: Any) -> None:
            run(module)
            for asked in [n for n in vars(module) if n.startswith("_is_") and n.endswith("_supported")]:
                setattr(module, asked, answer(asked in self.has))

        spec.loader.exec_module = run_and_change
        return spec


if os.environ.get("PLAYED_CPU"):
    sys.meta_path.insert(0, AfterTorch(os.environ["PLAYED_CPU"]))
