"""The torch reference against the numpy reference."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.unit.kernels import checks  # noqa: E402
from tests.unit.kernels.suite import *  # noqa: E402, F403


@pytest.fixture
def way():
    return checks.Way("cpu", "torch")
