"""Which decoder layers a pipeline rank of Megatron holds, and every setting that Megatron would refuse."""

from __future__ import annotations

import re

from megatron_sender.config import Parallelism
from megatron_sender.config_load import show
from vllm_refit_ext.core.errors import Problem

LETTERS = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
MAX_LAYOUT = 20000
"""Letters that an unrolled layout may have."""
WHERE = "trainer.parallelism"


def stage_layers(p: Parallelism, layers: int, mtp_layers: int, where: str = WHERE) -> tuple[list[list[int]], list[Problem]]:
    """Decoder layer numbers by pipeline rank, in order, for a model of `layers` layers; or the problems, named below `where`.

    The rules are those of megatron-core's TransformerConfig and PipelineParallelLayerLayout.
    """
    uneven = p.first_stage_layers is not None or p.last_stage_layers is not None
    counted = p.embedding_counts_as_layer or p.loss_counts_as_layer
    problems = []
    if uneven and counted:
        problems.append(
            Problem(
                "Megatron takes uneven stages or counted embedding and loss, not both",
                where=f"{where}.{'first' if p.first_stage_layers else 'last'}_stage_layers",
                got="with embedding_counts_as_layer or loss_counts_as_layer",
                wanted="one of them",
            )
        )
    if p.pipeline_layout is not None and (uneven or counted):
        also = [
            name
            for name in ("first_stage_layers", "last_stage_layers", "embedding_counts_as_layer", "loss_counts_as_layer")
            if getattr(p, name)
        ]
        what = "a layout says everything, so Megatron refuses another pipeline setting beside it"
        problems.append(Problem(what, where=f"{where}.pipeline_layout", got="with " + ", ".join(also), wanted="the layout alone"))
    if p.vpp is not None and p.vpp > 1 and p.pp == 1:
        what = "virtual pipeline needs a pipeline"
        problems.append(Problem(what, where=f"{where}.vpp", got=f"{p.vpp} with pp 1", wanted="null, or pp of at least 2"))
    if problems:
        return [], problems
    if p.pipeline_layout is not None:
        return _from_layout(p, layers, mtp_layers, where)
    return _from_counts(p, layers, where)


def _from_counts(p: Parallelism, layers: int, where: str) -> tuple[list[list[int]], list[Problem]]:
    problems: list[Problem] = []
    extra_first, extra_last = int(p.embedding_counts_as_layer), int(p.loss_counts_as_layer)
    first, last = p.first_stage_layers, p.last_stage_layers
    middle = layers + extra_first + extra_last - (first or 0) - (last or 0)
    stages = p.pp - (first is not None) - (last is not None)
    setting = "first_stage_layers" if first is not None else "last_stage_layers" if last is not None else "pp"
    got = f"{layers} layers in {p.pp} stages" + "".join(
        f", {value} in the {name}" for name, value in (("first", first), ("last", last)) if value is not None
    )
    if extra_first or extra_last:
        got += f", {extra_first + extra_last} more counted for embedding and loss"
    if stages < 0 or middle < 0 or bool(middle) != bool(stages) or (stages and middle % stages):
        wanted = "counts that add up to the layers, the rest of them divisible by the other stages"
        what = "the pipeline stages don't divide the layers"
        problems.append(Problem(what, where=f"{where}.{setting}", got=got, wanted=wanted))
        return [], problems
    each = middle // stages if stages else 0
    slots = [each] * p.pp
    if first is not None:
        slots[0] = first
    if last is not None:
        slots[-1] = last
    chunks = p.vpp or 1
    uneven = {
        0: "first_stage_layers" if first is not None else "vpp",
        p.pp - 1: "last_stage_layers" if last is not None else "vpp",
    }
    for stage in range(p.pp):
        name = uneven.get(stage, "vpp")
        if slots[stage] % chunks and not any(problem.where == f"{where}.{name}" for problem in problems):
            wanted = f"a multiple of vpp {chunks}"
            what = "a pipeline stage does not divide into its virtual stages"
            problems.append(Problem(what, where=f"{where}.{name}", got=f"{slots[stage]} layers", wanted=wanted))
    if problems:
        return [], problems
    held: list[list[int]] = [[] for _ in range(p.pp)]
    number = 0
    for chunk in range(chunks):
        for stage in range(p.pp):
            count = slots[stage] // chunks
            count -= extra_first if chunk == 0 and stage == 0 else 0
            count -= extra_last if chunk == chunks - 1 and stage == p.pp - 1 else 0
            if count < 0:
                name = "loss_counts_as_layer" if extra_last else "embedding_counts_as_layer"
                what, wanted = "a stage has no room for what is counted as a layer", "fewer stages, or false"
                return [], [Problem(what, where=f"{where}.{name}", got=got, wanted=wanted)]
            held[stage] += range(number, number + count)
            number += count
    return held, []


