"""vLLM's loaders that copy into a parameter themselves, of models that no CPU engine runs: their routes and their reload.

Ling's linear attention, Pangu's static sinks and MiniMax's biased router need kernels of a GPU. MiMo's sinks are loaded in
the same way and refitted on real engines (`test_refit_architectures`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.routes_support import config
from vllm_refit_ext.core.errors import RefitError
from vllm_refit_ext.engine.offline import as_worker, engine_config
from vllm_refit_ext.engine.record import record_routes
from vllm_refit_ext.engine.reload import reload_weights

pytestmark = pytest.mark.engine

HEADS, RANK = 8, 1
"""Heads in the checkpoint, of two ranks; the rank whose half is loaded."""


def ling_a_log(module: nn.Module) -> tuple[nn.Parameter, Callable[..., None]]:
    from vllm.model_executor.models.bailing_moe_v3 import _load_a_log

    return nn.Parameter(torch.zeros(1, 1, HEADS // 2, 1)), _load_a_log


def pangu_sinks(module: Any) -> tuple[nn.Parameter, Callable[..., None]]:
    from vllm.model_executor.models.openpangu import OpenPanguSinkAttention

    module.tp_rank = RANK
    parameter = nn.Parameter(torch.zeros(3, HEADS // 2, 5))
    parameter.output_dim = 1  # type: ignore[attr-defined]
    return parameter, OpenPanguSinkAttention.weight_loader.__get__(module)


def minimax_bias(module: nn.Module) -> tuple[nn.Parameter, Callable[..., None]]:
    from vllm.model_executor.models.minimax_m2 import MiniMaxM2MoE

    return nn.Parameter(torch.zeros(HEADS)), MiniMaxM2MoE.ebias_weight_loader


SHAPES = {ling_a_log: (HEADS,), pangu_sinks: (3, HEADS, 5), minimax_bias: (HEADS,)}
"""Shapes in the checkpoint."""
HALF = slice(HEADS // 2, HEADS)
PARTS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    ling_a_log: lambda t: t[HALF].reshape(1, 1, -1, 1),
    pangu_sinks: lambda t: t[:, HALF],
    minimax_bias: lambda t: t,
}
"""What the rank holds of a tensor."""


class Model(nn.Module):
    """One layer with a parameter `x` of a real loader and a plain one `y`. past: without calling the wrapped loader."""

    def __init__(self, make: Any, past: bool) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.x, loader = make(self.layer)
        self.layer.y = nn.Parameter(torch.zeros(4))
        self.layer.x.weight_loader = loader
        self._loader = loader if past else None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        for name, tensor in weights:
            parameter = self.get_parameter(name)
            if name == "layer.x" and self._loader is not None:
                self._loader(parameter, tensor)
            else:
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)


@pytest.fixture(scope="module")
def vllm_config() -> Iterator[Any]:
    with engine_config(config("llama"), tp=2) as made, as_worker(made, RANK):
        yield made


@pytest.mark.parametrize("past", [False, True], ids=["by its loader", "past its loader"])
@pytest.mark.parametrize("make", SHAPES, ids=lambda make: make.__name__)
def test_what_such_a_loader_writes_is_seen_and_lands(make: Any, past: bool, vllm_config: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    with set_current_vllm_config(vllm_config), torch.device("cpu"):
        model = Model(make, past)
        routes = record_routes(model, {"layer.x": (SHAPES[make], "float32"), "layer.y": ((4,), "float32")}, rank=RANK)
        record_metadata_for_reloading(model)
    assert (routes.computed, routes.dropped, routes.unwritten) == ({}, {}, {})
    view: Any = SimpleNamespace(model=model, vllm_config=vllm_config, device=torch.device("cpu"), model_runner=None)
    wanted = routes.wanted(["layer.x", "layer.y"])
    assert wanted == {"layer.x": model.layer.x.numel(), "layer.y": 4}
    live = model.layer.x
    for seed in (1, 2):
        sent = torch.randn(SHAPES[make], generator=torch.Generator().manual_seed(seed))
        reload_weights(view, [("layer.x", sent), ("layer.y", torch.full((4,), float(seed)))], wanted=wanted)
        assert model.layer.x is live
        assert torch.equal(live.data, PARTS[make](sent))
        assert model.layer.y.tolist() == [seed] * 4
    with pytest.raises(RefitError, match="layer"):
        reload_weights(view, [("layer.y", torch.zeros(4))], wanted=wanted)
