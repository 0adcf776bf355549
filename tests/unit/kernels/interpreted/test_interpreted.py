"""The Triton kernels in Triton's interpreter. Runs only in a process that set TRITON_INTERPRET=1 before Triton was imported."""

from __future__ import annotations

import pytest

from tests.unit.kernels import checks
from tests.unit.kernels.suite import *  # noqa: F403


@pytest.fixture
def way():
    return checks.Way("cpu", "triton")
