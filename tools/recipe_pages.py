"""Writes docs/recipes.md and docs/preflight.md from the schema, the recipes and the preconditions.

python -m tools.recipe_pages
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from megatron_sender.config import Recipe
from megatron_sender.config_load import describe, find_recipes, load_recipe
from megatron_sender.preflight import PRECONDITIONS, refit_memory

ROOT = Path(__file__).resolve().parents[1]

RECIPES_HEAD = """# Recipes

A recipe is one YAML file that describes a trainer, its engines and the refit between them. Facts about trainer and engines are
there for the preflight and the plan to read: they set nothing, Megatron and vLLM keep their own configuration. The `refit` part
is what this project does. Unknown keys, missing keys and keys written twice are errors; every error names the full path of the
setting.

    from megatron_sender.config_load import load_recipe
    from megatron_sender.preflight import check_refit_support

    recipe = check_refit_support(load_recipe("examples/recipes/qwen3-30b-a3b-mxfp8-async.yaml"))

`vllm-refit plan RECIPE` plans it at full size on a machine without a GPU (docs/planning.md). In the trainer, `sender_config`
turns the `refit` part into the sender's settings; what a recipe does not know is given beside it:

    from megatron_sender import MegatronSender, sender_config

    sender = MegatronSender(model_chunks, bridge, engine, sender_config(recipe, unused=unread))

`unread` are the checkpoint names that no engine reads, such as multi-token prediction layers: `vllm-refit plan RECIPE --json`
lists them under that name. A recipe's wire `ipc` is the sender's `ipc` in mode direct and its `ring` in mode staged.
`running_requests` and `max_steps_off` are for the training loop to keep; the preflight holds them against the rest.

This page is generated from the schema by `python -m tools.recipe_pages`.
"""

PREFLIGHT_HEAD = """# The preflight

`megatron_sender.preflight.check_refit_support(config)` runs before anything is allocated. It takes a `Recipe` or plain nested
data with the same keys (docs/recipes.md), and raises one `ConfigError` that lists every violation: the path of the setting, what
was got, what is wanted, and why. It refuses

- sizes that Megatron or vLLM can't cut: heads, KV heads, feed-forward sizes, experts, the padded vocabulary, Mamba heads and
  groups, pipeline stages (even, uneven, virtual, custom layouts), ranks that are not a whole number of model copies;
- MXFP8 blocks of 32 along K that a cut of the engine or of the trainer would split;
- ignore patterns that match no module of the engine, or name only a part of what it joins (q, k and v; gate and up);
- formats that do not go together: FP8 storage in the trainer, FP16 with Marlin, prequantisation for an unquantised engine;
- kernels that the GPU, the format or the model does not have;
- expert load balancing, which moves experts after the plan is made;
- placement against wire: NCCL on a shared GPU, CUDA IPC on a CPU, memory of another host (below);
- policies that contradict each other, and weights that do not fit the memory.

It does not look at GPUs, processes or networks; `vllm-refit doctor` does.

These rules are arithmetic on the recipe and run where neither torch nor Megatron nor vLLM is installed.
`vllm-refit plan RECIPE --check` adds what only those know, in seconds and without a GPU: it cuts the model to one period of its
layers (every kind of layer once), makes the real source map and records the real routes with the recipe's sizes, and plans from
one to the other. What is refused is listed under the setting that causes it, found by trying each size alone: under
`model.hf_config` when it is refused uncut as well. Pipeline stages, hosts and memory depend on all layers; they stay with the
rules and with the plan at full size.

## Over several hosts

Memory of another host can't be mapped. A host is `hardware.gpus_per_host` ranks in a row.

- `ipc` in mode direct, and `shm`: colocated, when the trainer ranks of each host hold all that its engine ranks need (of equal
  copies the near one is read); disaggregated, when all fits one host.
- `ipc` in mode staged, which is the sender's wire `ring`: colocated always, as every engine's host has trainer ranks. These
  receive what lies elsewhere and show it to the engine. Disaggregated, when all fits one host.
