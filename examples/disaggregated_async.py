"""Disaggregated asynchronous reinforcement learning: trainer and engine apart, sampling one step ahead, weights handed over in
flight.

    python examples/disaggregated_async.py            # on a CPU, some minutes

The engine is a `vllm serve` process; the trainer is two Megatron ranks in a process group of their own. They share no group and
no memory: weights go shard to shard over wire `collective`. While the trainer takes a step on one batch, the engine samples
the next one, and the refit arrives while its requests run. What that means:

- Tokens sampled before the commit come from the old weights, tokens after it from the new ones. The commit falls between two
  decoding steps, on all ranks of the engine at once.
- `caches="reset_running"`: running requests are preempted at the commit and their keys and values computed anew, so a token
  sampled after the commit depends on the new weights alone. (`"keep"` would go on with the old keys and values.)
- A batch is trained at most one step after the weights that sampled its oldest token. The loss corrects for that with the ratio
  of the trainer's probability to the one that the engine reported for each token, cut off at `grpo.MAX_RATIO`.

Writes a JSON record. Exits with 1 when the reward did not rise or a batch was older than one step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import torch
import torch.distributed as dist
from cyclopts import Parameter
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script, from any folder

from examples import colocated_sync_rl as sync
from examples.support.grpo import PROMPT, PROMPTS, Trainer, advantages, rewards, rise_problems
from examples.support.launch import run_ranks
from examples.support.record import conclude, set_up
from examples.support.server import vllm_server


@Parameter(name="*")
@dataclass(frozen=True)
class Settings:
    """Settings of the run.

    Parameters
    ----------
    steps: training steps.
    samples: answers sampled for each of the 8 prompts.
    tokens: tokens of an answer.
    learning_rate: of Adam.
    seed: of weights and sampling.
    out: folder for the record and the model.
    """

    steps: int = 24
    samples: int = 16
    tokens: int = 12
    learning_rate: float = 2e-3
    seed: int = 1
    out: Path = Path("out/disaggregated")


@dataclass
class Step:
    """One row of the record. `oldest`, `newest`: steps whose weights sampled the batch's first and last tokens. `in_flight`:
    whether requests ran while the refit before this step's end was committed. `bytes`: what that refit moved."""

    step: int
    reward: float
    oldest: int
    newest: int
    in_flight: bool
    refit_s: float
    bytes: int


