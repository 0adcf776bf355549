"""Which layers a pipeline rank holds, by hand and against megatron-core itself."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_sender.config import Parallelism
from megatron_sender.preflight_pipeline import parse_layout, stage_layers


@pytest.mark.parametrize(
    ("parallelism", "layers", "held"),
    [
        ({"pp": 2}, 4, [[0, 1], [2, 3]]),
        ({"pp": 2, "vpp": 2}, 8, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ({"pp": 3, "first_stage_layers": 1, "last_stage_layers": 2}, 5, [[0], [1, 2], [3, 4]]),
        ({"pp": 2, "first_stage_layers": 3}, 4, [[0, 1, 2], [3]]),
        ({"pp": 2, "embedding_counts_as_layer": True, "loss_counts_as_layer": True}, 4, [[0, 1], [2, 3]]),
        ({"pp": 2, "embedding_counts_as_layer": True}, 5, [[0, 1], [2, 3, 4]]),
        ({"pp": 2, "vpp": 2, "embedding_counts_as_layer": True, "loss_counts_as_layer": True}, 6, [[0, 3, 4], [1, 2, 5]]),
        ({"pp": 2, "pipeline_layout": "Et|tt|t|mL"}, 4, [[0, 3], [1, 2]]),
        ({"pp": 2, "pipeline_layout": [["embedding", "decoder"], ["Decoder ", "loss"]]}, 2, [[0], [1]]),
    ],
)
def test_layers_of_a_stage(parallelism, layers, held):
    assert stage_layers(Parallelism(**parallelism), layers, 1) == (held, [])


def test_layout_text():
    assert parse_layout("Et*2,|(t|)*2,m|L") == [
        ["embedding", "decoder", "decoder"],
        ["decoder"],
        ["decoder"],
        ["mtp"],
        ["loss"],
    ]
    for text in ("Et*99999999|L", "x", "(t*2"):
        with pytest.raises(ValueError, match=r"letter"):
            parse_layout(text)


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


@pytest.mark.engine
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(parallelisms, st.integers(1, 16))
def test_counts_are_megatrons(p, layers):
    compare(p, layers)


@st.composite
def layouts(draw):
    stages = draw(st.lists(st.text("t", max_size=4), min_size=1, max_size=6))
    text = "E" + "|".join(stages) + "L"
    return text.replace("tttt", draw(st.sampled_from(["tttt", "t*4", "(tt)*2", "t,t*3"])))


@pytest.mark.engine
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
