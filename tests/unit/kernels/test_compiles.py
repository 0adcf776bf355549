"""Every kernel compiles to machine code for sm90, without a GPU: the interpreter accepts programs that the compiler refuses."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from vllm_refit_ext.core import layouts  # noqa: E402
from vllm_refit_ext.kernels import launch  # noqa: E402
from vllm_refit_ext.kernels.tuning import TILES  # noqa: E402

TYPES = {"table": "*i64", "tiles": "*i32", "nonfinite": "*i32", "out": "*i64"}
QUANTIZE = {"RULE": "ceil", "DTYPE": "bfloat16", "UNIT": True, "ALIGN": 16, "STORED_ALIGN": 16}
KEYS = [
    *({"kernel": "quantize_rows", "LAYOUT": name, **QUANTIZE} for name in layouts.LAYOUTS if name != "marlin"),
    {"kernel": "quantize_rows", "LAYOUT": "plain", **QUANTIZE, "DTYPE": "float32", "UNIT": False, "ALIGN": 4, "RULE": "floor"},
    {"kernel": "quantize_marlin", "LAYOUT": "marlin", **QUANTIZE},
    {"kernel": "quantize_marlin", "LAYOUT": "marlin", **QUANTIZE, "UNIT": False, "ALIGN": 2, "STORED_ALIGN": 4},
    {"kernel": "shuffle_rows", "LAYOUT": "trtllm_moe", "INVERSE": False, "ALIGN": 16},
    {"kernel": "shuffle_rows", "LAYOUT": "marlin", "INVERSE": True, "ALIGN": 1},
    {"kernel": "shuffle_marlin", "ALIGN": 16, "STORED_ALIGN": 16},
    {"kernel": "copy_units", "READ": "int64", "WRITE": "int64", "CAST": False, "LANES": 2},
    {"kernel": "copy_units", "READ": "float32", "WRITE": "bfloat16", "CAST": True, "LANES": 4},
    {"kernel": "copy_units", "READ": "bfloat16", "WRITE": "float16", "CAST": True, "LANES": 8},
    {"kernel": "digest_tiles", "WORD": "uint16", "LAYOUT": "", "SCALES": False, "UNIT": True, "ALIGN": 16},
    *(
        {"kernel": "digest_tiles", "WORD": "uint8", "LAYOUT": name, "SCALES": name != "plain", "UNIT": True, "ALIGN": 1}
        for name in layouts.LAYOUTS
    ),
]
WIDE = {
    "quantize_rows": "v4.b32",
    "quantize_marlin": "v4.b32",
    "shuffle_rows": "v4.b32",
    "shuffle_marlin": "v2.b32",
    "copy_units": "v2.b64",
}
"""The widest global load of each kernel, as PTX says it."""


@pytest.mark.skipif(launch.INTERPRETED, reason="Triton interprets in this process")
@pytest.mark.parametrize("hardware", [True, False])
@pytest.mark.parametrize("key", KEYS, ids=lambda key: "-".join(str(v) for v in key.values()))
def test_compiles_for_sm90(key, hardware):
    name = key["kernel"]
    if not hardware and not name.startswith("quantize"):
        pytest.skip("only quantisers have a hardware path")
    kernel, tile = launch.KERNELS[name], TILES[name][0]
    values = launch.constants(tuple(key.items()), tile, hardware)
    arguments = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={a: "constexpr" if a in values else TYPES[a] for a in arguments},
        constexprs={(i,): values[a] for i, a in enumerate(arguments) if a in values},
        attrs={(i,): [["tt.divisibility", 16]] for i, a in enumerate(arguments) if a not in values},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tile.warps})
    if key.get("ALIGN", 16) == 16 and name in WIDE and not key.get("CAST"):
        # Wide loads and stores are what the speed rests on.
        assert f"ld.global.{WIDE[name]}" in compiled.asm["ptx"]
