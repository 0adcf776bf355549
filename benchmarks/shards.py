"""Synthetic shards in the trainer's format, at a published model's full shapes, and the config of an engine of the same model."""

from __future__ import annotations

from typing import Any

import torch

from vllm_refit_ext.core.digest import row_strides
from vllm_refit_ext.core.manifest import TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements

QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Qwen3-30B-A3B as published."""
MODELS = {"qwen3-30b-a3b": QWEN3_30B}


class Shards:
    """One trainer rank that holds a whole Qwen3-MoE as Megatron-core does: query, key and value interleaved by groups in one
    matrix, gate and up rows of an expert in one matrix. BF16, random.

    specs: HF name -> entry. placements: HF boxes in the buffers. tensors: the buffers, in order.
    """

    def __init__(self, config: dict[str, Any], device: torch.device | str) -> None:
        self.config, self.device = config, torch.device(device)
        self.specs: dict[str, TensorSpec] = {}
        self.tensors: list[torch.Tensor] = []
        self._buffers: list[Buffer] = []
        self._rows: list[Placement] = []
        h, vocab = config["hidden_size"], config["vocab_size"]
        self._whole("embedding.word_embeddings.weight", "model.embed_tokens.weight", (vocab, h))
        for layer in range(config["num_hidden_layers"]):
            self._layer(layer)
        self._whole("decoder.final_layernorm.weight", "model.norm.weight", (h,))
        self._whole("output_layer.weight", "lm_head.weight", (vocab, h))
        self.placements = Placements.from_rows(self._buffers, self._rows, list(self.specs))

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(t.nbytes for t in self.tensors)

    def _layer(self, layer: int) -> None:
        c = self.config
        h, dim, inner = c["hidden_size"], c["head_dim"], c["moe_intermediate_size"]
        heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        self._whole(f"{ours}.self_attention.linear_qkv.layer_norm_weight", f"{theirs}.input_layernorm.weight", (h,))
        per = heads // groups
        qkv = self._buffer(f"{ours}.self_attention.linear_qkv.weight", ((heads + 2 * groups) * dim, h))
        for group in range(groups):
            at = group * (per + 2) * dim
            for part, first, rows in (("q", 0, per), ("k", per, 1), ("v", per + 1, 1)):
                count = heads if part == "q" else groups
                self._rows_of(
                    f"{theirs}.self_attn.{part}_proj.weight",
                    (count * dim, h),
                    group * rows * dim,
                    rows * dim,
                    qkv,
                    at + first * dim,
                )
        for part in ("q", "k"):
            self._whole(f"{ours}.self_attention.{part}_layernorm.weight", f"{theirs}.self_attn.{part}_norm.weight", (dim,))
        self._whole(f"{ours}.self_attention.linear_proj.weight", f"{theirs}.self_attn.o_proj.weight", (h, heads * dim))
        self._whole(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", (h,))
        self._whole(f"{ours}.mlp.router.weight", f"{theirs}.mlp.gate.weight", (c["num_experts"], h))
        for e in range(c["num_experts"]):
            name = f"{theirs}.mlp.experts.{e}"
            fused = self._buffer(f"{ours}.mlp.experts.linear_fc1.weight{e}", (2 * inner, h))
            self._rows_of(f"{name}.gate_proj.weight", (inner, h), 0, inner, fused, 0)
            self._rows_of(f"{name}.up_proj.weight", (inner, h), 0, inner, fused, inner)
            self._whole(f"{ours}.mlp.experts.linear_fc2.weight{e}", f"{name}.down_proj.weight", (h, inner))

    def _buffer(self, name: str, shape: tuple[int, ...]) -> int:
        self._buffers.append(Buffer(name, 0, "bfloat16", shape))
        self.tensors.append(torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(0, 0.02))
        return len(self.tensors) - 1

    def _whole(self, name: str, hf_name: str, shape: tuple[int, ...]) -> None:
        number = self._buffer(name, shape)
        self.specs[hf_name] = TensorSpec(shape, "bfloat16")
        self._rows.append(Placement(hf_name, number, (0,) * len(shape), shape, 0, tuple(2 * s for s in row_strides(shape))))

    def _rows_of(self, hf_name: str, shape: tuple[int, int], first: int, rows: int, buffer: int, at: int) -> None:
        """Rows first..first+rows of a checkpoint tensor lie at row `at` of a buffer."""
        self.specs[hf_name] = TensorSpec(shape, "bfloat16")
        width = shape[1]
        self._rows.append(Placement(hf_name, buffer, (first, 0), (first + rows, width), 2 * at * width, (2 * width, 2)))

    def gathered(self) -> list[tuple[str, torch.Tensor]]:
        """HF tensors as a bridge's export gives them, in order: views where a shard holds them whole, new tensors where it
        does not."""
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in self.specs}
        for row in self._rows:
            tensor = self.tensors[row.buffer]
            if len(row.lo) == 1:
                parts[row.tensor].append(tensor)
            else:
                at = row.offset // (2 * tensor.shape[1])
                parts[row.tensor].append(tensor[at : at + row.hi[0] - row.lo[0]])
        return [(name, found[0] if len(found) == 1 else torch.cat(found)) for name, found in parts.items()]
