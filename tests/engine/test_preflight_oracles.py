"""The preflight's own knowledge, held against the code that it speaks of: transformers, vLLM and megatron-core."""

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_sender.config import Parallelism
from megatron_sender.preflight_ignore import is_ignored
from megatron_sender.preflight_model import read_model
from megatron_sender.preflight_pipeline import parse_layout, stage_layers
from tests.unit.test_recipes_models import L1, MODELS, NAMES, PACKED, shards

pytestmark = pytest.mark.engine


def meta_model(config):
    import torch
    import transformers

    built = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_matrices_are_those_of_the_transformers_model(path):
    config = json.loads(path.read_text())
    shape, _ = read_model(config)
    real = meta_model(config)
    mine = {m.name: (m.rows, m.columns) for m in shape.matrices if m.layer is None or m.layer < shape.layers}
    # transformers calls Nemotron-H's stack "model", its checkpoints call it "backbone".
    if shape.model_type == "nemotron_h":
        mine = {name.replace("backbone.", "model."): size for name, size in mine.items()}
    theirs = {name.removesuffix(".weight"): tuple(p.shape) for name, p in real.named_parameters() if p.ndim == 2}
    experts = {name: size for name, size in mine.items() if ".experts.0." in name}
    assert {name: size for name, size in mine.items() if name not in experts} == theirs
    # transformers stacks the experts of a layer; the elements are the same.
    stacked = sum(p.numel() for name, p in real.named_parameters() if p.ndim == 3 and "experts" in name)
    assert sum(m.elements for m in shape.matrices if ".experts.0." in m.name and m.layer < shape.layers) == stacked


def test_nemotron_pattern_survives_transformers():
    import transformers

    config = json.loads(next(path for path in MODELS if "nemotron" in path.stem).read_text())
    built = transformers.AutoConfig.for_model(**config)
    assert built.hybrid_override_pattern == config["hybrid_override_pattern"]
    assert built.num_hidden_layers == 88


def test_ignore_patterns_mean_what_vllm_means():
    """The same names and patterns, alone and in pairs, asked of vLLM's own ModelOpt configuration."""
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config
    from vllm.model_executor.models.utils import WeightsMapper

    patterns = [
        "*mlp.gate",
        "mlp.gate",
        "*self_attn*",
        "model.layers.1*",
        "model.layers.1.*",
        "lm_head",
        "*shared_experts*",
        "*o_proj",
    ]
    patterns += ["*q_proj", "*.down_proj", "*gate_proj", "experts", f"{L1}.mlp.experts.0.up_proj"]
    patterns += [shard for name in NAMES for shard in shards(name)[:2]]

    def vllm_says(name, chosen):
        config = ModelOptMxFp8Config(True, None, list(chosen))
        config.packed_modules_mapping = PACKED
        config.apply_vllm_mapper(WeightsMapper())
        try:
            return config.is_layer_excluded(name)
        except ValueError:
            return None

    for chosen in [*itertools.combinations(patterns, 1), *itertools.combinations(patterns, 2)]:
        for name in NAMES:
            assert vllm_says(name, chosen) == is_ignored(name, shards(name), chosen), (name, chosen)


def megatron_layers(p, layers):
    """What megatron-core holds by pipeline rank, or None when it refuses."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    try:
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=64,
            num_attention_heads=4,
            pipeline_model_parallel_size=p.pp,
            virtual_pipeline_model_parallel_size=p.vpp,
            pipeline_dtype=torch.bfloat16,
            num_layers_in_first_pipeline_stage=p.first_stage_layers,
            num_layers_in_last_pipeline_stage=p.last_stage_layers,
            account_for_embedding_in_pipeline_split=p.embedding_counts_as_layer,
            account_for_loss_in_pipeline_split=p.loss_counts_as_layer,
            pipeline_model_parallel_layout=p.pipeline_layout,
        )
        held = []
        chunks = config.virtual_pipeline_model_parallel_size
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
        for stage in range(p.pp):
            held.append([])
            for chunk in [None] if chunks is None else range(chunks):
                if config.pipeline_model_parallel_layout is not None:
                    held[-1] += config.pipeline_model_parallel_layout.get_layer_id_list(vp_stage=chunk or 0, pp_rank=stage)
                    continue
                count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
                offset = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
                held[-1] += range(offset, offset + count)
    except (AssertionError, ValueError):
        return None
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    # It accepts some counts that leave layers out or name a layer -1; those are no splits.
    return held if sorted(layer for stage in held for layer in stage) == list(range(layers)) else None


counts = st.one_of(st.none(), st.integers(1, 6))
parallelisms = st.builds(
    Parallelism,
    pp=st.integers(1, 4),
    vpp=st.one_of(st.none(), st.integers(2, 3)),
    first_stage_layers=counts,
    last_stage_layers=counts,
    embedding_counts_as_layer=st.booleans(),
    loss_counts_as_layer=st.booleans(),
)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(parallelisms, st.integers(1, 16))
def test_counts_are_megatrons(p, layers):
    compare(p, layers)


@st.composite
def layouts(draw):
    stages = draw(st.lists(st.text("t", max_size=4), min_size=1, max_size=6))
    text = "E" + "|".join(stages) + "L"
    return text.replace("tttt", draw(st.sampled_from(["tttt", "t*4", "(tt)*2", "t,t*3"])))


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(layouts(), st.integers(1, 3), st.one_of(st.none(), st.integers(2, 3)), st.integers(-1, 1))
def test_layouts_are_megatrons(text, pp, vpp, more):
    layers = sum(stage.count("decoder") for stage in parse_layout(text)) + more
    if layers > 0:
        compare(Parallelism(pp=pp, vpp=vpp, pipeline_layout=text), layers)


def compare(p, layers):
    held, problems = stage_layers(p, layers, 0)
    theirs = megatron_layers(p, layers)
    if problems:
        # One pipeline rank with virtual stages: the configuration passes, but initialize_model_parallel refuses it.
        one_stage_in_chunks = p.pp == 1 and (p.vpp is not None or p.pipeline_layout is not None)
        assert theirs is None or one_stage_in_chunks, [str(problem) for problem in problems]
    else:
        assert held == theirs
