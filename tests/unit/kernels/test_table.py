"""What a table promises beyond the bits: checks at build and bind, addresses that change, verification, the thin functions."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.support.mxfp8_tensors import quantize, to_canonical  # noqa: E402
from tests.unit.kernels import checks  # noqa: E402
from vllm_refit_ext.core.errors import LayoutError, VerifyError  # noqa: E402
from vllm_refit_ext.core.layouts import Stored  # noqa: E402
from vllm_refit_ext.kernels.moves import (  # noqa: E402
    At,
    CopyMove,
    DigestMove,
    QuantizeMove,
    ShuffleMove,
    Stack,
    StoredBox,
    Strided,
    contiguous,
)
from vllm_refit_ext.kernels.pack import Packer  # noqa: E402
from vllm_refit_ext.kernels.table import Table  # noqa: E402
from vllm_refit_ext.kernels.tuning import Tile, choose  # noqa: E402
from vllm_refit_ext.kernels.verify import verify  # noqa: E402

STACK = Stack("marlin", At(1), At(2), Stored(128, 64), 2)


def box(shape=(128, 64), dtype="bfloat16", buffer=0, offset=0):
    return contiguous(At(buffer, offset), dtype, shape)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: QuantizeMove(box(dtype="float16"), STACK, (0, 0)), r"got float16; wanted bfloat16 or float32"),
        (lambda: QuantizeMove(box(), STACK, (0, 0), "round"), r"got 'round'; wanted ceil or floor"),
        (lambda: QuantizeMove(box((128, 48)), STACK, (0, 0)), r"got K = 48; wanted a positive multiple of 32"),
        (lambda: QuantizeMove(box((128, 32)), STACK, (0, 16)), r"K starts at 16; wanted a multiple of 32"),
        (lambda: QuantizeMove(box(), STACK, (64, 0), name="w2"), r"w2: .*got size \(128, 64\) at \(64, 0\)"),
        (lambda: QuantizeMove(box(), STACK, (2, 0, 0)), r"at \(2, 0, 0\); wanted inside \(2, 128, 64\)"),
        (lambda: Stack("marlin", At(0), At(1), Stored(100, 64)), r"got 100 rows; wanted a multiple of 64"),
        (lambda: Strided(At(0, 3), "bfloat16", (4,), (2,)), r"at byte 3; wanted multiples of 2 bytes"),
        (lambda: Strided(At(0), "bfloat16", (4,), (-2,)), r"strides \(-2,\)"),
        (lambda: CopyMove(box(), box((64, 128))), r"got \(128, 64\); wanted \(64, 128\)"),
        (lambda: CopyMove(box(), box(dtype="uint8")), r"got bfloat16 to uint8"),
        (lambda: CopyMove(box(dtype="uint8"), box(dtype="int8")), r"got uint8 to int8"),
        (lambda: ShuffleMove(box(dtype="bfloat16"), box((128, 2), "uint8"), STACK, (0, 0)), r"codes must be bytes"),
        (lambda: ShuffleMove(box(dtype="uint8"), box((128, 3), "uint8"), STACK, (0, 0)), r"got \(128, 3\); wanted \(128, 2\)"),
    ],
)
def test_moves_refuse_what_no_kernel_takes(make, match):
    with pytest.raises(LayoutError, match=match):
        make()


def test_bind_refuses_memory_that_does_not_fit():
    table = Table([QuantizeMove(box(), STACK, (1, 0, 0), name="down")], "cpu")
    x, values, scales = torch.zeros(128, 64, dtype=torch.bfloat16), torch.zeros(2 * 8192).byte(), torch.zeros(512).byte()
    with pytest.raises(LayoutError, match="no addresses"):
        table.launch()
    with pytest.raises(LayoutError, match=r"got 2 buffers; wanted 3"):
        table.bind([x, values])
    with pytest.raises(LayoutError, match=r"buffer 1: .*got 8192 bytes; wanted at least 16384"):
        table.bind([x, values[8192:], scales])
    odd = torch.zeros(9000, dtype=torch.bfloat16)[1:]
    with pytest.raises(LayoutError, match=r"buffer 0: .*not aligned.*wanted a multiple of 16"):
        Table(table.moves, "cpu", backend="triton").bind([odd, values, scales])
    Table(table.moves, "cpu", backend="triton", alignment={0: 2}).bind([odd, values, scales])
    with pytest.raises(LayoutError, match=r"buffer 0: .*another device \(got meta"):
        table.bind([x.to("meta"), values, scales])
    with pytest.raises(LayoutError, match=r"down: a source overlaps"):
        table.bind([values.view(torch.bfloat16), values, scales])
    table.bind([x, values, scales])
    table.launch()


def test_rebinding_moves_the_same_plan_to_other_memory():
    moves = [CopyMove(box((64,), "float32", 0, 64), box((64,), "float32", 1))]
    table = Table(moves, "cpu")
    for seed in range(2):
        source, target = torch.full((80,), float(seed)), torch.full((64,), -1.0)
        table.bind([source, target])
        table.launch()
        assert (target == seed).all()


@pytest.mark.parametrize("layout", checks.LAYOUTS)
def test_torch_moves_in_many_small_parts_give_the_same_bits(layout, monkeypatch):
    monkeypatch.setattr("vllm_refit_ext.kernels.torch_moves._CHUNK", 500)
    checks.check_quantize(checks.Way("cpu", "torch"), layout, (256, 96), gated=True, count=2)
    checks.check_shuffle(checks.Way("cpu", "torch"), layout, (256, 96))


def test_empty_moves_and_empty_tables_do_nothing():
    empty = [QuantizeMove(box((0, 64)), STACK, (0, 0)), CopyMove(box((0, 3)), box((0, 3), buffer=1))]
    for moves in ([], empty, [DigestMove(box((0, 4)), (8, 4), (8, 0))]):
        table = Table(moves, "cpu")
        table.bind([torch.zeros(4, dtype=torch.bfloat16)] * 3)
        table.launch()
        assert table.nonfinite() == []
        assert table.digest_values() in ([], [0])


def test_one_launch_for_a_layer_whatever_its_matrices():
    packer = Packer({}, {})
    w13 = Stack("trtllm_moe", At(1), At(2), Stored(1536, 2048, True), 8)
    w2 = Stack("trtllm_moe", At(3), At(4), Stored(2048, 768), 8)
    moves = []
    for e in range(8):
        for stack, shape, row in ((w13, (768, 2048), 0), (w13, (768, 2048), 768), (w2, (2048, 768), 0)):
            moves.append(ShuffleMove(box(shape, "uint8"), box((shape[0], shape[1] // 32), "uint8", 5), stack, (e, row, 0)))
    packer.pack(moves)
    (group,) = packer.groups.values()
    assert len(group.rows) == 24
    assert group.count == len(group.tile_owner())


def test_tiles_follow_the_width_of_a_matrix():
    tiles = (Tile(8, 1024, 4), Tile(32, 256, 4), Tile(128, 64, 4))
    assert [choose(tiles, k).cols for k in (2048, 7168, 768, 192, 96, 32)] == [1024, 1024, 256, 64, 64, 64]


def test_overlap_is_found_between_any_read_and_any_write():
    moves = [CopyMove(box((4,), "int32", 0, 16 * i), box((4,), "int32", 1, 16 * i)) for i in range(8)]
    memory = torch.arange(64, dtype=torch.int32)
    table = Table(moves, "cpu")
    table.bind([memory[:32], memory[32:]])
    with pytest.raises(LayoutError, match="overlaps"):
        table.bind([memory[:32], memory[28:60]])


def test_verify_draws_a_sample_and_finds_one_wrong_byte():
    x = torch.randn(3, 128, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    stack, values, scales = checks.engine("marlin", Stored(128, 64), 3, "cpu")
    other = torch.zeros(64, dtype=torch.float32)
    moves = [
        *(QuantizeMove(box(offset=m * 128 * 64 * 2), stack, (m, 0, 0), name=f"expert {m}") for m in range(3)),
        CopyMove(box((64,)), box((64,), "float32", 3), name="norm"),
    ]
    buffers = [x, values, scales, other]
    table = Table(moves, "cpu")
    table.bind(buffers)
    table.launch()
    report = verify(moves, buffers, sample=99)
    assert (report.moves, report.wrong) == (4, [])
    assert verify(moves, buffers, sample=2).moves == 2
    scales[1, 1, 5] += 1
    other[3] += 1
    with pytest.raises(VerifyError, match=r"expert 1: 1 of 8448 bytes.*norm: . of 256"):
        verify(moves, buffers, sample=99).raise_if_wrong()


def test_quantize_names_tensors_that_are_not_finite():
    good, bad = torch.ones(64, 32), torch.ones(64, 32)
    bad[3, 3] = float("nan")
    with pytest.raises(LayoutError, match=r"^up: NaN or Inf"):
        quantize([good, bad], names=["gate", "up"])
    assert quantize([]) == []


def test_layouts_are_read_back():
    x = [torch.randn(2, 128, 96)]
    back = to_canonical("trtllm_moe", *quantize(x, layout="trtllm_moe", gated=True)[0], gated=True)
    assert all(map(torch.equal, back, quantize(x)[0]))


def test_digest_moves_check_their_boxes():
    stack = Stack("plain", At(0), At(1), Stored(8, 64))
    with pytest.raises(LayoutError, match=r"inside \(8, 60\)"):
        Table([DigestMove(StoredBox(stack, (0, 0), (8, 64)), (8, 60), (0, 0))], "cpu", backend="triton")
    with pytest.raises(LayoutError, match="more dimensions"):
        Table([DigestMove(box((2, 8, 64)), (8, 64), (0, 0))], "cpu", backend="triton")
