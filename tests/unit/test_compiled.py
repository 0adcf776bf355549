"""Where torch keeps what it compiles for tests."""

from __future__ import annotations

import os

import pytest

from tests.conftest import CHOOSES, compiled


def test_torch_is_reported_where() -> None:
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"]


@pytest.mark.parametrize("name", CHOOSES)
def test_a_lesser_cpu_has_a_place_of_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = compiled()
    monkeypatch.setenv(name, "lesser")
    assert compiled() != here
    monkeypatch.undo()
    assert compiled() == here