def serve(folder: Path, settings: Settings) -> AbstractContextManager[tuple[str, Any]]:
    """The engine: a server of the model with the extension."""
    options = ["--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", str(len(PROMPTS) * settings.samples)]
    options += ["--kv-cache-memory-bytes", str(64 << 20), "--seed", str(settings.seed)]
    options += ["--worker-extension-cls", "vllm_refit_ext.RefitWorkerExtension"]
    paths = {"PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)}
    return vllm_server(folder, settings.out / "server.log", options, paths)


class Sampler:
    """Samples batches from the server in a thread, and knows which step's weights it began and ended with."""

    def __init__(self, url: str, folder: Path, settings: Settings) -> None:
        from transformers import AutoTokenizer

        from vllm_refit_ext.client import HTTPClient

        self.client, self.settings = HTTPClient(url), settings
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompts = [tokenizer.encode(p, add_special_tokens=False) for p in PROMPTS]
        self.serving = 0
        self.running = False
        self._pool = ThreadPoolExecutor(1)

    def start(self) -> Future[tuple[torch.Tensor, torch.Tensor, int, int]]:
        """Begin a batch: tokens [answers, prompt + answer], log-probabilities [answers, answer], steps of its oldest and newest
        weights.
        """
        return self._pool.submit(self._sample)

    def _sample(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        oldest, self.running = self.serving, True
        s = self.settings
        body = {"model": "tiny", "prompt": self.prompts, "n": s.samples, "max_tokens": s.tokens, "temperature": 1.0}
        body |= {"ignore_eos": True, "logprobs": 0, "return_token_ids": True}
        answer = self.client.post("/v1/completions", body, 300)
        self.running = False
        tokens, logprobs = [], []
        for choice in sorted(answer["choices"], key=lambda c: c["index"]):
            tokens.append([*self.prompts[choice["index"] // s.samples], *choice["token_ids"]])
            logprobs.append(choice["logprobs"]["token_logprobs"])
        return torch.tensor(tokens), torch.tensor(logprobs), oldest, self.serving


def run_rank(folder: Path, url: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    """What each trainer rank does. `values` are those of `Settings`. Returns the steps."""
    from megatron_sender import MegatronSender
    from megatron_sender.sender import SenderConfig

    settings, rank = Settings(**values), dist.get_rank()
    trainer = Trainer(folder, learning_rate=settings.learning_rate, seed=settings.seed)
    sampler = Sampler(url, folder, settings) if rank == 0 else None
    sender = MegatronSender(
        trainer.chunks,
        trainer.bridge,
        sampler.client if sampler else None,
        SenderConfig(wire="collective", caches="reset_running", hash_reloaded=True),
    )
    sender.prepare()
    sender.refit("step-0")
    console = Console(force_terminal=False, width=110)
    letters = torch.tensor(json.loads((folder / "letters.json").read_text()))
    answers = len(PROMPTS) * settings.samples
    pending = sampler.start() if sampler else None
    steps: list[Step] = []
    for step in range(settings.steps):
        tokens = torch.empty(answers, PROMPT + settings.tokens, dtype=torch.int64)
        logprobs, ages = torch.empty(answers, settings.tokens), torch.empty(2, dtype=torch.int64)
        if sampler and pending:
            tokens, logprobs, *found = pending.result()
            ages = torch.tensor(found)
            pending = sampler.start()  # runs while this rank trains and hands over weights
        for tensor in (tokens, logprobs, ages):
            dist.broadcast(tensor, 0)
        reward = rewards(tokens, letters)
        mine = torch.arange(rank, answers, dist.get_world_size())
        trainer.step(tokens[mine], advantages(reward, settings.samples)[mine], logprobs[mine])
        before = sampler.running if sampler else False
        report = sender.refit(f"step-{step + 1}")
        if sampler:
            sampler.serving = step + 1
        oldest, newest = ages.tolist()
        in_flight = before and sampler is not None and sampler.running
        row = Step(step, float(reward.mean()), oldest, newest, in_flight, report.seconds["total"], report.nbytes)
        steps.append(row)
        if rank == 0:
            flight = "in flight" if row.in_flight else ""
            console.print(
                f"step {step:3d}  reward {row.reward:.3f}  weights {oldest}..{newest}  "
                f"refit {row.refit_s:.2f} s  {row.bytes} B  {flight}"
            )
    if pending:
        pending.result()
    compared = sender.verify()
    if rank == 0:
        console.print(f"verify: {compared} tensor digests of the engine equal the trainer's")
    sender.close()
    return [asdict(s) for s in steps]


def verdict(steps: list[Step]) -> list[str]:
    """What is wrong with the run; empty when it learned and no batch was older than one step."""
    problems = rise_problems([s.reward for s in steps])
    problems += [f"step {s.step} trained on tokens of step {s.oldest}'s weights" for s in steps if s.step - s.oldest > 1]
    return problems


def main(settings: Settings | None = None) -> int:
    """Run, record, judge."""
    settings = settings or Settings()
    set_up(settings.out)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin = time.perf_counter()
    folder = sync.make_model(sync.Settings(out=settings.out, seed=settings.seed))
    with serve(folder, settings) as (url, _):
        found = run_ranks(run_rank, 2, folder, url, asdict(settings), timeout=1200)[0]
    steps = [Step(**step) for step in found]
    seconds = time.perf_counter() - begin
    flights = sum(s.in_flight for s in steps)
    summary = f"{flights} of {len(steps)} refits arrived while requests ran; record"
    return conclude(settings.out, asdict(settings), found, verdict(steps), seconds, summary)


app = cyclopts.App(help=(__doc__ or "").partition("\n")[0])


@app.default
def cli(settings: Annotated[Settings | None, Parameter()] = None) -> None:
    """Train the tiny model and judge the run."""
    sys.exit(main(settings))


if __name__ == "__main__":
    app()