def parse_layout(text: str) -> list[list[str]]:
    """Megatron's layout text as one list of layer names per stage; raises ValueError that says what is wrong.

    `|` ends a stage, `x*n` and `(...)*n` repeat, commas mean nothing.
    """
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        grown = sum(len(m[1]) * int(m[2][:6]) for m in re.finditer(pattern, text))
        if len(text) + grown > MAX_LAYOUT:
            raise ValueError(f"the layout unrolls to more than {MAX_LAYOUT} letters")
        text = re.sub(pattern, lambda m: m[1] * int(m[2]), text.replace(",", ""))
    unknown = sorted(set(text) - set(LETTERS) - {"|"})
    if unknown:
        raise ValueError(f"unknown letter {unknown[0]!r}; known are E (embedding), t (decoder), m (MTP), L (loss) and |")
    return [[LETTERS[letter] for letter in stage] for stage in text.split("|")]


def _from_layout(p: Parallelism, layers: int, mtp_layers: int, where: str) -> tuple[list[list[int]], list[Problem]]:
    setting = f"{where}.pipeline_layout"
    layout = p.pipeline_layout
    try:
        stages = parse_layout(layout) if isinstance(layout, str) else [[n.strip().lower() for n in s] for s in layout or []]
        unknown = sorted({name for stage in stages for name in stage} - set(LETTERS.values()))
        if unknown:
            raise ValueError(f"unknown layer {unknown[0]!r}; known are {', '.join(LETTERS.values())}")
    except ValueError as error:
        return [], [Problem("the layout can't be read", where=setting, got=show(layout), do=f"{error}.")]
    flat = [name for stage in stages for name in stage]
    problems = []

    def refuse(what: str, got: object, wanted: object) -> None:
        problems.append(Problem(what, where=setting, got=str(got), wanted=str(wanted)))

    if len(stages) % p.pp:
        refuse("the layout's stages are not a multiple of pp", f"{len(stages)} stages", f"a multiple of {p.pp}")
    elif p.vpp is not None and len(stages) != p.pp * p.vpp:
        refuse("the layout and vpp disagree", f"{len(stages)} stages with pp {p.pp} and vpp {p.vpp}", p.pp * p.vpp)
    elif p.pp == 1 and len(stages) > 1:
        refuse("virtual pipeline needs a pipeline", f"{len(stages)} stages with pp 1", "1 stage, or pp of at least 2")
    if not flat or flat[0] != "embedding" or flat.count("embedding") != 1:
        refuse("the layout must begin with its one embedding", show(flat[:1]), "embedding first, once")
    if not flat or flat[-1] != "loss" or flat.count("loss") != 1:
        refuse("the layout must end with its one loss", show(flat[-1:]), "loss last, once")
    if flat.count("decoder") != layers:
        refuse("the layout has another number of decoder layers than the model", flat.count("decoder"), layers)
    if flat.count("mtp") not in (0, mtp_layers):
        refuse("the layout has another number of MTP layers than the model", flat.count("mtp"), f"{mtp_layers}, or 0 untrained")
    if "mtp" in flat and "decoder" in flat[flat.index("mtp") :]:
        refuse("MTP layers come after all decoder layers", "a decoder layer after an MTP layer", "decoder layers first")
    if problems:
        return [], problems
    held: list[list[int]] = [[] for _ in range(p.pp)]
    number = 0
    for index, stage in enumerate(stages):
        count = stage.count("decoder")
        held[index % p.pp] += range(number, number + count)
        number += count
    return held, []
