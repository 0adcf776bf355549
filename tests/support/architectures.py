"""Tiny engines of many architectures, refitted for real and compared with fresh ones: answers and every tensor."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from examples.support.tiny_model import save_tokenizer
from tests.engine.routes_support import CONFIGS, Entries, checkpoint_entries
from tests.support.engines import Answer, open_llm
from tests.support.more_architectures import MORE
from vllm_refit_ext.engine import inventory
from vllm_refit_ext.engine.offline import import_model

PROMPTS = ([5, 9, 3, 7, 11], [1, 2], [200, 30, 77, 41, 8, 8, 100])
LATENT = {"attention_config": {"backend": "CPU_MLA"}}
"""The latent attention that every CPU runs, in float32; one with AMX would take its own, in bfloat16 alone."""
GATED_DELTA = {"dtype": "bfloat16"}
"""A CPU's gated delta rule knows no other."""
SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek-v2": LATENT,
    "deepseek-v3": LATENT,
    "qwen3-next": GATED_DELTA,
    "qwen3.5": GATED_DELTA,
}
PROCESSORS = {"qwen2.5-vl": "Qwen2_5_VLProcessor", "qwen3-vl-moe": "Qwen3VLProcessor"}
VIDEO = {"qwen2.5-vl": "Qwen2VLVideoProcessor", "qwen3-vl-moe": "Qwen3VLVideoProcessor"}
SPREAD = 0.08
"""Standard deviation of weights: far enough from zero that other weights give other tokens."""


ALL = CONFIGS | MORE


def config(name: str) -> Any:
    """A tiny transformers config of one architecture of `ALL`, with vLLM's name for it."""
    architecture, make = ALL[name]
    made = make()
    made.architectures = [architecture]
    return made


@functools.cache
def entries_of(name: str) -> Entries:
    """The checkpoint's tensors, made once: vLLM patches some transformers classes when it builds a model."""
    return checkpoint_entries(config(name))


def _save_processor(name: str, folder: Path) -> dict[str, int]:
    """Write the tokenizer and processor that vLLM wants of a vision-language model; returns the ids of its special tokens."""
    save_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    special = [f"<|{n}|>" for n in ("image_pad", "video_pad", "vision_start", "vision_end")]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    parts = transformers.Qwen2VLImageProcessor(), tokenizer, getattr(transformers, VIDEO[name])()
    getattr(transformers, PROCESSORS[name])(*parts).save_pretrained(folder)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return dict(zip(names, tokenizer.convert_tokens_to_ids(special), strict=True))


def checkpoint(name: str, folder: Path, seed: int) -> Path:
    """A checkpoint of random weights of architecture `name` in `folder`."""
    hf_config = config(name)
    hf_config.dtype = torch.float32
    for field, value in _save_processor(name, folder).items() if name in PROCESSORS else ():
        setattr(hf_config, field, value)
    hf_config.save_pretrained(folder)
    save_file(weights(entries_of(name), seed), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def weights(entries: Entries, seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights; what scales or decays is near one, so that values neither vanish nor blow up."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, (shape, _) in entries.items():
        near_one = name.endswith(("norm.weight", "layernorm.weight", "A_log", ".D")) or "norm" in name
        made[name] = torch.randn(shape, generator=generator) * SPREAD + (1.0 if near_one else 0.0)
    return made


def open_engine(folder: Path, extension: str, name: str = "") -> Any:
    """An engine of this process for architecture `name`, without a tokenizer."""
    vision: dict[str, Any] = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "skip_mm_profiling": True}
    settings = vision if name in PROCESSORS else {"skip_tokenizer_init": True}
    settings |= {"max_model_len": 64, "max_num_seqs": 2} | SETTINGS.get(name, {})
    import_model(folder)
    return open_llm(folder, extension=extension, in_process=True, **settings)


def model_of(llm: Any) -> torch.nn.Module:
    model: torch.nn.Module = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    return model


def ask(llm: Any) -> list[Answer]:
    """Greedy answers to prompts of token ids, one at a time."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, prompt_logprobs=0, detokenize=False)
    found = []
    for prompt in PROMPTS:
        output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
        first = output.outputs[0]
        report = tuple(t[i].logprob for i, t in zip(prompt[1:], output.prompt_logprobs[1:], strict=True))
        tokens = tuple(first.token_ids)
        found.append(Answer(tokens, tuple(t[i].logprob for i, t in zip(tokens, first.logprobs, strict=True)), report))
    return found


def contents(llm: Any) -> dict[str, bytes]:
    """Every tensor that the engine's model holds, by the names of `inventory`, but for addresses of oneDNN's packed weights."""
    return {
        name: tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, tensor in inventory.tensors(model_of(llm)).items()
        if tensor.numel() and not name.endswith("handler_tensor")
    }
