"""Colocated synchronous reinforcement learning: a real Megatron trainer and a real vLLM engine on one machine.

    python examples/colocated_sync_rl.py                          # on a CPU, about two minutes
    python examples/colocated_sync_rl.py --device cuda [--mxfp8 [--prequantize]]  # both on one GPU, weights read by CUDA IPC

A tiny Qwen3-MoE with random weights learns to write lower-case letters. Each step: the engine samples, every sampled answer is
rewarded with the share of its tokens that are lower-case letters, Megatron-core takes one GRPO step on two ranks with the
experts cut over them, and the new weights are handed to the running engine. The engine's log-probabilities of what it sampled are
compared with the trainer's: a KL above rounding says that the engine does not hold the trainer's weights.

Writes a plot and a JSON record. Exits with 1 when the reward did not rise or the KL is too large.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import cyclopts
import torch
import torch.distributed as dist
from cyclopts import Parameter
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script, from any folder

from examples.support.grpo import PROMPT, PROMPTS, Trainer, advantages, mean_kl, rewards, rise_problems
from examples.support.launch import run_ranks
from examples.support.record import conclude, set_up
from examples.support.tiny_model import import_megatron, save_model
from vllm_refit_ext.client import LLMClient
from vllm_refit_ext.sender import RefitSender, SenderConfig
from vllm_refit_ext.sender.residency import Residency

EXTENSION = "vllm_refit_ext.RefitWorkerExtension"
MAX_KL = 1e-4
"""Trainer and engine run different kernels. With equal weights in float32 the mean KL was 1e-12 or less in every run; with
weights that are a few steps old it is above 1e-3."""
MAX_KL_CUDA = 1e-3
"""Some kernels of a GPU round to TF32."""
MAX_KL_MXFP8 = 0.1
"""The engine's weights then have four significant bits, and the trainer's eight."""


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
    out: folder for the plot, the record and the model.
    device: `cuda` puts trainer and engine on one GPU, with one trainer rank, since two NCCL ranks can't share a GPU.
    mxfp8: the engine holds its matrices as MXFP8; needs `--device cuda`, or an extension that lets a CPU multiply them.
    prequantize: the trainer quantises its own shards, and MXFP8 is sent; with `--mxfp8`.
    residency: the trainer's gradients and optimizer state leave its device before a refit, and its parameters after it, until the
        next step trains.
    extension: the engine's worker extension.
    drill: `stale` stops handing over weights after a third of the steps, to show that the KL finds it.
    """

    steps: int = 24
    samples: int = 16
    tokens: int = 12
    learning_rate: float = 2e-3
    seed: int = 1
    out: Path = Path("out/colocated")
    device: Literal["cpu", "cuda"] = "cpu"
    mxfp8: bool = False
    prequantize: bool = False
    residency: bool = True
    extension: str = EXTENSION
    drill: Literal["none", "stale"] = "none"

    @property
    def dtype(self) -> str:
        """Of the weights on both sides: MXFP8 engines multiply BF16 activations."""
        return "bfloat16" if self.mxfp8 else "float32"

    @property
    def max_kl(self) -> float:
        """The largest KL that rounding explains."""
        return MAX_KL_MXFP8 if self.mxfp8 else MAX_KL if self.device == "cpu" else MAX_KL_CUDA


@dataclass
class Step:
    """One row of the table. `bytes`: what was sent. `refit_s`: from the call until every engine rank served the version."""

    step: int
    reward: float
    kl: float
    refit_s: float
    bytes: int
    version: str
    sample_s: float
    train_s: float


def engine_settings(settings: Settings) -> dict[str, Any]:
    """Arguments of vLLM's `LLM` for the tiny model."""
    values = {
        "worker_extension_cls": settings.extension,
        "dtype": settings.dtype,
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": len(PROMPTS) * settings.samples,
        "kv_cache_memory_bytes": 64 << 20,
        "seed": settings.seed,
    }
    on_gpu = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.3} if settings.device == "cuda" else {}
    return values | on_gpu | ({"quantization": "mxfp8"} if settings.mxfp8 else {})


