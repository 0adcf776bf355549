"""The matrices of a model, from its Hugging Face configuration alone: names, sizes, and how tensor parallelism cuts them.

The preflight uses this to say which size does not divide, which MXFP8 block a cut would split, and how many bytes a rank holds.
It is not the plan: the plan reads the models themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from megatron_sender.config_load import show
from vllm_refit_ext.core.errors import Problem

Cut = Literal["column", "row", "vocab", "replicated", "expert_column", "expert_row"]
WHERE = "model.hf_config"
FAMILIES = frozenset(("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "nemotron_h"))
"""Values of `model_type` whose module names are known here, so that an ignore pattern can be checked against them."""


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """One weight matrix [rows, columns] (columns is K), or `copies` equal ones: the experts of a layer."""

    name: str
    rows: int
    columns: int
    cut: Cut
    layer: int | None = None
    copies: int = 1
    fused: str = ""
    """Name of the engine's module that joins this matrix with its siblings, when there is one."""

    @property
    def module(self) -> str:
        """Name of the engine's module that holds this matrix: itself, what it is fused into, or all experts of the layer."""
        if self.cut.startswith("expert"):
            return self.name[: self.name.index(".experts.") + len(".experts")]
        return self.fused or self.name

    @property
    def elements(self) -> int:
        """Weight elements of all copies."""
        return self.rows * self.columns * self.copies


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the preflight needs to know of a model. Sizes are whole-model sizes; zero means that the model has no such part."""

    model_type: str
    hidden: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    ffn: int
    experts: int
    expert_ffn: int
    mtp_layers: int
    mamba_heads: int
    mamba_groups: int
    mla: bool
    gated: bool
    matrices: tuple[Matrix, ...]


class _Reader:
    """Reads sizes from a configuration and collects what is missing or wrong, under the names that the user wrote."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested = config.get("text_config")
        self.config = nested if isinstance(nested, Mapping) else config
        self.where = f"{WHERE}.text_config" if isinstance(nested, Mapping) else WHERE
        self.problems: list[Problem] = []

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = 1 << 24) -> int:
        """The first of `names` that is set, an integer in [least, most]; `default` when none is. A problem: `least` or 1."""
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                wanted = f"an integer {least}..{most}"
                self.problems.append(Problem("not a size", where=f"{self.where}.{name}", got=show(value), wanted=wanted))
                return max(least, 1)
            return value
        if default is None:
            self.problems.append(Problem("the configuration lacks a size", where=f"{self.where}.{names[0]}", wanted="an integer"))
            return 1
        return default

    def flag(self, name: str) -> bool:
        value = self.config.get(name, False)
        if not isinstance(value, bool):
            self.problems.append(Problem("not a flag", where=f"{self.where}.{name}", got=show(value), wanted="true or false"))
        return value is True

    def pattern(self) -> str:
        """Nemotron-H's layers as one letter each: M Mamba, E experts, * attention, - dense."""
        value = self.config.get("hybrid_override_pattern")
        if not isinstance(value, str) or not value or set(value) - set("ME*-") or len(value) > 1000:
            wanted = "letters M, E, * and -, one a layer, at most 1000"
            name = f"{self.where}.hybrid_override_pattern"
            self.problems.append(Problem("not a layer pattern", where=name, got=show(value), wanted=wanted))
            return "*"
        return value


def read_model(config: Mapping[str, Any]) -> tuple[ModelShape | None, list[Problem]]:
    """The shape of the model that `config` (a Hugging Face configuration) describes, or everything that is wrong with it."""
    reader = _Reader(config)
    family = reader.config.get("model_type")
    if not isinstance(family, str):
        reader.problems.append(Problem("the configuration lacks its type", where=f"{reader.where}.model_type", wanted="text"))
        family = ""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        reader.problems.append(
            Problem("no architecture is named", where=f"{WHERE}.architectures", got=show(architectures), wanted="a list of names")
        )
    shape = _nemotron_h(reader) if family == "nemotron_h" else _decoder(reader, family)
    # The same size is read once per layer, so a wrong one is found many times.
    problems = list(dict.fromkeys(reader.problems))
    return (None, problems) if problems else (shape, [])


