"""The adapter goes by signatures, and refuses what fits neither with every difference."""

from __future__ import annotations

import pytest

from vllm_refit_ext.core.errors import ConfigError
from vllm_refit_ext.engine import versions

OLD = ("config", "parallel_config", "model")
NEW = ("config", "vllm_config", "device", "model")


@pytest.mark.parametrize(("engine", "start"), [(OLD, ("is_checkpoint_format",)), (NEW, ())])
def test_either_generation_fits(engine: tuple[str, ...], start: tuple[str, ...]) -> None:
    assert versions.problems("0.27.0", engine, start, []) == []


@pytest.mark.parametrize(
    ("engine", "start", "missing", "count"),
    [
        (OLD, (), [], 3),
        (NEW, ("is_checkpoint_format",), [], 3),
        (("config",), (), [], 3),
        (NEW, ("(absent)",), [], 3),
        (NEW, (), ["layerwise.LAYERWISE_INFO", "core.EngineCore"], 3),
        (OLD, (), ["layerwise.LAYERWISE_INFO"], 4),
    ],
)
def test_anything_else_is_refused(engine: tuple[str, ...], start: tuple[str, ...], missing: list[str], count: int) -> None:
    found = versions.problems("0.40.0", engine, start, missing)
    text = str(ConfigError.of(found))
    assert len(found) == count, text
    assert "0.40.0" in text
    assert "0.24.x, 0.32.x or 0.33.x" in text
    assert "Install a supported vLLM" in text
    assert all(name in text for name in missing)


def test_this_vllm_is_supported() -> None:
    pytest.importorskip("vllm", reason="needs a vLLM in this environment")
    assert versions.version().startswith(versions.TESTED)


def test_a_vllm_without_what_guards_a_refit_is_refused_when_it_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="needs a vLLM in this environment")
    from vllm.v1.engine import core

    class Request:
        def __init__(self) -> None:
            self.cache_salt = ""

    monkeypatch.delattr(core.EngineCore, "reset_encoder_cache")
    monkeypatch.setattr(core, "Request", Request)
    with pytest.raises(ConfigError) as raised:
        versions.version.__wrapped__()
    gone = {p.where for p in raised.value.problems if p.what == "a name that a refit needs is gone"}
    assert gone == {"vllm.v1.engine.core.EngineCore.reset_encoder_cache", "vllm.v1.engine.core.Request.block_hashes"}
