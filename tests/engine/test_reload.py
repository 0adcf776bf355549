"""vLLM's own reload as a writer, on real engines in this process: exact, complete or refused, and clean after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.architectures import LATENT
from tests.support.engines import answers, fresh_answers, open_llm
from tests.support.seam_cases import pair
from vllm_refit_ext.core.errors import ManifestError, RefitError, TornError, WireError
from vllm_refit_ext.engine.rank import EngineRank
from vllm_refit_ext.engine.reload import recover, reload_weights

pytestmark = pytest.mark.engine

KINDS = ("qwen3_moe", "qwen3_tied", "deepseek_v3")


@pytest.fixture(scope="module", params=KINDS)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(engine, its view, tensors of checkpoint 0 and 1, fresh answers of 0 and 1)."""
    folders = pair(request.param, tmp_path_factory.mktemp(request.param))
    settings = LATENT if request.param == "deepseek_v3" else {}
    wanted = [fresh_answers(folder, in_process=True, **settings) for folder in folders]
    assert wanted[0] != wanted[1]
    tensors = [load_file(folder / "model.safetensors") for folder in folders]
    with open_llm(folders[0], in_process=True, **settings) as llm:
        view = EngineRank.of_worker(llm.llm_engine.model_executor.driver_worker.worker)
        yield llm, view, tensors, wanted


def ask(llm: Any) -> Any:
    llm.reset_prefix_cache()
    return answers(llm)


def state(view: EngineRank) -> dict[str, bytes]:
    tensors = (*view.model.named_parameters(remove_duplicate=False), *view.model.named_buffers(remove_duplicate=False))
    return {
        name: tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors
        if tensor.numel()
    }


def test_there_and_back_and_again(live: Any) -> None:
    llm, view, tensors, wanted = live
    reload_weights(view, iter(tensors[0].items()))
    assert ask(llm) == wanted[0]
    first = state(view)
    for which in (1, 1, 0, 0):
        done = reload_weights(view, iter(tensors[which].items()), names=tensors[which])
        assert done.tensors == len(tensors[which])
        assert done.bytes == sum(tensor.nbytes for tensor in tensors[which].values())
        assert done.untouched == []
        assert ask(llm) == wanted[which]
    assert state(view) == first


def test_any_order(live: Any) -> None:
    llm, view, tensors, wanted = live
    reload_weights(view, sorted(tensors[1].items(), key=lambda pair: hash(pair[0][::-1])))
    assert ask(llm) == wanted[1]
    reload_weights(view, iter(tensors[0].items()))
    assert ask(llm) == wanted[0]


def test_one_layer_alone_leaves_the_rest(live: Any) -> None:
    llm, view, tensors, wanted = live
    reload_weights(view, iter(tensors[0].items()))
    before = state(view)
    name = "model.norm.weight"
    done = reload_weights(view, [(name, tensors[1][name])], names=[name])
    after = state(view)
    assert [key for key in before if before[key] != after[key]] == [name]
    assert done.untouched
    assert ask(llm) != wanted[0]
    reload_weights(view, [(name, tensors[0][name])], names=[name])
    assert state(view) == before
    assert ask(llm) == wanted[0]


@pytest.mark.parametrize("cut", ["first", "middle", "last"])
def test_a_missing_tensor_is_refused_and_the_next_reload_is_right(live: Any, cut: str) -> None:
    llm, view, tensors, wanted = live
    names = list(tensors[1])
    # one of a fused group, so that its layer is left with a part of its elements
    fused = [name for name in names if "k_proj" in name or "up_proj" in name or "kv_a_proj" in name]
    gone = {"first": fused[0], "middle": fused[len(fused) // 2], "last": fused[-1]}[cut]
    feed = [(name, tensor) for name, tensor in tensors[1].items() if name != gone]
    with pytest.raises(TornError, match=gone.replace(".", r"\.")):
        reload_weights(view, iter(feed), names=names)
    assert all(not tensor.is_meta for tensor in view.model.parameters())
    with pytest.raises(TornError, match="part of its elements"):
        reload_weights(view, iter(feed))
    reload_weights(view, iter(tensors[1].items()), names=names)
    assert ask(llm) == wanted[1]


def test_a_reload_that_writes_less_than_the_plan_says_is_an_error(live: Any) -> None:
    llm, view, tensors, wanted = live
    name = "model.norm.weight"
    size = tensors[1][name].numel()
    with pytest.raises(RefitError, match=r"model\.norm\.weight.*the reload did not write it"):
        reload_weights(view, iter(tensors[1].items()), names=tensors[1], wanted={name: size + 1})
    reload_weights(view, iter(tensors[1].items()), names=tensors[1], wanted={name: size})
    assert ask(llm) == wanted[1]


def test_a_source_that_dies_before_the_first_layer_loses_nothing(live: Any) -> None:
    llm, view, tensors, wanted = live
    reload_weights(view, iter(tensors[0].items()))
    before = state(view)
    name = next(name for name in tensors[1] if "k_proj" in name or "kv_a_proj" in name)

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        yield name, tensors[1][name]
        assert any(tensor.is_meta for tensor in view.model.parameters())
        raise WireError("the sender died", where="wire")

    with pytest.raises(WireError, match="the sender died"):
        reload_weights(view, dying())
    assert state(view) == before
    assert recover(view) == []
    assert ask(llm) == wanted[0]


def test_a_source_that_dies_in_the_middle_tears_and_a_full_reload_heals(live: Any) -> None:
    llm, view, tensors, wanted = live
    half = list(tensors[1].items())
    # layers in order, so that some are complete when the source dies
    half.sort(key=lambda pair: pair[0])

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        yield from half[: len(half) * 3 // 4]
        raise WireError("the sender died", where="wire")

    with pytest.raises(TornError, match="the sender died"):
        reload_weights(view, dying())
    reload_weights(view, iter(tensors[0].items()))
    assert ask(llm) == wanted[0]


def test_bad_tensors_are_named(live: Any) -> None:
    llm, view, tensors, wanted = live
    name, tensor = next((name, tensor) for name, tensor in tensors[1].items() if name.endswith("o_proj.weight"))
    for feed, says in (
        ([(name, tensor[:-1])], name),
        ([(name, tensor), (name, tensor)], "came twice"),
    ):
        with pytest.raises(RefitError, match=says.replace(".", r"\.")):
            reload_weights(view, iter(feed))
    reload_weights(view, iter(tensors[0].items()))
    assert ask(llm) == wanted[0]


def test_a_reload_of_vllm_itself_that_was_left_open_is_put_back(live: Any) -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    llm, view, tensors, wanted = live
    reload_weights(view, iter(tensors[0].items()))
    before = state(view)
    initialize_layerwise_reload(view.model)
    assert any(tensor.is_meta for tensor in view.model.parameters())
    assert recover(view)
    assert state(view) == before
    assert ask(llm) == wanted[0]
    reload_weights(view, iter(tensors[1].items()))
    assert ask(llm) == wanted[1]
    with pytest.raises(ManifestError):
        reload_weights(view, [], names=["model.norm.weight"])
    assert ask(llm) == wanted[1]
