"""Random trainer and engine geometries with a brute-force oracle.

A small mixture-of-experts model is cut by hand, with plain numpy slicing and concatenation, the way Megatron cuts it for its
ranks (TP, EP, ETP, PP, VPP, DP; fused interleaved QKV; fused gate and up; a padded vocabulary; uneven cuts; replicated KV
heads) and the way vLLM cuts it for its own (TP, EP, PP). The placements are written down beside those local tensors. The test
then holds the plan, executed byte by byte, to the local tensors that the slicing made.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st

from vllm_refit_ext.core.manifest import Manifest, TensorSpec
from vllm_refit_ext.core.placement import Buffer, Placement, Placements

ITEM = 4


@dataclasses.dataclass
class Side:
    """One side's buffers: contents from slicing, and the rows that describe them."""

    buffers: list[Buffer] = dataclasses.field(default_factory=list)
    contents: list[np.ndarray] = dataclasses.field(default_factory=list)
    rows: list[Placement] = dataclasses.field(default_factory=list)

    def add(
        self, name: str, rank: int, local: np.ndarray, parts: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    ) -> None:
        """A local tensor and its parts: (tensor, lo, hi, index in `local` where the part starts)."""
        local = np.ascontiguousarray(local)
        self.buffers.append(Buffer(name, rank, "float32", local.shape))
        self.contents.append(local)
        for tensor, lo, hi, at in parts:
            lead = local.ndim - len(lo)
            strides = local.strides[lead:]
            offset = sum(a * s for a, s in zip(at, local.strides, strict=True))
            self.rows.append(Placement(tensor, len(self.buffers) - 1, lo, hi, offset, strides))

    def table(self) -> Placements:
        return Placements.from_rows(self.buffers, self.rows)


@dataclasses.dataclass
class Case:
    manifest: Manifest
    source: Side
    target: Side
    target_ranks: int
    pad_bytes: int = 0

    @property
    def sources(self) -> Placements:
        return self.source.table()

    @property
    def targets(self) -> Placements:
        return self.target.table()

    def targets_of(self, rank: int) -> Placements:
        """The table that engine rank `rank` would make by itself."""
        mine = [i for i, b in enumerate(self.target.buffers) if b.rank == rank]
        place = {i: k for k, i in enumerate(mine)}
        rows = [
            Placement(r.tensor, place[r.buffer], r.lo, r.hi, r.offset, r.strides) for r in self.target.rows if r.buffer in place
        ]
        return Placements.from_rows([self.target.buffers[i] for i in mine], rows)

    def fill_sources(self) -> list[np.ndarray]:
        return [c.view(np.uint8).reshape(-1).copy() for c in self.source.contents]

    def check_targets(self, memory: list[np.ndarray]) -> None:
        for buffer, want, got in zip(self.target.buffers, self.target.contents, memory, strict=True):
            assert np.array_equal(got, want.view(np.uint8).reshape(-1)), buffer

    def covered(self, sources: Placements) -> bool:
        """Whether every target element is held by some source row, by marking elements one by one."""
        held = {name: np.zeros(spec.shape, bool) for name, spec in self.manifest.tensors.items()}
        for row in sources.rows():
            n = held[row.tensor].ndim
            held[row.tensor][tuple(slice(a, b) for a, b in zip(row.lo[:n], row.hi[:n], strict=True))] = True
        return all(held[r.tensor][tuple(slice(a, b) for a, b in zip(r.lo, r.hi, strict=True))].all() for r in self.target.rows)


def cuts(draw: st.DrawFn, size: int, parts: int, *, even: bool = False) -> list[tuple[int, int]]:
    """`size` cut into `parts` consecutive non-empty ranges, uneven unless `even`."""
    if even and size % parts == 0:
        step = size // parts
        return [(i * step, (i + 1) * step) for i in range(parts)]
    inner = (
        sorted(draw(st.lists(st.integers(1, size - 1), min_size=parts - 1, max_size=parts - 1, unique=True))) if parts > 1 else []
    )
    edges = [0, *inner, size]
    return list(zip(edges, edges[1:], strict=False))


@dataclasses.dataclass
class Model:
    """The whole model, each element with a value of its own, and the sizes that cuts must know."""

    full: dict[str, np.ndarray]
    sizes: tuple[int, ...]

    @property
    def manifest(self) -> Manifest:
        return Manifest({n: TensorSpec(a.shape, "float32") for n, a in self.full.items()})


@st.composite
def sources_and_targets(draw: st.DrawFn) -> Case:
    model = _model(draw)
    source = trainer(draw, model.full, *model.sizes)
    target, ranks = engine(draw, model.full, *model.sizes)
    return Case(model.manifest, source, target, ranks)