def sampled(outputs: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's outputs as tokens [answers, prompt + answer] and log-probabilities [answers, answer] of the answers' tokens."""
    tokens, logprobs = [], []
    for request in outputs:
        for answer in request.outputs:
            tokens.append([*request.prompt_token_ids, *answer.token_ids])
            logprobs.append([entry[t].logprob for entry, t in zip(answer.logprobs, answer.token_ids, strict=True)])
    return torch.tensor(tokens), torch.tensor(logprobs)


class Engine:
    """The vLLM engine, held by trainer rank 0; its worker is a process of its own."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        from vllm import LLM, SamplingParams

        self.llm = LLM(model=str(folder), **engine_settings(settings))
        self.prompts = [self.llm.get_tokenizer().encode(p, add_special_tokens=False) for p in PROMPTS]
        self.sampling = SamplingParams(
            n=settings.samples, temperature=1.0, max_tokens=settings.tokens, ignore_eos=True, logprobs=0
        )

    def sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [answers, prompt + answer] and the engine's log-probabilities [answers, answer] of the answers' tokens."""
        prompts = [{"prompt_token_ids": p} for p in self.prompts]
        return sampled(self.llm.generate(prompts, self.sampling, use_tqdm=False))

    def close(self) -> None:
        """End the engine's processes."""
        self.llm.llm_engine.engine_core.shutdown()


def run_rank(folder: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    """What each trainer rank does. `values` are those of `Settings`, since ranks share plain data only. Returns the steps."""
    from megatron_sender import MegatronSender

    settings, rank = Settings(**values), dist.get_rank()
    trainer = Trainer(
        folder, learning_rate=settings.learning_rate, seed=settings.seed, dtype=settings.dtype, device=settings.device
    )
    engine = Engine(folder, settings) if rank == 0 else None
    config = SenderConfig(
        wire="ipc" if settings.device == "cuda" else "shm", prequantize=settings.prequantize, hash_reloaded=True
    )
    residency = Residency(trainer.chunks, trainer.optimizer) if settings.residency else None
    try:
        sender = MegatronSender(trainer.chunks, trainer.bridge, LLMClient(engine.llm) if engine else None, config)
        return train(trainer, sender, engine, folder, settings, residency)
    finally:
        if engine:
            engine.close()


class Learner(Protocol):
    """Whatever takes a GRPO step on its rank's share."""

    def step(self, tokens: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        """tokens [n, length], advantage [n] -> log-probabilities of the answers' tokens before the step, [n, answer]."""
        ...


def train(
    trainer: Learner,
    sender: RefitSender,
    engine: Engine | None,
    folder: Path,
    settings: Settings,
    residency: Residency | None = None,
) -> list[dict[str, Any]]:
    """The loop: sample, reward, step, refit. Returns the steps."""
    logging.getLogger("vllm_refit_ext").setLevel(logging.WARNING)  # the table has what its line a refit says
    rank = dist.get_rank()
    console = Console(force_terminal=False, width=110)
    plan = sender.prepare()
    if rank == 0:
        console.print(
            f"plan: {len(plan)} moves, "
            + ", ".join(f"trainer {e.source} -> engine {e.target}: {e.nbytes} B" for e in plan.edges())
        )
        console.print(
            f"{'step':>4} {'reward':>7} {'KL':>9} {'refit s':>8} {'bytes':>9} {'version':>8} {'sample s':>9} {'train s':>8}"
        )
    answers = len(PROMPTS) * settings.samples
    letters = torch.tensor(json.loads((folder / "letters.json").read_text()))
    report = sender.refit("step-0")
    steps: list[Step] = []
    for step in range(settings.steps):
        begin = time.perf_counter()
        tokens = torch.empty(answers, PROMPT + settings.tokens, dtype=torch.int64)
        logprobs = torch.empty(answers, settings.tokens)
        if engine:
            tokens, logprobs = engine.sample()
        dist.broadcast(tokens, 0)
        dist.broadcast(logprobs, 0)
        sampled = time.perf_counter()
        reward = rewards(tokens, letters)
        mine = torch.arange(rank, answers, dist.get_world_size())
        if residency:
            residency.restore()
        own = trainer.step(tokens[mine], advantages(reward, settings.samples)[mine])
        kl = torch.tensor([mean_kl(logprobs[mine], own)], dtype=torch.float64)
        dist.all_reduce(kl)
        trained = time.perf_counter()
        served = report
        if settings.drill != "stale" or step < settings.steps // 3:
            with residency.handing_over() if residency else contextlib.nullcontext():
                report = sender.refit(f"step-{step + 1}")
        row = Step(
            step,
            float(reward.mean()),
            float(kl) / dist.get_world_size(),
            served.seconds["total"],
            served.nbytes,
            served.version,
            sampled - begin,
            trained - sampled,
        )
        steps.append(row)
        if rank == 0:
            console.print(
                f"{row.step:4d} {row.reward:7.3f} {row.kl:9.1e} {row.refit_s:8.3f} {row.bytes:9d} {row.version:>8} "
                f"{row.sample_s:9.2f} {row.train_s:8.2f}"
            )
    if residency:
        residency.restore()
    if settings.drill == "none":
        compared = sender.verify()
        if rank == 0:
            console.print(f"verify: {compared} tensor digests of the engine equal the trainer's")
    sender.close()
    return [asdict(step) for step in steps]


def verdict(steps: list[Step], max_kl: float = MAX_KL) -> list[str]:
    """What is wrong with the run; empty when it learned and the engine always held the trainer's weights."""
    problems = rise_problems([s.reward for s in steps])
    worst = max(steps, key=lambda s: s.kl)
    if not worst.kl <= max_kl:
        problems.append(
            f"the engine does not hold the trainer's weights: KL {worst.kl:.1e} at step {worst.step} (at most {max_kl:.0e})"
        )
    return problems


def plot(steps: list[Step], path: Path, settings: Settings, trainer: str) -> None:
    """Reward, KL and refit time by step, as a PNG. trainer: what the title calls it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(7, 7), sharex=True)
    x = [s.step for s in steps]
    axes[0].plot(x, [s.reward for s in steps], marker="o", markersize=3)
    axes[0].set_ylabel("mean reward")
    axes[1].semilogy(x, [max(s.kl, 1e-16) for s in steps], marker="o", markersize=3)
    axes[1].axhline(settings.max_kl, color="red", linestyle="--", linewidth=1, label="limit")
    axes[1].set_ylabel("KL(engine || trainer)")
    axes[1].legend()
    axes[2].plot(x, [1e3 * s.refit_s for s in steps], marker="o", markersize=3)
    axes[2].set_ylabel("refit, ms")
    axes[2].set_xlabel("step")
    held = "a GPU" if settings.device == "cuda" else "a CPU"
    figure.suptitle(f"Colocated synchronous RL: {trainer} to vLLM TP1{' in MXFP8' if settings.mxfp8 else ''}, on {held}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def make_model(settings: Settings) -> Path:
    """The tiny checkpoint, with the token ids of the lower-case letters beside it."""
    from transformers import AutoTokenizer

    # Experts of 128 on a GPU: Marlin takes no fewer.
    sizes = {"moe_intermediate_size": 128} if settings.device == "cuda" else {}
    folder = save_model("qwen3_moe", settings.out.resolve() / "model", seed=settings.seed, dtype=settings.dtype, **sizes)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    letters = [tokenizer.encode(chr(c), add_special_tokens=False)[0] for c in range(ord("a"), ord("z") + 1)]
    (folder / "letters.json").write_text(json.dumps(letters))
    return folder


def main(settings: Settings | None = None) -> int:
    """Run, record, judge."""
    settings = settings or Settings()
    if settings.mxfp8 and settings.device == "cpu" and settings.extension == EXTENSION:
        raise SystemExit("--mxfp8 needs --device cuda: vLLM has no MXFP8 kernels for a CPU")
    if settings.device == "cpu":
        return judge(settings, "Megatron EP2", lambda folder: run_ranks(run_rank, 2, folder, asdict(settings), timeout=1200)[0])

    def run(folder: Path) -> list[dict[str, Any]]:
        # In this process: a rank forked after something has looked for GPUs could not use one.
        import_megatron()
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        found = run_rank(folder, asdict(settings))
        dist.destroy_process_group()
        return found

    return judge(settings, "Megatron on one rank", run)


def judge(settings: Settings, trainer: str, run: Callable[[Path], list[dict[str, Any]]]) -> int:
    """Make the model, `run` with its folder, plot, record. Returns the exit status."""
    set_up(settings.out)
    begin = time.perf_counter()
    found = run(make_model(settings))
    steps = [Step(**step) for step in found]
    problems = verdict(steps, settings.max_kl)
    seconds = time.perf_counter() - begin
    plot(steps, settings.out / "plot.png", settings, trainer)
    return conclude(settings.out, asdict(settings), found, problems, seconds, "plot and record")


app = cyclopts.App(help=(__doc__ or "").partition("\n")[0])


@app.default
def cli(settings: Annotated[Settings | None, Parameter()] = None) -> None:
    """Train the tiny model and judge the run."""
    sys.exit(main(settings))


if __name__ == "__main__":
    app()
