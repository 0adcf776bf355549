"""A part of the weights: what patterns name, and what an engine's own reload can take of it."""

from __future__ import annotations

import pytest

from vllm_refit_ext.core.errors import ConfigError, ManifestError, SessionError
from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.part import layers, names_in, patterns_of
from vllm_refit_ext.core.placement import Placements
from vllm_refit_ext.receiver.targets import Targets

MANIFEST = Manifest(
    {f"model.layers.{i}.{w}": TensorSpec((32,), "float32") for i in (0, 1, 10) for w in ("q", "o")}
    | {"codes": TensorSpec((4, 32), "float8_e4m3fn", "mxfp8", "scales"), "scales": TensorSpec((4, 1), "uint8")},
    {"head": "model.layers.0.q"},
)


def test_patterns_name_tensors_with_their_scales_and_by_any_name() -> None:
    assert names_in(MANIFEST, layers(1)) == {"model.layers.1.q", "model.layers.1.o"}
    assert names_in(MANIFEST, ["codes"]) == {"codes", "scales"}
    assert names_in(MANIFEST, ["head"]) == {"model.layers.0.q"}
    assert names_in(MANIFEST, ["*"]) == set(MANIFEST.tensors)
    with pytest.raises(ManifestError) as caught:
        names_in(MANIFEST, ["model.layers.1.k", "nothing*", "codes"])
    assert [p.where for p in caught.value.problems] == ["part 'model.layers.1.k'", "part 'nothing*'"]


@pytest.mark.parametrize("part", ["model", [""], [1], None, {"a": 1}])
def test_what_is_no_part(part: object) -> None:
    with pytest.raises(ConfigError, match="the part can't be read"):
        patterns_of(part)


def test_a_module_of_the_reload_is_taken_whole() -> None:
    targets = Targets(
        rank=0,
        placements=Placements.from_rows([], [], []),
        params={},
        stored={},
        reload={"q": "packed", "k": "packed", "v": "packed"},
        reloaded={"attn.qk": 8, "attn.v": 4, "mlp.w": 2},
        dropped={},
        casts={},
        quantise=[],
        problems=[],
        filled={"attn.qk": frozenset({"q", "k"}), "attn.v": frozenset({"v"}), "mlp.w": frozenset({"w"})},
    )
    assert targets.reloaded_by({"w"}) == {}
    assert targets.reloaded_by({"q", "k", "v", "w"}) == {"attn.qk": 8, "attn.v": 4}
    with pytest.raises(SessionError, match="'q' and others; wanted also 'k', 'v'"):
        targets.reloaded_by({"q", "w"})