@st.composite
def sources_and_engines(draw: st.DrawFn) -> Case:
    """One trainer and up to four engines, some of them alike, whose ranks are numbered one engine after another."""
    model = _model(draw)
    source, target, first = trainer(draw, model.full, *model.sizes), Side(), 0
    kinds = [engine(draw, model.full, *model.sizes) for _ in range(draw(st.integers(1, 2)))]
    for one, ranks in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4)):
        if first + ranks > 8:
            continue
        shift = len(target.buffers)
        target.buffers += [Buffer(f"{b.name} of {first}", b.rank + first, b.dtype, b.shape) for b in one.buffers]
        target.contents += one.contents
        target.rows += [Placement(r.tensor, r.buffer + shift, r.lo, r.hi, r.offset, r.strides) for r in one.rows]
        first += ranks
    return Case(model.manifest, source, target, first)


def _model(draw: st.DrawFn) -> Model:
    hidden, head_dim = draw(st.sampled_from([4, 6])), 2
    kv = draw(st.sampled_from([1, 2, 4]))
    per_group = draw(st.sampled_from([1, 2]))
    heads, experts, inner = kv * per_group, draw(st.sampled_from([2, 4, 6])), draw(st.sampled_from([4, 8]))
    layers, vocab = draw(st.integers(1, 3)), draw(st.integers(5, 9))
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, hidden), "norm": (hidden,)}
    for i in range(layers):
        shapes |= {
            f"{i}.q": (heads * head_dim, hidden),
            f"{i}.k": (kv * head_dim, hidden),
            f"{i}.v": (kv * head_dim, hidden),
            f"{i}.o": (hidden, heads * head_dim),
            f"{i}.router": (experts, hidden),
        }
        for e in range(experts):
            shapes |= {f"{i}.{e}.gate": (inner, hidden), f"{i}.{e}.up": (inner, hidden), f"{i}.{e}.down": (hidden, inner)}
    full, next_id = {}, 0
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        full[name] = np.arange(next_id, next_id + n, dtype=np.float32).reshape(shape)
        next_id += n
    return Model(full, (layers, kv, per_group, head_dim, experts, inner))


