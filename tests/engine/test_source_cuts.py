"""Cuts of every known mapping class undo what the bridge's own class does, in real tensor-parallel groups."""

from __future__ import annotations

import pytest

from examples.support.launch import run_ranks
from tests.support import mapping_check

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_cuts_undo_every_mapping(ranks: int, seed: int) -> None:
    assert run_ranks(mapping_check.check_mappings, ranks, seed, timeout=120) == [[]] * ranks
