"""The doctor's probe on real GPUs."""

import pytest

from vllm_refit_ext.tools.doctor import gpus, probe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not probe.ask("facts").get("gpus"), reason="needs an NVIDIA GPU")]


def test_facts():
    facts = probe.ask("facts")
    assert facts["gpus"]
    assert {finding.level for finding in gpus.check_gpus(facts, gpus.topology_text())} <= {"ok", "warn"}


def test_a_real_hand_over_on_every_gpu():
    for index in range(len(probe.ask("facts")["gpus"])):
        assert probe.ask("ipc", str(index)) == {"ok": True}


def test_a_gpu_that_is_not_there():
    assert "invalid device ordinal" in probe.ask("ipc", "64")["error"]
