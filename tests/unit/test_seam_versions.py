"""The adapter goes by signatures, and refuses what fits neither with every difference."""

from __future__ import annotations

import pytest

from vllm_refit_ext.core.errors import ConfigError
from vllm_refit_ext.engine import versions

OLD = ("config", "parallel_config", "model")
NEW = ("config", "vllm_config", "device", "model")


@pytest.mark.parametrize(
    ("version", "engine", "start", "name", "tested"),
    [
        ("0.24.0", OLD, ("is_checkpoint_format",), "0.24", True),
        ("0.24.1+cpu", OLD, ("is_checkpoint_format",), "0.24", True),
        ("0.27.0", OLD, ("is_checkpoint_format",), "0.24", False),
        ("0.31.0", NEW, (), "0.32", False),
        ("0.32.0", NEW, (), "0.32", True),
        ("0.33.0", NEW, (), "0.32", True),
        ("0.2", NEW, (), "0.32", False),
        ("dev", NEW, (), "0.32", False),
    ],
)
def test_signatures_choose(version: str, engine: tuple[str, ...], start: tuple[str, ...], name: str, tested: bool) -> None:
    found = versions.choose(version, engine, start, [])
    assert (found.name, found.tested, found.engine_parameters, found.starts_reload) == (name, tested, engine, name == "0.24")


@pytest.mark.parametrize(
    ("engine", "start", "missing"),
    [
        (OLD, (), []),
        (NEW, ("is_checkpoint_format",), []),
        (("config",), (), []),
        (NEW, ("(absent)",), []),
        (NEW, (), ["LAYERWISE_INFO"]),
    ],
)
def test_anything_else_is_refused(engine: tuple[str, ...], start: tuple[str, ...], missing: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"0\.40\.0") as raised:
        versions.choose("0.40.0", engine, start, missing)
    text = str(raised.value)
    assert "0.24.x, 0.32.x or 0.33.x" in text
    assert "Install a supported vLLM" in text
    assert all(name in text for name in missing)


def test_this_vllm_is_supported() -> None:
    pytest.importorskip("vllm", reason="needs a vLLM in this environment")
    assert versions.adapter().tested


def test_a_vllm_without_what_guards_a_refit_is_refused_when_it_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="needs a vLLM in this environment")
    from vllm.v1.engine import core

    class Request:
        def __init__(self) -> None:
            self.cache_salt = ""

    monkeypatch.delattr(core.EngineCore, "reset_encoder_cache")
    monkeypatch.setattr(core, "Request", Request)
    with pytest.raises(ConfigError) as raised:
        versions.adapter.__wrapped__()
    gone = {p.where for p in raised.value.problems if p.what == "a name that a refit needs is gone"}
    assert gone == {"vllm.v1.engine.core.EngineCore.reset_encoder_cache", "vllm.v1.engine.core.Request.block_hashes"}
