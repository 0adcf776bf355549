"""Make docs/errors.md from the code: every error that the two packages can raise, by class, with what to do about it.

PYTHONPATH=. python tools/error_catalogue.py writes the page; the tests compare it with what the code says.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

from vllm_refit_ext.core import errors

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
PACKAGES = ("vllm_refit_ext", "megatron_sender")
KINDS = {name: k for name, k in vars(errors).items() if isinstance(k, type) and issubclass(k, errors.RefitError)}
FIELDS = ("what", "where", "got", "wanted", "do")
HEAD = """# Errors

Made by `PYTHONPATH=. python tools/error_catalogue.py` from the code. An error says what happened, where, what it got, what it
wanted and what to do; one error may carry several problems, which stand in its `problems`. What one engine rank finds is raised
for all of them, with its number. `…` stands for what differs from case to case.
"""
SECTION = "Problems that are listed in an error of one of these classes"


def problems(path: Path) -> Iterator[tuple[str, str, str]]:
    """(class or Problem, what, do) of each place in a file that makes one; what was wanted where there is no `do`."""
    tree = ast.parse(path.read_text())
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        for node in _own(scope):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and (name in KINDS or name == "Problem"):
                given = dict(zip(FIELDS, node.args, strict=False)) | {k.arg: k.value for k in node.keywords if k.arg}
                for what in _texts(given.get("what"), scope, node.lineno):
                    if what.strip("… "):
                        mend = " / ".join(_texts(given.get("do"), scope, node.lineno))
                        wanted = " / ".join(_texts(given.get("wanted"), scope, node.lineno))
                        yield name, what, mend or (f"wanted: {wanted}" if wanted.strip("… ") else "")


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it."""
    for node in ast.iter_child_nodes(scope):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _own(node)


def _texts(node: ast.AST | None, scope: ast.AST, line: int) -> list[str]:
    """The texts that an expression may be."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value] if node.value else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)]  # type: ignore[misc]
    if isinstance(node, ast.IfExp):
        return _texts(node.body, scope, line) + _texts(node.orelse, scope, line)
    if isinstance(node, ast.BinOp):
        return ["".join((_texts(side, scope, line) or ["…"])[0] for side in (node.left, node.right))]
    if isinstance(node, ast.Name):
        return _assigned(node.id, scope, line)
    return ["…"] if node is not None else []


def _assigned(name: str, scope: ast.AST, line: int) -> list[str]:
    """The texts of a variable where it was set last before `line`."""
    last, at = None, line
    for node in sorted((n for n in _own(scope) if isinstance(n, ast.Assign) and n.lineno < line), key=lambda n: n.lineno):
        for target in node.targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = node.value.elts if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) else [node.value]
            for each, value in zip(names, values, strict=False):
                if isinstance(each, ast.Name) and each.id == name:
                    last, at = value, node.lineno
    return ["…"] if last is None else _texts(last, scope, at)


def page() -> str:
    """The page as the code says it."""
    found: dict[str, set[tuple[str, str]]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name, what, do in problems(path):
                found.setdefault(name, set()).add((what, do))
    parts = [HEAD]
    for name in (*KINDS, "Problem"):
        if name in found:
            about = SECTION if name == "Problem" else inspect.getdoc(KINDS[name])
            rows = [f"| {_cell(what)} | {_cell(do)} |" for what, do in sorted(found[name])]
            parts.append("\n".join([f"\n## {name}\n", f"{about}\n", "| what happened | what to do |", "|---|---|", *rows, ""]))
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
