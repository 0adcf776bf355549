"""The seam and the guard under `AsyncLLM`: requests in flight end with the reason when the engine tears."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.engines import SETTINGS, environment, set_environment
from tests.support.seam_cases import pair
from vllm_refit_ext.core.errors import TornError

pytestmark = pytest.mark.engine


def test_story(tmp_path_factory: pytest.TempPathFactory) -> None:
    folders = pair("qwen3", tmp_path_factory.mktemp("async"))
    with set_environment(environment()):
        asyncio.run(_story(str(folders[0]), [str(folder / "model.safetensors") for folder in folders]))


async def _story(folder: str, files: list[str]) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=folder, worker_extension_cls="tests.support.fake_receiver.FakeExtension", **SETTINGS)
    )
    names = iter(range(100))

    async def tokens(count: int = 8, started: asyncio.Event | None = None) -> list[int]:
        found: list[int] = []
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        async for output in engine.generate("Hello refit", params, str(next(names))):
            found = list(output.outputs[0].token_ids)
            if started is not None:
                started.set()
        return found

    async def update(**info: Any) -> None:
        await engine.collective_rpc("update_weights", args=({"wire": "fake", **info},))

    try:
        old = await tokens()
        await engine.collective_rpc("refit_prepare")
        await update(file=files[1], blob=b"\x01")
        new = await tokens()
        assert new != old

        with pytest.raises(Exception, match="refused as the test asked"):
            await update(fail="early")
        assert await tokens() == new

        await _keep(engine, update, files)
        await update(file=files[1])

        started = [asyncio.Event(), asyncio.Event()]
        running = [asyncio.create_task(tokens(200, event)) for event in started]
        for event in started:
            await asyncio.wait_for(event.wait(), 60)
        with pytest.raises(Exception, match="requests are running"):
            await update(file=files[0])
        with pytest.raises(Exception, match="torn as the test asked"):
            await update(file=files[0], fail="torn", caches="reset_running")
        for result in await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 60):
            assert isinstance(result, TornError)
            assert "full refit" in str(result)
        with pytest.raises(TornError, match="mix two versions"):
            await tokens()
        status = await engine.collective_rpc("refit_status")
        assert "torn as the test asked" in status[0]["mark"]["torn"]
        await update(file=files[0])
        assert await tokens() == old
        await engine.check_health()
    finally:
        engine.shutdown()


async def _keep(engine: Any, update: Any, files: list[str]) -> None:
    """Policy `keep`: what runs goes on, and what starts after the commit reads nothing of the older weights, ever."""
    from vllm import SamplingParams

    prompt = [3 + i % 90 for i in range(140)]

    async def answer(tokens: list[int], count: int, name: str, started: asyncio.Event | None = None) -> tuple[list[int], int]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        found: tuple[list[int], int] = ([], 0)
        async for output in engine.generate({"prompt_token_ids": tokens}, params, name):
            found = list(output.outputs[0].token_ids), output.num_cached_tokens
            if started is not None:
                started.set()
        return found

    assert (await answer(prompt, 4, "before"))[1] == 0
    assert (await answer(prompt, 4, "hit"))[1] > 0, "this engine caches prefixes"
    started = asyncio.Event()
    running = asyncio.create_task(answer([5, *prompt[1:]], 110, "running", started))
    short = asyncio.create_task(answer([6, 7, 8], 200, "short"))  # has no full block before the commit
    await asyncio.wait_for(started.wait(), 60)
    await update(file=files[0], caches="keep")
    assert not running.done()
    texts = {"same": prompt, "of the running one": [5, *prompt[1:]]}
    found = {name: await answer(text, 4, f"after {name}") for name, text in texts.items()}
    texts["continued"] = [5, *prompt[1:], *(await running)[0]][:248]
    texts["short"] = [6, 7, 8, *(await short)[0]][:200]
    for name in ("continued", "short"):
        found[name] = await answer(texts[name], 4, f"after {name}")
    assert [found[name][1] for name in ("same", "of the running one", "short")] == [0, 0, 0]
    await update(file=files[0])
    for name, text in texts.items():
        assert (await answer(text, 4, f"fresh {name}"))[0] == found[name][0], name