- `collective`: disaggregated always; colocated on CPUs only, as two NCCL ranks can't share a GPU.

## The reference system's preconditions

`check_nccl_reshard_refit_support(config)` reads a configuration of NeMo-RL's shape (`policy.generation...`,
`policy.megatron_cfg...`). NeMo-RL lists nineteen preconditions for its shard-to-shard refit, which moves feed-forward weights
only. Here all weights take the shard-to-shard wire, and this became of the preconditions:

"""


def _parts(kind: Any, path: str = "") -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Every part of the schema below `kind` with its path, parents first. A list adds `[]`."""
    yield path, kind
    for name, hint in get_type_hints(kind).items():
        inner, suffix = hint, ""
        if get_origin(inner) is list:
            inner, suffix = get_args(inner)[0], "[]"
        options = get_args(inner) if get_origin(inner) is Union or type(inner).__name__ == "UnionType" else (inner,)
        for option in options:
            if isinstance(option, type) and issubclass(option, msgspec.Struct):
                yield from _parts(option, f"{path}.{name}{suffix}".lstrip("."))


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        if isinstance(field.default, msgspec.Struct):
            return "its defaults"
        if isinstance(field.default, bool) or field.default is None:
            return {None: "null", True: "true", False: "false"}[field.default]
        return str(field.default)
    return "required" if field.default_factory is msgspec.NODEFAULT else "empty"


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def recipes_page(folder: Path) -> str:
    """The text of docs/recipes.md for the recipes in `folder`."""
    lines = [RECIPES_HEAD]
    for path, part in _parts(Recipe):
        lines += [f"## {path or 'Top level'}", "", (part.__doc__ or "").strip(), ""]
        lines += [_row("setting", "type", "default", "meaning"), _row("---", "---", "---", "---")]
        hints = get_type_hints(part, include_extras=True)
        for field in msgspec.structs.fields(part):
            hint = hints[field.name]
            notes = [meta.description for meta in get_args(hint)[1:] if isinstance(meta, msgspec.Meta) and meta.description]
            lines.append(_row(f"`{field.name}`", describe(hint), _default(field), " ".join(notes)))
        lines.append("")
    lines += [
        "## Shipped recipes",
        "",
        "Gigabytes (1e9 bytes) are lower bounds of weights a rank, from the model's matrices alone. docs/planning.md has what",
        "planning each at full size gave and cost.",
        "",
    ]
    head = ("recipe", "what", "placement", "wire", "trainer GB a rank", "engine GB a rank")
    lines += [_row(*head), _row(*["---"] * len(head))]
    for file in find_recipes(folder):
        recipe = load_recipe(file)
        trainer, *engines = refit_memory(recipe)
        wire = f"{recipe.refit.wire}, {recipe.refit.effective_mode()}" + (", prequantised" if recipe.refit.prequantize else "")
        sizes = ", ".join(f"{engine.weights / 1e9:.1f}" for engine in engines)
        link = f"[{file.stem}](../examples/recipes/{file.name})"
        lines.append(_row(link, recipe.summary, recipe.refit.placement, wire, f"{trainer.weights / 1e9:.1f}", sizes))
    return "\n".join(lines) + "\n"


def preflight_page() -> str:
    """The text of docs/preflight.md."""
    lines = [_row("no.", "setting", "demanded there", "here", "why"), _row("---", "---", "---", "---", "---")]
    lines += [_row(p.number, f"`{p.setting}`", p.demands, p.status, p.reason) for p in PRECONDITIONS]
    return PREFLIGHT_HEAD + "\n".join(lines) + "\n"


def main() -> None:
    """Writes both pages."""
    (ROOT / "docs" / "recipes.md").write_text(recipes_page(ROOT / "examples" / "recipes"))
    (ROOT / "docs" / "preflight.md").write_text(preflight_page())


if __name__ == "__main__":
    main()
