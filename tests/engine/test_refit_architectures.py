"""Every architecture that this machine can build tiny: refitted to another checkpoint and back, and equal to a fresh engine.

Answers, log-probabilities and every tensor are compared, on an engine as vLLM makes it for a CPU (its own reload is the writer)
and on one with the plain layouts of GPUs (moves are written in place).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.architectures import ALL, ask, checkpoint, contents, open_engine
from tests.support.whole import WholeTrainer
from vllm_refit_ext.client import LLMClient

pytestmark = pytest.mark.engine

EXTENSIONS = {"stock": "vllm_refit_ext.RefitWorkerExtension", "plain": "tests.support.plain_cpu.PlainCpuExtension"}
SHORT = {("gpt-oss", "stock"), ("gpt-oss", "plain"), ("granite-hybrid", "stock"), ("phi", "plain")}
"""Loaders that write without vLLM's wrappers, stacked experts with biases, a hybrid, a parameter that is made while loading."""
NOT_ON_A_CPU = {"jamba": "selective_scan_fwd"}
"""Architectures that vLLM's CPU engine can't run, and the operation that is missing."""
COUNT = {"architectures": set[str](), "engines": 0, "refits": 0, "tensors": 0}


@pytest.fixture(scope="module", autouse=True)
def _count(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    found_ = ", ".join(f"{len(n) if isinstance(n, set) else n} {what}" for what, n in COUNT.items())
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\ncompared with fresh engines: {found_}\nnot on a CPU: {', '.join(NOT_ON_A_CPU)}")


CASES = [
    pytest.param(name, layout, id=f"{name}-{layout}", marks=[] if (name, layout) in SHORT else pytest.mark.long)
    for name in ALL
    if name not in NOT_ON_A_CPU
    for layout in EXTENSIONS
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_refit_there_and_back_equals_fresh_engines(name: str, layout: str, tmp_path: Path) -> None:
    folders = [checkpoint(name, tmp_path / str(seed), seed) for seed in (0, 1)]
    with open_engine(folders[1], EXTENSIONS[layout], name) as llm:
        wanted = [None, (ask(llm), contents(llm))]
    with open_engine(folders[0], EXTENSIONS[layout], name) as llm:
        wanted[0] = ask(llm), contents(llm)
        assert wanted[0][0] != wanted[1][0], "other weights must give other answers"
        for which in (1, 0, 1):
            refit(llm, folders[which])
            answers, tensors = wanted[which]
            assert ask(llm) == answers
            now = contents(llm)  # after the answers, as before: some routers keep what the last batch chose
            assert sorted(n for n in tensors.keys() | now.keys() if tensors.get(n) != now.get(n)) == []
            COUNT["refits"] += 1
            COUNT["tensors"] += len(now)
    COUNT["architectures"].add(name)
    COUNT["engines"] += 2


def refit(llm: Any, folder: Path) -> None:
    trainer = WholeTrainer(LLMClient(llm), folder)
    try:
        (report,) = trainer.refit(folder.name)
        assert report.version == folder.name
    finally:
        trainer.close()


@pytest.mark.parametrize("name", NOT_ON_A_CPU)
@pytest.mark.long
def test_vllm_on_a_cpu_can_not_run(name: str, tmp_path: Path) -> None:
    """When this fails, vLLM has learnt the architecture: take it off the list, and it is refitted with the others."""
    with pytest.raises(Exception, match=NOT_ON_A_CPU[name]), open_engine(checkpoint(name, tmp_path, 0), "", name) as llm:
        ask(llm)
