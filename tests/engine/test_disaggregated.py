"""In-flight updates over wire `collective`, as the asynchronous example uses them: which tokens of a running request are of
which weights.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from examples.disaggregated_async import Step, verdict
from examples.support.tiny_model import save_model
from tests.support.engines import SETTINGS, environment, set_environment
from vllm_refit_ext.client import AsyncLLMClient
from vllm_refit_ext.core.hosts import Hosts
from vllm_refit_ext.core.manifest import parse_state_dict_info, whole_tensors
from vllm_refit_ext.core.messages import UpdateInfo
from vllm_refit_ext.core.placement import concatenate
from vllm_refit_ext.core.plan import build_plan
from vllm_refit_ext.core.table import unpack_placements
from vllm_refit_ext.wires import collective

pytestmark = [pytest.mark.engine, pytest.mark.long]

TOKENS = 160


class Trainer:
    """One trainer rank with whole tensors, in this process."""

    def __init__(self, client: AsyncLLMClient, folder: Path) -> None:
        self.client, self.tensors = client, load_file(folder / "model.safetensors")

    def prepare(self) -> None:
        report = {name: [list(t.shape), str(t.dtype)] for name, t in self.tensors.items()}
        replies = self.client.prepare(report)
        assert [r.problems for r in replies] == [[]] * len(replies)
        manifest = parse_state_dict_info(report).manifest
        targets = concatenate([unpack_placements(r.targets) for r in replies if r.targets is not None])
        plan = build_plan(manifest, whole_tensors(manifest), targets)
        tensors = list(self.tensors.values())
        self.sender = collective.open_sender(0, collective.send_tables(plan, Hosts.single(1, len(replies)))[0], tensors)
        self.report = collective.info([self.sender.begin(tensors)])

    def refit(self, version: str, caches: str) -> None:
        info = UpdateInfo(wire="collective", version=version, session=version, collective=self.report, caches=caches)  # type: ignore[arg-type]
        end = time.monotonic() + 120
        thread = threading.Thread(target=self.sender.transfer, args=(version, self.report, end), daemon=True)
        thread.start()
        self.client.update(info)
        thread.join(30)


def test_tokens_after_the_commit_depend_on_the_new_weights_alone(tmp_path: Path) -> None:
    old, new = save_model("qwen3", tmp_path / "old", seed=0), save_model("qwen3", tmp_path / "new", seed=1)
    with set_environment(environment()):
        asyncio.run(_story(old, new))


async def _story(old: Path, new: Path) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    extension = "vllm_refit_ext.RefitWorkerExtension"
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(old), worker_extension_cls=extension, **SETTINGS))
    trainer = Trainer(AsyncLLMClient(engine, asyncio.get_running_loop()), new)
    names = iter(range(1000))

    async def tokens(prompt: list[int], count: int, seen: Any = None) -> list[int]:
        found: list[int] = []
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        async for output in engine.generate({"prompt_token_ids": prompt}, params, str(next(names))):
            found = list(output.outputs[0].token_ids)
            if seen is not None:
                seen(len(found))
        return found

    try:
        prompt = list(b"in flight")
        with_old = await tokens(prompt, TOKENS)
        await asyncio.to_thread(trainer.prepare)
        count = [0]
        started = asyncio.Event()

        def seen(n: int) -> None:
            count[0] = n
            if n >= 8:
                started.set()

        running = asyncio.create_task(tokens(prompt, TOKENS, seen))
        await asyncio.wait_for(started.wait(), 120)
        before = count[0]
        await asyncio.to_thread(trainer.refit, "new", "reset_running")
        after = count[0]
        mixed = await asyncio.wait_for(running, 240)
        assert len(mixed) == TOKENS
        assert before < TOKENS, "the request must have been running when the update began"
        assert mixed[:before] == with_old[:before], "what was sampled before the commit is of the old weights"
        # A fresh request on the new weights continues from the commit on exactly as the running one did.
        splits = range(before, min(after + 2, TOKENS))
        for split in splits:
            if mixed[:split] == with_old[:split] and await tokens(prompt + mixed[:split], TOKENS - split) == mixed[split:]:
                break
        else:
            raise AssertionError(f"no commit between tokens {before} and {after} explains the answer")
        assert split < TOKENS
    finally:
        engine.shutdown()


def test_a_run_is_judged_by_its_reward_and_by_the_age_of_its_batches() -> None:
    def run(lag: int, rise: float) -> list[Step]:
        return [Step(i, 0.1 + rise * i / 8, max(0, i - lag), i, True, 0.1, 10) for i in range(8)]

    assert verdict(run(1, 0.5)) == []
    assert any("did not rise" in p for p in verdict(run(1, 0.0)))
    old = verdict(run(2, 0.5))
    assert old
    assert all("trained on tokens of step" in p for p in old)
