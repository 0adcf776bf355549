"""Sleep, wake, vLLM's own reload and refits of a real engine in every order: after each refit it equals a fresh engine.

One walk over a de Bruijn sequence holds every word of four operations once, so 628 operations show all 625 orders.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from safetensors.torch import load_file  # noqa: E402

from examples.support.tiny_model import save_model  # noqa: E402
from tests.support.gpu_engine import EAGER, GRAPHS, Engine  # noqa: E402
from tests.support.loose_sender import LooseSender  # noqa: E402
from vllm_refit_ext.core.errors import RefitError  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

SIZES = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 128, "intermediate_size": 512}
MODES = {"eager": EAGER, "graphs": GRAPHS}
OPERATIONS = ("refit", "reload", "sleep 1", "sleep 2", "wake")
LENGTH = 4


def every_order(symbols: int, length: int) -> Iterator[int]:
    """A walk that contains every word of `length` symbols once: Lyndon words in order (Fredricksen, Kessler, Maiorana)."""
    walk: list[int] = []

    def extend(word: list[int], position: int, period: int) -> None:
        if position > length:
            if length % period == 0:
                walk.extend(word[1 : period + 1])
            return
        word[position] = word[position - period]
        extend(word, position + 1, period)
        for symbol in range(word[position - period] + 1, symbols):
            word[position] = symbol
            extend(word, position + 1, position)

    extend([0] * (length + 1), 1, 1)
    yield from walk + walk[: length - 1]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    base = tmp_path_factory.mktemp("orders")
    logs = Path(os.environ.get("OUT", base))
    folders = [save_model("qwen3_moe", base / str(seed), seed=seed, dtype="bfloat16", **SIZES) for seed in (0, 1)]
    mxfp8 = {"quantization": "mxfp8"}
    engines = {
        (name, i): Engine(folders[i], logs / f"orders-{name}-{i}.log", **mode, **mxfp8, enable_sleep_mode=i == 0)
        for name, mode in MODES.items()
        for i in (0, 1)
    }
    yield folders, engines
    for engine in engines.values():
        engine.close()


@pytest.mark.parametrize("mode", MODES)
def test_every_order_of_four(started, mode):
    folders, engines = started
    fresh = engines[mode, 1]
    fresh.wait()
    tensors, answers = fresh.tensors(), fresh.answers()
    engine = engines[mode, 0]
    client = engine.wait()
    given = {n: t.cuda() for path in folders[1].glob("*.safetensors") for n, t in load_file(path).items()}
    sender = LooseSender(client, given, wire_name="ipc")
    sender.prepare()
    asleep, counts, history = False, dict.fromkeys(OPERATIONS, 0), []
    for step, number in enumerate(every_order(len(OPERATIONS), LENGTH)):
        operation = OPERATIONS[number]
        history = [*history[-LENGTH:], operation]
        counts[operation] += 1
        if operation.startswith("sleep"):
            if not asleep:
                engine.ask("engine:sleep", int(operation[-1]))
            asleep = True
            continue
        if operation == "refit" and asleep:
            with pytest.raises(RefitError, match="asleep"):
                sender.refit(f"{step} asleep")
        if asleep:
            engine.ask("engine:wake_up", ["weights"])
        if operation == "reload":
            engine.ask("reload_weights")
        if operation == "refit":
            try:
                sender.refit(str(step))
            except RefitError as error:
                if "call prepare_refit_info again" not in str(error).lower():
                    raise
                sender.prepare()
                sender.refit(f"{step} prepared anew")
        if asleep:
            engine.ask("engine:wake_up", ["kv_cache"])
        asleep = False
        if operation == "refit":
            engine.ask("engine:reset_prefix_cache")
            assert engine.answers() == answers, history
            now = engine.tensors()
            shared = now.keys() & tensors.keys()
            assert [n for n in shared if now[n][0] != tensors[n][0] and "workspace" not in n] == [], history
    print(mode, counts)
    sender.close()
