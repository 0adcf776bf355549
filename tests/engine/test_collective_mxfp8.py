"""Wire `collective` into a real MXFP8 engine: quantised where it arrives, or sent as MXFP8; all bytes equal a fresh engine's."""

from __future__ import annotations

from typing import Any

import pytest

from examples.support.launch import run_ranks
from examples.support.tiny_model import save_model
from tests.engine.test_mxfp8 import SETTINGS, addresses, live, same, weights
from tests.support.collective_jobs import simple
from tests.support.engine_bridge import bridge
from tests.support.engines import open_llm
from tests.support.quantised_jobs import hand_over

pytestmark = [pytest.mark.engine, pytest.mark.long]

BUCKET = 20_000
"""Bytes of a round: smaller than most tensors, so that they are cut and that scales and codes fall into different rounds."""
GEOMETRIES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-ep2": (4, {"tp": 2, "ep": 2}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2}),
    "pp2-uneven": (2, {"pp": 2, "first_last_layers": (1, None)}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("collective")
    return [save_model("qwen3_moe", base / str(seed), seed=seed, dtype="bfloat16", num_hidden_layers=4) for seed in (0, 1)]


@pytest.fixture(scope="module")
def fresh(folders):
    with open_llm(folders[1], **SETTINGS) as llm:
        return live(llm)


@pytest.fixture(scope="module")
def engine(folders, fresh):
    """An engine of other weights, behind a URL."""
    with open_llm(folders[0], **SETTINGS) as llm, bridge(llm) as url:
        assert same(live(llm), fresh)
        yield llm, url


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_quantised_where_it_arrives(engine, folders, fresh, geometry):
    llm, url = engine
    ranks, cut = GEOMETRIES[geometry]
    before = addresses(llm)
    run_ranks(simple, ranks, str(folders[0]), {"dtype": "bfloat16", **cut}, [url], BUCKET, "other", timeout=240)
    assert same(live(llm), fresh)
    run_ranks(simple, ranks, str(folders[1]), {"dtype": "bfloat16", **cut}, [url], BUCKET, "new", timeout=240)
    assert same(live(llm), fresh) == []
    assert addresses(llm) == before


def test_sent_as_mxfp8(engine, folders, fresh):
    """Scales are sent first and wait for their codes; half the bytes of BF16 are sent for what is quantised."""
    llm, url = engine
    run_ranks(simple, 1, str(folders[0]), {"dtype": "bfloat16"}, [url], BUCKET, "other", timeout=240)
    assert same(live(llm), fresh)
    config = {"wire": "collective", "bucket_bytes": BUCKET}
    found = run_ranks(hand_over, 4, str(folders[1]), {"tp": 2, "ep": 2}, url, config, timeout=240)[0]
    assert same(live(llm), fresh) == []
    given = weights(folders[1])
    coded = sum(given[name].nbytes for name in found["coded"])
    assert coded
    assert found["nbytes"] == sum(t.nbytes for t in given.values()) - coded + coded // 2 * 33 // 32
