"""Conversions of models to their checkpoints, as moves: held to transformers' own function on real values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import core_model_loading as ops

from tests.support import conversions
from vllm_refit_ext.core.errors import ConfigError
from vllm_refit_ext.sender.conversion import Conversion, LocalTensor, Whole, place, record
from vllm_refit_ext.sender.geometry import Cut, shards


def refill(
    conversion: Conversion, values: Mapping[str, torch.Tensor], mesh: tuple[int, ...], cuts: Any
) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, put together from what every coordinate of `mesh` holds; each element once."""
    made = {name: torch.full(spec.shape, -1, dtype=torch.int64) for name, spec in conversion.specs.items()}
    for coordinate in np.ndindex(*mesh):
        held, memory = [], []
        for name, pieces in conversion.pieces.items():
            whole = values[name]
            fits = all(c is None or c.dim < whole.ndim for c in cuts)
            if not pieces or (not fits and any(coordinate)):
                continue  # a tensor of fewer dimensions is on the first rank
            boxes = shards(whole.shape, mesh, coordinate, cuts if fits else [None] * len(mesh))
            if not boxes:
                continue
            index = [np.unique([i for b in boxes for i in range(b.lo[d], b.hi[d])]) for d in range(whole.ndim)]
            local = whole.numpy()[np.ix_(*index)] if whole.ndim else whole.numpy()
            held.append(LocalTensor(name, local.shape, boxes))
            memory.append(torch.from_numpy(np.ascontiguousarray(local)).reshape(-1))
        for row in place(conversion, held).rows():
            depth = made[row.tensor].ndim
            steps = [s // 4 for s in row.strides[:depth]]
            box = memory[row.buffer].as_strided(
                [b - a for a, b in zip(row.lo, row.hi, strict=True)][:depth], steps, row.offset // 4
            )
            into = made[row.tensor][tuple(slice(a, b) for a, b in zip(row.lo[:depth], row.hi[:depth], strict=True))]
            assert bool((into == -1).all()), f"{row.tensor} is held twice"
            into.copy_(box)
    return made


def numbered(tensors: Mapping[str, Whole]) -> dict[str, torch.Tensor]:
    """Tensors whose elements all have numbers of their own; tied ones are the same."""
    values: dict[str, torch.Tensor] = {}
    at = 0
    for name, whole in tensors.items():
        size = int(np.prod(whole.shape, dtype=int))
        values[name] = values[whole.tied] if whole.tied else torch.arange(at, at + size).reshape(whole.shape)
        at += size
    return values


def equal(tensors: Mapping[str, Whole], convert: Callable[..., Any], mesh: tuple[int, ...], cuts: Any) -> int:
    """Hold the moves of `convert` to `convert`. Returns the number of tensors that it makes."""
    values = numbered(tensors)
    wanted = convert(dict(values))
    conversion = record(tensors, convert)
    made = refill(conversion, values, mesh, cuts)
    made |= {alias: made[name] for alias, name in conversion.aliases.items()}
    assert set(made) == set(wanted)
    for name, tensor in wanted.items():
        assert made[name].shape == tensor.shape, name
        assert torch.equal(made[name], tensor), name
    return len(wanted)


@pytest.mark.parametrize("model_type", conversions.SHORT)
def test_transformers(model_type: str) -> None:
    tensors, convert = conversions.tiny(model_type)
    for mesh, cuts in (((1,), [None]), ((3,), [Cut(0)]), ((2, 2), [Cut(0, 2), Cut(0)]), ((2, 2), [Cut(1), Cut(0)])):
        assert equal(tensors, convert, mesh, cuts)


@pytest.mark.parametrize(
    ("operation", "names", "targets"),
    [
        (ops.Chunk(dim=1), ["a"], ["x", "y", "z"]),
        (ops.Concatenate(dim=0), ["a", "b"], ["x"]),
        (ops.Interleave(dim=1), ["a"], ["x"]),
        (ops.Interleave(dim=0, inverse=True), ["a"], ["x"]),
        (ops.MergeModulelist(dim=0), ["a"], ["x"]),
        (ops.SplitModulelist(dim=0), ["a"], ["x.*"]),
        (ops.Transpose(0, 2), ["a"], ["x"]),
        (ops.LinearToConv3d(2, (2, 3, 1)), ["m"], ["x"]),
    ],
    ids=lambda value: repr(value) if isinstance(value, ops.ConversionOps) else "",
)
def test_every_operation(operation: ops.ConversionOps, names: list[str], targets: list[str]) -> None:
    def convert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return operation.convert({n: [tensors[n]] for n in names}, names, targets)

    tensors = {"a": Whole((4, 6, 3), "float32"), "b": Whole((2, 6, 3), "float32"), "m": Whole((3, 12), "float32")}
    assert equal(tensors, convert, (2, 2), [Cut(0), Cut(1)])


@pytest.mark.long
def test_every_model_type_of_the_mapping() -> None:
    built, failed = 0, {}
    for model_type in conversions.model_types():
        try:
            tensors, convert = conversions.tiny(model_type)
        except conversions.NotBuiltError as error:
            failed[model_type] = str(error)
            continue
        equal(tensors, convert, (2,), [Cut(0)])
        built += 1
    assert built >= 160, failed


@given(
    st.lists(st.integers(1, 6), min_size=3, max_size=3),
    st.lists(st.sampled_from(["transpose", "chunk", "interleave", "stack", "index"]), max_size=4),
)
def test_any_chain_of_moves(shape: list[int], steps: list[str]) -> None:
    def convert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        t = tensors["a"]
        for step in steps:
            if step == "transpose":
                t = t.transpose(0, -1).contiguous()
            elif step == "chunk":
                t = torch.cat(t.chunk(2, dim=1)[::-1], dim=1)
            elif step == "interleave":
                t = torch.cat([t[..., ::2], t[..., 1::2]], dim=-1)
            elif step == "stack":
                t = torch.stack([t[:, 0], t[:, -1]], dim=1) if t.shape[1] > 1 else t
            elif step == "index":
                t = t[torch.arange(t.shape[0] - 1, -1, -1)]
        return {"x": t.flatten(), "y": tensors["b"].unsqueeze(0)}

    tensors = {"a": Whole(tuple(shape), "float32"), "b": Whole((3,), "float32")}
    assert equal(tensors, convert, (2, 2), [Cut(0), Cut(1)]) == 2


@pytest.mark.parametrize(
    ("convert", "said"),
    [
        (lambda t: {"x": t["a"] + 1}, "tensor 'x': the conversion computes it (got aten.add.Tensor"),
        (lambda t: {"x": torch.zeros(2)}, "aten.zeros"),
        (lambda t: {"x": t["a"].mul_(2)}, "aten.mul_.Tensor"),
        (lambda t: [torch._foreach_mul_([t["a"]], 2.0), {"x": t["a"]}][1], "aten._foreach_mul_.Scalar"),
        (lambda t: {"x": t["a"].to(torch.bfloat16)}, "aten._to_copy"),
        (lambda t: {"x": t["a"] if t["a"].sum() else t["b"]}, "asks for values"),
        (lambda t: {"x": torch.cat([t["a"], t["b"].float()])}, "made of bfloat16 and float32"),
        (lambda t: {"x": 3}, "a int"),
    ],
)
def test_what_computes_is_refused_by_name(convert: Callable[..., Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        record({"a": Whole((4,), "float32"), "b": Whole((4,), "bfloat16")}, convert)
    assert said in str(error.value)


def test_tied_tensors_are_offered_once() -> None:
    tensors = {"embed": Whole((4, 2), "float32"), "head": Whole((4, 2), "float32", "embed"), "other": Whole((4, 2), "float32")}
    conversion = record(tensors)
    assert list(conversion.specs) == ["embed", "other"]
    assert conversion.aliases == {"head": "embed"}