def trainer(draw, full, layers, kv, per_group, head_dim, experts, inner) -> Side:
    """Megatron's cut: dense layers over TP x DP, experts over EP x ETP, layers over PP stages in any assignment (VPP)."""
    side = Side()
    tp, dp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])), draw(st.integers(1, 2))
    ep = draw(st.sampled_from([e for e in (1, 2) if experts % e == 0]))
    etp = draw(st.sampled_from([1, 2]))
    stage_of = [draw(st.integers(0, pp - 1)) for _ in range(layers)]
    vocab, hidden = full["embed"].shape
    vocab_cuts = cuts(draw, vocab, min(tp, vocab))
    inner_cuts = cuts(draw, inner, etp, even=draw(st.booleans()))
    world = tp * dp
    for stage in range(pp):
        for local_rank in range(world):
            rank, t = stage * world + local_rank, local_rank % tp
            if stage == 0 and t < len(vocab_cuts):
                a, b = vocab_cuts[t]
                padded = np.concatenate([full["embed"][a:b], np.full((3, hidden), -1, np.float32)])
                side.add("embed", rank, padded, [("embed", (a, 0), (b, hidden), (0, 0))])
            if stage == pp - 1:
                side.add("norm", rank, full["norm"], [("norm", (0,), (hidden,), (0,))])
            for i in (i for i in range(layers) if stage_of[i] == stage):
                _trainer_attention(side, full, i, rank, t, tp, kv, per_group, head_dim, hidden)
                side.add(f"{i}.router", rank, full[f"{i}.router"], [(f"{i}.router", (0, 0), (experts, hidden), (0, 0))])
        for local_rank in range(ep * etp):
            rank, e, t = stage * world + local_rank % world, local_rank // etp, local_rank % etp
            a, b = inner_cuts[t]
            for i in (i for i in range(layers) if stage_of[i] == stage):
                for x in range(e * experts // ep, (e + 1) * experts // ep):
                    gate, up, down = (full[f"{i}.{x}.{n}"] for n in ("gate", "up", "down"))
                    fused = np.concatenate([gate[a:b], up[a:b]])
                    parts = [(f"{i}.{x}.{n}", (a, 0), (b, hidden), (k * (b - a), 0)) for k, n in enumerate(("gate", "up"))]
                    side.add(f"{i}.{x}.fc1.{local_rank}", rank, fused, parts)
                    side.add(f"{i}.{x}.fc2.{local_rank}", rank, down[:, a:b], [(f"{i}.{x}.down", (0, a), (hidden, b), (0, 0))])
    return side


def _trainer_attention(side, full, i, rank, t, tp, kv, per_group, head_dim, hidden) -> None:
    """Fused QKV, interleaved a query group at a time; with fewer KV heads than TP the group is replicated, its heads shared."""
    groups = range(t * kv // tp, (t + 1) * kv // tp) if kv >= tp else [t * kv // tp]
    rows, parts, at = [], [], 0
    for g in groups:
        for name, start, count in (("q", g * per_group, per_group), ("k", g, 1), ("v", g, 1)):
            a, b = start * head_dim, (start + count) * head_dim
            rows.append(full[f"{i}.{name}"][a:b])
            parts.append((f"{i}.{name}", (a, 0), (b, hidden), (at, 0)))
            at += b - a
    side.add(f"{i}.qkv", rank, np.concatenate(rows), parts)
    a, b = min(groups) * per_group * head_dim, (max(groups) + 1) * per_group * head_dim
    side.add(f"{i}.o", rank, full[f"{i}.o"][:, a:b], [(f"{i}.o", (0, a), (hidden, b), (0, 0))])


def engine(draw, full, layers, kv, per_group, head_dim, experts, inner) -> tuple[Side, int]:
    """vLLM's cut: merged [q; k; v], stacked experts w13 [E, 2I, H] and w2 [E, H, I]; TP or EP for experts; PP."""
    side = Side()
    tp, pp, use_ep = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2)), draw(st.booleans())
    heads = kv * per_group
    tp = min(tp, heads)
    vocab, hidden = full["embed"].shape
    vocab_cuts = cuts(draw, vocab, min(tp, vocab))
    inner_cuts = cuts(draw, inner, tp, even=draw(st.booleans()))
    expert_cuts = [(t * experts // tp, (t + 1) * experts // tp) for t in range(tp)]
    split = draw(st.integers(0, layers))
    for stage in range(pp):
        mine = range(layers) if pp == 1 else (range(split) if stage == 0 else range(split, layers))
        for t in range(tp):
            rank = stage * tp + t
            if stage == 0 and t < len(vocab_cuts):
                a, b = vocab_cuts[t]
                side.add("embed", rank, full["embed"][a:b], [("embed", (a, 0), (b, hidden), (0, 0))])
            side.add("norm", rank, full["norm"], [("norm", (0,), (hidden,), (0,))])
            for i in mine:
                _engine_layer(side, full, i, rank, t, tp, kv, heads, head_dim, hidden)
                side.add(f"{i}.router", rank, full[f"{i}.router"], [(f"{i}.router", (0, 0), (experts, hidden), (0, 0))])
                chosen = range(*expert_cuts[t]) if use_ep else range(experts)
                a, b = (0, inner) if use_ep else inner_cuts[t]
                if not len(chosen):
                    continue
                w13 = np.stack([np.concatenate([full[f"{i}.{x}.gate"][a:b], full[f"{i}.{x}.up"][a:b]]) for x in chosen])
                w2 = np.stack([full[f"{i}.{x}.down"][:, a:b] for x in chosen])
                parts13, parts2 = [], []
                for k, x in enumerate(chosen):
                    parts13 += [
                        (f"{i}.{x}.gate", (a, 0), (b, hidden), (k, 0, 0)),
                        (f"{i}.{x}.up", (a, 0), (b, hidden), (k, b - a, 0)),
                    ]
                    parts2.append((f"{i}.{x}.down", (0, a), (hidden, b), (k, 0, 0)))
                side.add(f"{i}.w13", rank, w13, parts13)
                side.add(f"{i}.w2", rank, w2, parts2)
    return side, tp * pp


def _engine_layer(side, full, i, rank, t, tp, kv, heads, head_dim, hidden) -> None:
    q = [(h * head_dim) for h in (t * heads // tp, (t + 1) * heads // tp)]
    k = [h * head_dim for h in ((t * kv // tp, (t + 1) * kv // tp) if kv >= tp else (t * kv // tp, t * kv // tp + 1))]
    rows = [full[f"{i}.q"][q[0] : q[1]], full[f"{i}.k"][k[0] : k[1]], full[f"{i}.v"][k[0] : k[1]]]
    n, m = q[1] - q[0], k[1] - k[0]
    parts = [
        (f"{i}.q", (q[0], 0), (q[1], hidden), (0, 0)),
        (f"{i}.k", (k[0], 0), (k[1], hidden), (n, 0)),
        (f"{i}.v", (k[0], 0), (k[1], hidden), (n + m, 0)),
    ]
    side.add(f"{i}.qkv", rank, np.concatenate(rows), parts)
    side.add(f"{i}.o", rank, full[f"{i}.o"][:, q[0] : q[1]], [(f"{i}.o", (0, q[0]), (hidden, q[1]), (0, 0))])
