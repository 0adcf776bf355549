"""What recording makes of single loaders: exact copies become moves, anything else is named."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.engine.routes_support import Entries, random_tensors, replay
from vllm_refit_ext.core.errors import RouteError
from vllm_refit_ext.engine.record import record_routes
from vllm_refit_ext.receiver.keep import keep
from vllm_refit_ext.receiver.routes.table import Routes

pytestmark = pytest.mark.engine

Load = Callable[["Holder", str, torch.Tensor], object]


class Holder(nn.Module):
    """A model of one parameter `w` [8, 6], a second `v` [8, 6], a scalar `s` and a router-bias buffer; `load` is its loader."""

    def __init__(self, load: Load, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8, 6).to(dtype), requires_grad=False)
        self.v = nn.Parameter(torch.zeros(8, 6), requires_grad=False)
        self.s = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("e_score_correction_bias", torch.zeros(4))
        self.pending: dict[str, torch.Tensor] = {}
        self.load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load(self, name, tensor)


def record(load: Load, entries: Entries, dtype: torch.dtype = torch.float32) -> tuple[Holder, Routes]:
    model = Holder(load, dtype)
    return model, record_routes(model, entries, rank=0)


def whole(**shapes: tuple[int, ...]) -> Entries:
    return {name: (shape, "float32") for name, shape in shapes.items()}


W = whole(a=(8, 6))

COPIES: dict[str, tuple[Load, Entries]] = {
    "plain": (lambda m, n, t: m.w.data.copy_(t), W),
    "transposed": (lambda m, n, t: m.w.data.copy_(t.t()), whole(a=(6, 8))),
    "contiguous": (lambda m, n, t: m.w.data.copy_(t.t().contiguous()), whole(a=(6, 8))),
    "halves": (lambda m, n, t: [m.w[4:].copy_(t[0]), m.w[:4].copy_(t[1])], whole(a=(2, 4, 6))),
    "interleaved": (lambda m, n, t: m.w.data.copy_(t.view(4, 2, 6).transpose(0, 1).reshape(8, 6)), W),
    "unbound": (lambda m, n, t: [m.w.data[i].copy_(r) for i, r in enumerate(t.unbind(1))], whole(a=(6, 8))),
    "joined": (lambda m, n, t: m.w.data.copy_(torch.cat([t[4:], t[:4]])), W),
    "stacked": (lambda m, n, t: m.w.data.copy_(torch.stack([t[0], t[1]], 1).flatten(1)), whole(a=(2, 8, 3))),
    "gathered": (lambda m, n, t: m.w.data.copy_(t[torch.tensor([9, 0, 1, 2, 5, 5, 7, 6])]), whole(a=(10, 6))),
    "broadcast": (lambda m, n, t: m.w.data.copy_(t), whole(a=(6,))),
    "widened": (lambda m, n, t: m.w.data.copy_(t.float()), {"a": ((8, 6), "bfloat16")}),
    "cast by the copy": (lambda m, n, t: m.w.data.copy_(t), {"a": ((8, 6), "float16")}),
    "scalar copied": (lambda m, n, t: m.s.data.copy_(t), whole(a=())),
    "scalar read and filled": (lambda m, n, t: m.s.data.fill_(t.item()), whole(a=(1,))),
    "buffer": (lambda m, n, t: m.e_score_correction_bias.copy_(t), whole(a=(4,))),
    "padding filled": (lambda m, n, t: [m.w[:5].copy_(t), m.w[5:].fill_(0)], whole(a=(5, 6))),
    "cleared before": (lambda m, n, t: [m.w.zero_(), m.w[:5].copy_(t)], whole(a=(5, 6))),
    "two tensors": (lambda m, n, t: m.w[{"a": slice(0, 3), "b": slice(3, 8)}[n]].copy_(t), whole(a=(3, 6), b=(5, 6))),
}


@pytest.mark.parametrize("case", COPIES)
@torch.no_grad()
def test_replaying_moves_gives_what_the_loader_gives(case: str) -> None:
    load, entries = COPIES[case]
    model, routes = record(load, entries)
    assert routes.computed == {}
    assert routes.dropped == {}
    assert set(routes.placements.names) == set(entries)
    first, second = random_tensors(entries, 1), random_tensors(entries, 2)
    model.load_weights((name, t.clone()) for name, t in first.items())
    wanted = {name: t.clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}
    model.load_weights(second.items())
    replay(routes, first, {name: t.data for name, t in [*model.named_parameters(), *model.named_buffers()]})
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(tensor, wanted[name]), name


def _rebind(m: Holder, _: str, t: torch.Tensor) -> None:
    m.w.data = t.clone()


def _replace(m: Holder, _: str, t: torch.Tensor) -> None:
    m.w = nn.Parameter(t, requires_grad=False)


def _invent(m: Holder, _: str, t: torch.Tensor) -> None:
    m.x = nn.Parameter(torch.empty(8, 6), requires_grad=False)
    m.x.data.copy_(t)


def _hoard(m: Holder, name: str, t: torch.Tensor) -> None:
    m.pending[name] = t


def _branch(m: Holder, _: str, t: torch.Tensor) -> None:
    if t.max() > 0:
        m.w.data.copy_(t)


def _then(change: Callable[[torch.Tensor], object]) -> Load:
    def load(m: Holder, _: str, t: torch.Tensor) -> None:
        m.w.data.copy_(t)
        change(m.w.data)

    return load


def _cleared_source(m: Holder, _: str, t: torch.Tensor) -> None:
    t[2:].zero_()
    m.w.data.copy_(t)


NOT_COPIES: dict[str, tuple[Load, Entries, str]] = {
    "exponent": (lambda m, n, t: m.w.data.copy_(-torch.exp(t.float())), W, "computed, not copied"),
    "changed after": (_then(lambda w: w.copy_(-torch.exp(w))), W, "computed, not copied"),
    "added": (lambda m, n, t: m.w.data.add_(t), W, "aten.add_"),
    "scaled after": (_then(lambda w: w.mul_(2)), W, "aten.mul_"),
    "cleared after": (_then(lambda w: w.zero_()), W, "changes elements"),
    "padded": (lambda m, n, t: m.w.data.copy_(F.pad(t, (0, 0, 0, 3))), whole(a=(5, 6)), "computed, not copied"),
    "scattered": (lambda m, n, t: m.w.index_copy_(0, torch.arange(8), t), W, "aten.index_copy_"),
    "rebound": (_rebind, W, "replaces w"),
    "replaced": (_replace, W, "replaces w"),
    "made while loading": (_invent, W, "made while loading"),
    "kept": (_hoard, W, "keeps it in"),
    "branch on a value": (_branch, W, "value is read"),
    "read and scaled": (lambda m, n, t: m.s.data.fill_(2 * t.item()), whole(a=(1,)), "value is read"),
    "changed before": (_cleared_source, W, "changes the checkpoint tensor itself"),
    "compared": (lambda m, n, t: m.w.data.copy_(t) if torch.equal(t, t) else None, W, "aten.equal"),
    "narrowed twice": (lambda m, n, t: m.w.data.copy_(t.to(torch.bfloat16)), W, "computed, not copied"),
    "partly twice": (lambda m, n, t: [m.w.copy_(t), m.w[2:4].copy_(t[:2])], W, "changes elements"),
    "numbers for bytes": (
        lambda m, n, t: m.w.data.copy_(t),
        {"a": ((8, 6), "float8_e8m0fnu")},
        "float8_e8m0fnu is converted to float32",
    ),
    "another element size": (
        lambda m, n, t: m.w.data.view(torch.int16).copy_(t.view(torch.int16)),
        W,
        "computed, not copied",
    ),
}


@pytest.mark.parametrize("case", NOT_COPIES)
def test_what_is_not_a_copy_is_named(case: str) -> None:
    load, entries, reason = NOT_COPIES[case]
    model, routes = record(load, entries)
    assert list(routes.computed) == ["a"]
    assert reason in routes.computed["a"]
    assert len(routes.placements) == 0
    assert model.pending == {}
    assert [n for n, _ in model.named_parameters()] == ["w", "v", "s"]


def test_bytes_may_be_sent_under_two_names_of_one_format() -> None:
    model, routes = record(
        lambda m, n, t: m.w.data.copy_(t.view(torch.uint8)), {"a": ((8, 6), "float8_e8m0fnu")}, dtype=torch.uint8
    )
    assert routes.reinterpreted == {"a": ("float8_e8m0fnu", "uint8")}
    bytes_ = torch.arange(48, dtype=torch.uint8).view(8, 6)
    replay(routes, {"a": bytes_.view(torch.float8_e8m0fnu)}, {"w": model.w.data})
    assert torch.equal(model.w, bytes_)


def test_what_nothing_fills_is_reported_with_its_first_box() -> None:
    _, routes = record(lambda m, n, t: m.w[1:7].copy_(t), whole(a=(6, 6)))
    assert routes.unwritten["w"] == "12 of 48 elements, the first [0:1, 0:6]"
    assert routes.unwritten["v"] == "48 of 48 elements"
    assert "e_score_correction_bias" in routes.unwritten


def test_a_tensor_that_a_later_one_replaces_is_dropped_by_name() -> None:
    _, routes = record(lambda m, n, t: m.w.data.copy_(t), whole(a=(8, 6), b=(8, 6)))
    assert routes.dropped == {"a": "overwritten by b in w"}
    assert routes.placements.names == ["b"]


def test_names_and_shapes_that_a_loader_refuses_are_reported_together() -> None:
    def load(m: Holder, name: str, t: torch.Tensor) -> None:
        m.get_parameter(name).data.copy_(t)

    model = Holder(load)
    before = {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()}
    with pytest.raises(RouteError) as caught:
        record_routes(model, whole(w=(8, 6), v=(8, 5), wrong=(8, 6)), rank=0)
    assert sorted(p.where for p in caught.value.problems) == ["v", "wrong"]
    assert {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()} == before


def test_a_loader_that_fails_at_once_leaves_the_model_as_it_was() -> None:
    model = Holder(lambda m, n, t: None)
    before = [id(p) for p in model.parameters()]
    model.load_weights = None  # type: ignore[assignment, method-assign]
    with pytest.raises(RouteError, match="the weight loader failed"):
        record_routes(model, W, rank=0)
    assert [id(p) for p in model.parameters()] == before


def test_shared_parameters_are_one_buffer_with_aliases() -> None:
    model = Holder(lambda m, n, t: m.w.data.copy_(t))
    model.v = model.w
    routes = record_routes(model, W, rank=0)
    assert routes.aliases == {"v": "w"}
    assert [b.name for b in routes.placements.buffers] == ["w"]
    assert model.v is model.w


def test_what_a_reload_of_some_names_must_write() -> None:
    load, entries = COPIES["two tensors"]
    _, routes = record(load, entries)
    assert routes.filled == {"w": (48, frozenset({"a", "b"}))}
    assert routes.wanted(["a", "b"]) == {"w": 48}
    assert routes.wanted(["a"]) == {"w": 1}, "a part of it is written in place"
    assert routes.wanted([]) == {}
    load, entries = COPIES["padding filled"]
    assert record(load, entries)[1].wanted(entries) == {"w": 30}, "padding comes from no tensor"
    load, entries, _ = NOT_COPIES["exponent"]
    assert record(load, entries)[1].wanted(entries) == {"w": 48}, "what a loader computes is written too"


def test_what_is_kept_leaves_the_routes_by_parameter_or_by_tensor() -> None:
    load, entries = COPIES["two tensors"]
    _, routes = record(load, entries)
    by_tensor = keep(routes, ["a"])
    assert (by_tensor.problems, by_tensor.routes.placements.names, by_tensor.names) == ([], ["b"], {"a": ["a"]})
    assert by_tensor.routes.dropped == {"a": "the engine keeps it"}
    assert by_tensor.routes.wanted(["b"]) == {"w": 1}
    by_parameter = keep(routes, ["?", "v"])
    assert by_parameter.names.keys() == {"a", "b", "s", "v", "w"}
    assert by_parameter.names["v"] == ["?", "v"]
    assert len(by_parameter.routes.placements) == len(by_parameter.routes.placements.buffers) == 0
    assert by_parameter.routes.unwritten.keys() == {"e_score_correction_bias"}
    assert [p.where for p in keep(routes, ["a", "nothing.*"]).problems] == ["keep 'nothing.*'"]
