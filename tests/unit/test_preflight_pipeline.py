"""Which layers a pipeline rank holds."""

import pytest

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
