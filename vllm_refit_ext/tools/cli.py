"""`vllm-refit doctor | plan | bench | verify`: what can be asked without writing a program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import msgspec
from cyclopts import Parameter
from rich.console import Console

from vllm_refit_ext.core.errors import RefitError

app = cyclopts.App(name="vllm-refit", help="Hand new weights from Megatron trainers to running vLLM engines.")


@app.command
def doctor(*, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """What on this machine will make a refit fail, and what to do about it.

    Parameters
    ----------
    json:
        Print one JSON document instead of a table.

    Exits with 1 when a finding is a failure.
    """
    from vllm_refit_ext.tools import doctor as checks

    findings = checks.run()
    if json:
        _print_json(findings)
    else:
        _console().print(checks.table(findings))
    return int(any(f.level == "fail" for f in findings))


@app.command
def plan(
    recipe: Path,
    *,
    check: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    edges: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """The plan of a recipe at full size: bytes of every rank and edge, paths and why, predicted seconds. Needs no GPU.

    Parameters
    ----------
    recipe:
        A recipe file, such as examples/recipes/qwen3-30b-a3b-mxfp8-ep8-to-tp2.yaml.
    check:
        Only say whether it can work, in seconds: one period of the model's layers is planned. Exits with 1 when it can't.
    json:
        Print one JSON document instead of tables; it has every edge.
    edges:
        List every edge in the tables too.
    """
    if check:
        from megatron_sender.config_load import load_recipe
        from vllm_refit_ext.tools.plan_check import violations

        problems = violations(load_recipe(recipe))
        if json:
            _print_json(problems)
        else:
            lines = [str(p) for p in problems] or ["nothing that is known before a run is in the way"]
            _console().print("\n".join(lines), markup=False, highlight=False)
        return int(bool(problems))
    from vllm_refit_ext.tools.plan_command import plan_recipe
    from vllm_refit_ext.tools.plan_report import tables

    with Console(stderr=True).status("reading the recipe") as status:
        found = plan_recipe(recipe, status.update)
    if json:
        _print_json(found)
    else:
        for table in tables(found, edges):
            _console().print(table)
    return 0


@app.command
def bench(*, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Measure this machine's memory and links, as a recipe's `hardware` asks for them: `plan` predicts with these speeds.

    Parameters
    ----------
    json:
        Print one JSON document instead of a table.
    """
    from vllm_refit_ext.tools import bench as speeds

    measured = speeds.measure()
    if json:
        _print_json(measured)
    else:
        _console().print(speeds.table(measured))
        _console().print(speeds.snippet(measured), markup=False, highlight=False)
    return 0


@app.command
def verify(url: list[str], /, *, checkpoint: Path | None = None, json: Annotated[bool, Parameter(negative=())] = False) -> int:
    """Ask running engines what they serve: state and version of every rank, and whether engines of one size hold the same bytes.

    Parameters
    ----------
    url:
        vLLM servers with VLLM_SERVER_DEV_MODE=1, such as http://127.0.0.1:8000.
    checkpoint:
        Folder of safetensors files that every engine is compared with too, tensor by tensor. The engines plan for it, so a
        trainer that had prepared must prepare again.
    json:
        Print one JSON document instead of a table.

    Exits with 1 when a rank is torn, ranks serve different versions, engines of one size differ, or a tensor is not the
    checkpoint's.
    """
    from vllm_refit_ext.tools.verify_command import ask, table

    answer = ask(url, checkpoint)
    if json:
        _print_json(answer)
    else:
        _console().print(table(answer))
    return int(bool(answer.problems))


def _console() -> Console:
    console = Console()
    # A pipe has no width of its own; cells folded at 80 columns can't be searched.
    return console if console.is_terminal else Console(width=160)


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=1).decode() + "\n")


def run(call: Callable[[], Any]) -> int:
    """The exit status of `call`; an error of this project is printed without a traceback and gives 2."""
    try:
        return int(call() or 0)
    except RefitError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        return 2


def main(arguments: list[str] | None = None) -> None:
    """The console script."""
    sys.exit(run(lambda: app(arguments, result_action="return_value")))


if __name__ == "__main__":
    main()
