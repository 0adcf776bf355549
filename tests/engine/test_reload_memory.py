"""The memory that a reply states for a reload is what the reload takes: one module, not all, and no more in later refits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.engine import routes_support
from tests.support.architectures import checkpoint, open_engine
from tests.support.whole import WholeTrainer
from vllm_refit_ext.client import LLMClient

pytestmark = pytest.mark.engine

WIDE = {"vocab_size": 24000, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8}
SLACK = 24 << 20
"""Bytes of allocators, threads and libraries that a first use brings, whatever the size of the model."""


class Peak:
    """The most private memory of this process within the context, beyond what it had before, in bytes."""

    def __enter__(self) -> Peak:
        self.start = self.most = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    @property
    def nbytes(self) -> int:
        return self.most - self.start

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.long
def test_a_reload_takes_what_was_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**{**routes_support.DENSE, **WIDE}))
    monkeypatch.setitem(routes_support.CONFIGS, "llama-wide", wide)
    folders = [checkpoint("llama-wide", tmp_path / str(seed), seed) for seed in (0, 1)]
    with open_engine(folders[0], "vllm_refit_ext.RefitWorkerExtension") as llm:
        trainer = WholeTrainer(LLMClient(llm), folders[1])
        (reply,) = trainer.prepare()
        assert reply.problems == []
        stated = reply.extra_bytes
        largest = max(t.nbytes for t in trainer.tensors.values())
        assert largest < stated < sum(t.nbytes for t in trainer.tensors.values()), "one module, not all of them"
        for version in ("first", "second", "third"):
            info = trainer.publish(version)
            with Peak() as peak:
                trainer.client.update(info)
            print(f"{version}: {peak.nbytes >> 20} MiB taken, {stated >> 20} MiB stated")
            assert peak.nbytes <= stated + SLACK
        trainer.close()


def test_a_refit_that_does_not_fit_is_refused_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_refit_ext.core.errors import RefitError
    from vllm_refit_ext.receiver import session

    folder = checkpoint("llama", tmp_path, 0)
    with open_engine(folder, "vllm_refit_ext.RefitWorkerExtension") as llm:
        trainer = WholeTrainer(LLMClient(llm), folder)
        trainer.prepare()
        monkeypatch.setattr(session, "free_bytes", lambda device: 1 << 10)
        with pytest.raises(RefitError, match="more memory beside the weights than is free"):
            trainer.client.update(trainer.publish("never"))
        assert trainer.client.status()[0].state == "ready"
        trainer.close()