def _attention(r: _Reader, prefix: str, layer: int | None) -> Iterator[Matrix]:
    hidden, heads = r.size("hidden_size"), r.size("num_attention_heads")
    kv_heads = r.size("num_key_value_heads", default=heads)
    head = r.size("head_dim", default=max(1, hidden // heads))
    for name, rows in (("q_proj", heads * head), ("k_proj", kv_heads * head), ("v_proj", kv_heads * head)):
        yield Matrix(name=f"{prefix}.{name}", rows=rows, columns=hidden, cut="column", layer=layer, fused=f"{prefix}.qkv_proj")
    yield Matrix(name=f"{prefix}.o_proj", rows=hidden, columns=heads * head, cut="row", layer=layer)


def _latent_attention(r: _Reader, prefix: str, layer: int | None) -> Iterator[Matrix]:
    hidden, heads = r.size("hidden_size"), r.size("num_attention_heads")
    q_rank, kv_rank = r.size("q_lora_rank", default=0), r.size("kv_lora_rank")
    nope, rope, value = r.size("qk_nope_head_dim"), r.size("qk_rope_head_dim"), r.size("v_head_dim")
    query_rows = heads * (nope + rope)
    fused = f"{prefix}.fused_qkv_a_proj" if q_rank else ""
    if q_rank:
        yield Matrix(name=f"{prefix}.q_a_proj", rows=q_rank, columns=hidden, cut="replicated", layer=layer, fused=fused)
        yield Matrix(name=f"{prefix}.q_b_proj", rows=query_rows, columns=q_rank, cut="column", layer=layer)
    else:
        yield Matrix(name=f"{prefix}.q_proj", rows=query_rows, columns=hidden, cut="column", layer=layer)
    down = f"{prefix}.kv_a_proj_with_mqa"
    yield Matrix(name=down, rows=kv_rank + rope, columns=hidden, cut="replicated", layer=layer, fused=fused)
    yield Matrix(name=f"{prefix}.kv_b_proj", rows=heads * (nope + value), columns=kv_rank, cut="column", layer=layer)
    yield Matrix(name=f"{prefix}.o_proj", rows=hidden, columns=heads * value, cut="row", layer=layer)


def _ffn(prefix: str, hidden: int, inner: int, layer: int | None, *, gated: bool = True, experts: int = 0) -> Iterator[Matrix]:
    """A feed-forward part; with `experts`, that many equal ones, named by expert 0."""
    column: Cut = "expert_column" if experts else "column"
    row: Cut = "expert_row" if experts else "row"
    copies = experts or 1
    for name in ("gate_proj", "up_proj") if gated else ("up_proj",):
        fused = f"{prefix}.gate_up_proj" if gated and not experts else ""
        yield Matrix(name=f"{prefix}.{name}", rows=inner, columns=hidden, cut=column, layer=layer, copies=copies, fused=fused)
    yield Matrix(name=f"{prefix}.down_proj", rows=hidden, columns=inner, cut=row, layer=layer, copies=copies)


def _ends(r: _Reader, embedding: str) -> Iterator[Matrix]:
    hidden, vocab = r.size("hidden_size"), r.size("vocab_size")
    yield Matrix(name=embedding, rows=vocab, columns=hidden, cut="vocab")
    if not r.flag("tie_word_embeddings"):
        yield Matrix(name="lm_head", rows=vocab, columns=hidden, cut="vocab")


def _moe_layers(r: _Reader, layers: int, experts: int) -> set[int]:
    """Which layers have experts. The rules are those of the families' own configurations."""
    if not experts:
        return set()
    first, step = r.size("first_k_dense_replace", default=0, least=0), r.size("decoder_sparse_step", default=1)
    dense = r.config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        wanted = "a list of layer numbers"
        r.problems.append(Problem("not layers", where=f"{r.where}.mlp_only_layers", got=show(dense), wanted=wanted))
        dense = []
    return {layer for layer in range(first, layers) if layer not in dense and (layer + 1) % step == 0}


def _decoder(r: _Reader, family: str) -> ModelShape:
    hidden, layers, heads = r.size("hidden_size"), r.size("num_hidden_layers", most=1000), r.size("num_attention_heads")
    experts = r.size("num_experts", "n_routed_experts", "num_local_experts", default=0, least=0, most=65536)
    expert_ffn = r.size("moe_intermediate_size", "intermediate_size") if experts else 0
    with_experts = _moe_layers(r, layers, experts)
    dense = len(with_experts) < layers
    ffn = r.size("intermediate_size") if dense else 0
    shared = r.size("n_shared_experts", default=0, least=0) * expert_ffn
    shared = r.size("shared_expert_intermediate_size", default=shared, least=0)
    shared_name = "shared_experts" if r.config.get("n_shared_experts") is not None else "shared_expert"
    mla = r.config.get("kv_lora_rank") is not None
    mtp = r.size("num_nextn_predict_layers", default=0, least=0, most=100)

    def block(prefix: str, layer: int | None, *, sparse: bool) -> Iterator[Matrix]:
        attention = _latent_attention if mla else _attention
        yield from attention(r, f"{prefix}.self_attn", layer)
        if not sparse:
            yield from _ffn(f"{prefix}.mlp", hidden, ffn or expert_ffn, layer)
            return
        yield Matrix(name=f"{prefix}.mlp.gate", rows=experts, columns=hidden, cut="replicated", layer=layer)
        yield from _ffn(f"{prefix}.mlp.experts.0", hidden, expert_ffn, layer, experts=experts)
        if shared:
            yield from _ffn(f"{prefix}.mlp.{shared_name}", hidden, shared, layer)
        if family == "qwen2_moe":
            yield Matrix(name=f"{prefix}.mlp.shared_expert_gate", rows=1, columns=hidden, cut="replicated", layer=layer)

    matrices = list(_ends(r, "model.embed_tokens"))
    for layer in range(layers):
        matrices += block(f"model.layers.{layer}", layer, sparse=layer in with_experts)
    for layer in range(layers, layers + mtp):
        prefix = f"model.layers.{layer}"
        matrices.append(Matrix(name=f"{prefix}.eh_proj", rows=hidden, columns=2 * hidden, cut="replicated", layer=layer))
        matrices += block(prefix, layer, sparse=bool(experts))
    return ModelShape(
        model_type=family,
        hidden=hidden,
        layers=layers,
        vocab=r.size("vocab_size"),
        heads=heads,
        kv_heads=heads if mla else r.size("num_key_value_heads", default=heads),
        ffn=ffn,
        experts=experts,
        expert_ffn=expert_ffn,
        mtp_layers=mtp,
        mamba_heads=0,
        mamba_groups=0,
        mla=mla,
        gated=True,
        matrices=tuple(matrices),
    )


def _nemotron_h(r: _Reader) -> ModelShape:
    hidden, heads = r.size("hidden_size"), r.size("num_attention_heads")
    mamba_heads, mamba_head = r.size("mamba_num_heads"), r.size("mamba_head_dim")
    groups, state = r.size("n_groups"), r.size("ssm_state_size")
    pattern = r.pattern()
    experts = r.size("n_routed_experts", most=65536) if "E" in pattern else 0
    expert_ffn = r.size("moe_intermediate_size") if experts else 0
    latent = r.size("moe_latent_size", default=hidden)
    shared = r.size("moe_shared_expert_intermediate_size") * r.size("n_shared_experts", default=1, least=0) if experts else 0
    mtp = r.size("num_nextn_predict_layers", default=0, least=0, most=100)
    inner = mamba_heads * mamba_head

    def block(kind: str, prefix: str, layer: int | None) -> Iterator[Matrix]:
        if kind == "M":
            rows = 2 * inner + 2 * groups * state + mamba_heads
            yield Matrix(name=f"{prefix}.in_proj", rows=rows, columns=hidden, cut="column", layer=layer)
            yield Matrix(name=f"{prefix}.out_proj", rows=hidden, columns=inner, cut="row", layer=layer)
        elif kind == "*":
            yield from _attention(r, prefix, layer)
        elif kind == "-":
            yield from _ffn(prefix, hidden, r.size("intermediate_size"), layer, gated=False)
        else:
            yield Matrix(name=f"{prefix}.gate", rows=experts, columns=hidden, cut="replicated", layer=layer)
            if latent != hidden:
                yield Matrix(name=f"{prefix}.fc1_latent_proj", rows=latent, columns=hidden, cut="replicated", layer=layer)
                yield Matrix(name=f"{prefix}.fc2_latent_proj", rows=hidden, columns=latent, cut="replicated", layer=layer)
            yield from _ffn(f"{prefix}.experts.0", latent, expert_ffn, layer, gated=False, experts=experts)
            if shared:
                yield from _ffn(f"{prefix}.shared_experts", hidden, shared, layer, gated=False)

    matrices = list(_ends(r, "backbone.embeddings"))
    for layer, kind in enumerate(pattern):
        matrices += block(kind, f"backbone.layers.{layer}.mixer", layer)
    if mtp:
        drafting = r.config.get("mtp_hybrid_override_pattern", "*E" if experts else "*")
        if not isinstance(drafting, str) or set(drafting) - set("ME*-" if experts else "M*-"):
            where = f"{r.where}.mtp_hybrid_override_pattern"
            r.problems.append(Problem("not a layer pattern", where=where, got=show(drafting), wanted="letters M, E, * and -"))
            drafting = ""
        joint = Matrix(name="mtp.layers.0.eh_proj", rows=hidden, columns=2 * hidden, cut="replicated", layer=len(pattern))
        matrices.append(joint)
        for index, kind in enumerate(drafting * mtp):
            matrices += block(kind, f"mtp.layers.{index}.mixer", len(pattern) + index // len(drafting))
    return ModelShape(
        model_type="nemotron_h",
        hidden=hidden,
        layers=len(pattern),
        vocab=r.size("vocab_size"),
        heads=heads,
        kv_heads=r.size("num_key_value_heads", default=heads),
        ffn=r.size("intermediate_size") if "-" in pattern else 0,
        experts=experts,
        expert_ffn=expert_ffn,
        mtp_layers=mtp,
        mamba_heads=mamba_heads if "M" in pattern else 0,
        mamba_groups=groups if "M" in pattern else 0,
        mla=False,
        gated=False,
        matrices=tuple(matrices),
    )
