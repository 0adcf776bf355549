"""What leaves at which moment, for every setting; and that memory comes back as it was."""

from __future__ import annotations

import itertools

import pytest
import torch

from vllm_refit_ext.core.errors import ConfigError, SessionError
from vllm_refit_ext.sender.residency import PinnedSwap, Residency, ResidencyConfig, leaves


@pytest.mark.parametrize("values", itertools.product((False, True), repeat=5))
def test_every_setting_means_the_same_at_every_moment(values):
    """Slim differs from full in the gradients only; no moment moves what a setting forbids."""
    config = ResidencyConfig(
        **dict(zip(("gradients", "optimizer", "parameters", "optimizer_on_cpu", "slim"), values, strict=True))
    )
    before, full, slim = (leaves(config, m) for m in ("before", "after", "after slim"))
    assert ("gradients" in before) == config.gradients == ("gradients" in full)
    for found in (before, full, slim):
        assert ("optimizer" in found) == (config.optimizer and not config.optimizer_on_cpu)
    assert "parameters" not in before
    assert ("parameters" in full) == ("parameters" in slim) == config.parameters
    assert [p for p in full if p != "gradients"] == list(slim)


def trained():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("slim", [False, True])
def test_training_goes_on_as_if_nothing_had_been(slim):
    """Two steps with everything moved off between them equal two steps without."""
    model, optimizer = trained()
    other, other_optimizer = trained()
    residency = Residency(model, optimizer, ResidencyConfig(slim=slim))
    views = [p.data for p in model.parameters()]
    with residency.handing_over():
        assert residency.away == ("gradients", "optimizer")
        assert all(p.untyped_storage().nbytes() for p in model.parameters())
    assert residency.away == ("gradients", "optimizer", "parameters")
    assert all(v.untyped_storage().nbytes() == 0 for v in views)
    assert all(p.grad.untyped_storage().nbytes() == 0 for p in model.parameters())
    state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    assert state
    assert all(t.untyped_storage().nbytes() == 0 for t in state)
    residency.restore()
    assert residency.away == ()
    assert all(torch.equal(v, p.data) for v, p in zip(views, model.parameters(), strict=True))
    step(model, optimizer)
    step(other, other_optimizer)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_refit_that_fails_still_gives_the_memory_back():
    """The engine needs the memory either way."""
    model, optimizer = trained()
    residency = Residency(model, optimizer)

    def fail():
        with residency.handing_over():
            raise RuntimeError("the refit fails")

    with pytest.raises(RuntimeError, match="fails"):
        fail()
    assert residency.away == ("gradients", "optimizer", "parameters")
    residency.restore()


def test_what_a_setting_forbids_stays():
    """A setting that keeps the optimizer keeps it in the full and the slim way."""
    for slim in (False, True):
        model, optimizer = trained()
        residency = Residency(model, optimizer, ResidencyConfig(optimizer=False, slim=slim))
        with residency.handing_over():
            pass
        assert "optimizer" not in residency.away
        assert all(t.untyped_storage().nbytes() for s in optimizer.state.values() for t in s.values())
        residency.restore()


def test_reference_weights_are_put_back():
    """Also when the body fails; entered twice is refused."""
    model, _ = trained()
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    swap = PinnedSwap(model, {f"0.{n}": torch.full_like(p, 0.5) for n, p in own.items()})

    def fail():
        with swap():
            assert all((p == 0.5).all() for p in model.parameters())
            with pytest.raises(SessionError), swap():
                pass
            raise RuntimeError("log-probabilities fail")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="fail"):
            fail()
        assert all(torch.equal(p, own[n]) for n, p in model.named_parameters())


def test_a_reference_that_does_not_fit_is_refused_by_name():
    """All problems at once."""
    model, _ = trained()
    reference = {f"0.{n}": p.detach() for n, p in model.named_parameters()}
    reference["0.0.weight"] = torch.zeros(3)
    del reference["0.1.bias"]
    reference["0.2.bias"] = torch.zeros(1)
    with pytest.raises(ConfigError) as caught:
        PinnedSwap(model, reference)
    assert {p.where for p in caught.value.problems} == {"0.0.weight", "0.1.bias", "0.2.bias"}
