"""What a plan's target buffers are made of: the words that stand in `Buffer.layout`.

    plain                    the parameter's own elements, row-major
    checkpoint               a staged tensor of checkpoint shape, on its way to the engine's own reload
    mxfp8:LAYOUT:RULE        an MXFP8 parameter in LAYOUT of `core.layouts`, in its canonical shape. A buffer of float type is
    quantised on
                             the way in by RULE of `core.mxfp8`; buffers of E4M3 codes and of scale bytes come as a pair, as
                             they are sent
    dequantised:DTYPE        codes or scales that are sent as MXFP8 and end as DTYPE in a parameter; likewise a pair
    checkpoint dequantised:DTYPE   the same on its way to the engine's own reload

The words are part of the plan's digest, so both sides agree on them before a byte moves.
"""

from __future__ import annotations

import msgspec

from vllm_refit_ext.core.errors import LayoutError
from vllm_refit_ext.core.layouts import layout_of
from vllm_refit_ext.core.mxfp8 import Rule, check_rule

PLAIN = "plain"
CHECKPOINT = "checkpoint"
DEQUANTISED = "dequantised"
CHECKPOINT_DEQUANTISED = f"{CHECKPOINT} {DEQUANTISED}"
SCALE = "_scale"
"""An engine names the parameter of scales like that of values, with this ending."""
SCALE_OF = f"{SCALE} of "
"""Joins a parameter's name and that of sent scales in the name of the buffer that a plan gives these."""
SENT_SCALE = "_scale_from_checkpoint"
"""A sender names the scales of a tensor that it quantised with this ending."""


class Coding(msgspec.Struct, frozen=True):
    """How an MXFP8 parameter is stored: `layout` of `core.layouts`, `rule` of the engine's own quantiser."""

    layout: str
    rule: Rule

    def __str__(self) -> str:
        return f"mxfp8:{self.layout}:{self.rule}"


def coding_of(layout: str) -> Coding | None:
    """The coding that `Buffer.layout` names, or None for the other words. Raises LayoutError for one that is not known."""
    if not layout.startswith("mxfp8:"):
        return None
    parts = layout.split(":")
    if len(parts) != 3:
        raise LayoutError("not a coding", got=layout, wanted="mxfp8:LAYOUT:RULE")
    layout_of(parts[1])
    check_rule(parts[2])
    return Coding(parts[1], parts[2])  # type: ignore[arg-type]


def dequantised_to(layout: str) -> str:
    """The dtype that a `dequantised` buffer ends as, or nothing."""
    word, _, dtype = layout.partition(":")
    return dtype if word in (DEQUANTISED, CHECKPOINT_DEQUANTISED) else ""
