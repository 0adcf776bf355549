"""A checkpoint of a published shape that takes no disk: names, shapes and offsets are real, the weights are a hole in the file.

Megatron-Bridge finds its names in the index, vLLM starts from it with `load_format=dummy`, and nobody reads the numbers.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from examples.support.tiny_model import save_tokenizer

FILE = "model-00001-of-00001.safetensors"


def write_sparse_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """Write what a Qwen3-MoE model with `config` needs to `folder`, its BF16 file sparse, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)
    header, end = {}, 0
    for name, shape in shapes(config).items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        file.truncate(8 + len(text) + end)
    index = {"metadata": {"total_size": end}, "weight_map": dict.fromkeys(header, FILE)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Qwen3-MoE checkpoint."""
    hidden, vocab, head = config["hidden_size"], config["vocab_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    inner, experts = config["moe_intermediate_size"], config["num_experts"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        attention = {"q_proj": (heads, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, heads)}
        rows = {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
        rows |= {f"self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
        rows |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        rows["mlp.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            rows |= {f"mlp.experts.{expert}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            rows[f"mlp.experts.{expert}.down_proj.weight"] = (hidden, inner)
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in rows.items()}
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
