"""Elastic asynchronous reinforcement learning: engines come, stop and die during a run, and the trainer never notices.

    python examples/elastic_async_rl.py            # on a CPU, one to three minutes

The trainer is two Megatron ranks. After each step it publishes a version and goes on; it knows no engine. Each engine takes the
newest version by itself, samples a batch with it, and puts the batch into a queue. A third of the way a third engine is added,
half way one is stopped (SIGSTOP), at two thirds another one is killed. At the end the stopped one goes on, takes the newest
version and serves it like those that were never away.

The loss corrects for a batch's age with the ratio of the trainer's probability to the one that the engine reported for each
token, cut off at `grpo.MAX_RATIO`; a batch that is more than `MAX_AGE` steps old is thrown away.

Writes a JSON record, with the phases of each take. Exits with 1 when the reward did not rise, when the added engine gave no
batch, or when the engines that live don't serve the last version with equal weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import torch
import torch.distributed as dist
from cyclopts import Parameter
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script, from any folder

from examples import colocated_sync_rl as sync
from examples.support import processes
from examples.support.grpo import PROMPTS, advantages, rewards, rise_problems
from examples.support.record import conclude, set_up
from vllm_refit_ext.core.errors import RefitError

MAX_AGE = 2
"""Steps between the weights that sampled a batch and the step that trains on it."""
GRACE_S = 1.0
"""Seconds that engines have to finish reading a version when the next one is published. A stopped engine costs them once."""


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
    out: Path = Path("out/elastic")


@dataclass
class Step:
    """One row of the record. engine, age: who sampled its batch, and how many steps older the weights were. alive: engines that
    take part. thrown: batches that were too old. waited_s, train_s, publish_s: seconds."""

    step: int
    reward: float
    engine: str
    age: int
    alive: list[str]
    thrown: int
    waited_s: float
    train_s: float
    publish_s: float


@dataclass
class Batch:
    """tokens [answers, prompt + answer], logprobs [answers, answer], of an engine and the step of its weights."""

    engine: str
    step: int
    tokens: torch.Tensor
    logprobs: torch.Tensor


class TrainerRank:
    """What `processes.Trainer` calls on each Megatron rank."""

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        from examples.support.grpo import Trainer
        from megatron_sender import MegatronSender
        from megatron_sender.sender import SenderConfig

        settings = Settings(**values)
        self.samples = settings.samples
        self.trainer = Trainer(folder, learning_rate=settings.learning_rate, seed=settings.seed)
        self.sender = MegatronSender(self.trainer.chunks, self.trainer.bridge, None, SenderConfig(registry_port=0))
        self.sender.prepare()
        self.publication = self.sender.publish("step-0", "snapshot")

    def registry(self) -> str:
        """Where engines find what is published."""
        return self.sender.registry

    def step(self, version: str, tokens: torch.Tensor, logprobs: torch.Tensor, reward: torch.Tensor) -> tuple[float, float]:
        """Train on a batch and publish. Returns the seconds of both."""
        begin = time.perf_counter()
        mine = torch.arange(dist.get_rank(), len(tokens), dist.get_world_size())
        self.trainer.step(tokens[mine], advantages(reward, self.samples)[mine], logprobs[mine])
        trained = time.perf_counter()
        self.publication.close(GRACE_S)
        self.publication = self.sender.publish(version, "snapshot")
        return trained - begin, time.perf_counter() - trained

    def close(self) -> None:
        """Revoke and let go."""
        self.sender.close()


def questions(llm: Any) -> dict[str, Callable[..., Any]]:
    """What an engine is asked: to sample a batch with temperature 1."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": llm.get_tokenizer().encode(p, add_special_tokens=False)} for p in PROMPTS]

    def sample(samples: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        params = SamplingParams(n=samples, temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        return sync.sampled(llm.generate(prompts, params, use_tqdm=False))

    return {"sample": sample}


@dataclass
class Member:
    """An engine of the run and its thread. takes: the phases of each take, in seconds. problem: what ended it."""

    engine: processes.Engine
    takes: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    batches: int = 0

    def work(self, registry: str, settings: Settings, batches: queue.Queue[Batch], stop: threading.Event) -> None:
        """Take what is newest, sample with it, until told to stop or until the engine is gone."""
        try:
            self.engine.wait_until_up()
            while not stop.is_set():
                self.take(registry)
                ((tokens, logprobs),) = self.engine.ask("sample", settings.samples, settings.tokens)
                step = int(self.takes[-1]["version"].removeprefix("step-"))
                batch = Batch(self.engine.name, step, tokens, logprobs)
                while not stop.is_set():
                    with contextlib.suppress(queue.Full):
                        batches.put(batch, timeout=0.1)
                        self.batches += 1
                        break
        except RefitError as error:
            self.problem = str(error)

    def take(self, registry: str) -> None:
        """Take the newest version, if it is newer. A version that ends meanwhile is no problem: the next one is there."""
        while True:
            try:
                (reply,) = self.engine.take("latest", registry)
            except RefitError:
                if not self.engine.alive:
                    raise
                continue
            if reply.taken:
                self.takes.append({"version": reply.version, "seconds": reply.seconds})
            if self.takes:
                return


def run(folder: Path, settings: Settings) -> tuple[list[Step], dict[str, Member], list[str]]:
    """The run: steps, engines by name, and what is wrong with those that live at its end."""
    console = Console(force_terminal=False, width=110)
    members: dict[str, Member] = {}
    batches: queue.Queue[Batch] = queue.Queue(1)
    stop, threads, steps = threading.Event(), list[threading.Thread](), list[Step]()
    letters = torch.tensor(json.loads((folder / "letters.json").read_text()))
    same = sync.Settings(samples=settings.samples, seed=settings.seed)

    def add(name: str) -> None:
        member = members[name] = Member(
            processes.Engine(name, folder, "examples.elastic_async_rl:questions", **sync.engine_settings(same))
        )
        threads.append(threading.Thread(target=member.work, args=(registry, settings, batches, stop), daemon=True))
        threads[-1].start()

    trainer = processes.Trainer(2, "examples.elastic_async_rl:TrainerRank", folder, asdict(settings))
    try:
        registry = trainer.tell("registry")[0]
        add("first")
        add("second")
        events: dict[int, tuple[str, Callable[[], None]]] = {
            settings.steps // 3: ("third is added", lambda: add("third")),
            settings.steps // 2: ("first is stopped", lambda: members["first"].engine.signal(signal.SIGSTOP)),
            2 * settings.steps // 3: ("second is killed", lambda: members["second"].engine.signal(signal.SIGKILL)),
        }
        for step in range(settings.steps):
            if step in events:
                said, act = events[step]
                console.print(f"          {said}")
                act()
            begin, thrown = time.perf_counter(), 0
            while step - (batch := batches.get(timeout=120)).step > MAX_AGE:
                thrown += 1
            waited = time.perf_counter() - begin
            reward = rewards(batch.tokens, letters)
            train_s, publish_s = trainer.tell("step", f"step-{step + 1}", batch.tokens, batch.logprobs, reward)[0]
            alive = [name for name, m in members.items() if not m.problem and not processes.stopped(m.engine.pids[0], 0.0)]
            row = Step(step, float(reward.mean()), batch.engine, step - batch.step, alive, thrown, waited, train_s, publish_s)
            steps.append(row)
            console.print(
                f"step {step:3d}  reward {row.reward:.3f}  by {row.engine:<6}  age {row.age}  publish {row.publish_s:.3f} s  "
                f"engines: {', '.join(alive)}"
            )
        members["first"].engine.signal(signal.SIGCONT)
        stop.set()
        for thread in threads:
            thread.join(120)
        return steps, members, problems_at_the_end(members, registry, f"step-{settings.steps}")
    finally:
        stop.set()
        for member in members.values():
            member.engine.close()
        trainer.close()


def problems_at_the_end(members: dict[str, Member], registry: str, last: str) -> list[str]:
    """Let all engines take the last version; what is wrong with those that should live, and with the one that should not."""
    problems, digests = [], []
    for name, member in members.items():
        if name == "second":
            if member.engine.alive:
                problems.append("the engine that was killed is alive")
            continue
        try:
            member.take(registry)
            (status,) = member.engine.status()
            (reply,) = member.engine.verify()
        except RefitError as error:
            problems.append(f"engine {name}: {error}")
            continue
        digests.append(reply.digests)
        if status.version != last:
            problems.append(f"engine {name} serves {status.version}, not {last}")
        if not member.batches:
            problems.append(f"engine {name} gave no batch")
    if len(digests) < 2 or any(d != digests[0] for d in digests):
        problems.append("the engines that live do not hold the same weights")
    return problems


def main(settings: Settings | None = None) -> int:
    """Run, record, judge."""
    settings = settings or Settings()
    set_up(settings.out)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin = time.perf_counter()
    folder = sync.make_model(sync.Settings(out=settings.out, seed=settings.seed))
    steps, members, problems = run(folder, settings)
    problems += rise_problems([s.reward for s in steps])
    takes = {name: member.takes for name, member in members.items()}
    (settings.out / "takes.json").write_text(json.dumps(takes, indent=1))
    told = ", ".join(f"{name}: {len(m.takes)} takes, {m.batches} batches" for name, m in members.items()) + "; records"
    return conclude(settings.out, asdict(settings), [asdict(s) for s in steps], problems, time.perf_counter() - begin, told)


app = cyclopts.App(help=(__doc__ or "").partition("\n")[0])


@app.default
def cli(settings: Annotated[Settings | None, Parameter()] = None) -> None:
    """Train the tiny model and judge the run."""
    sys.exit(main(settings))


if __name__ == "__main__":
    app()
