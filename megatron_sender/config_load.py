"""Reading recipes: every mistake of a file is found at once, and each is named by the full path of the setting."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from megatron_sender.config import Recipe
from vllm_refit_ext.core.errors import ConfigError, Problem

MAX_SHOWN = 80
"""Characters of a wrong value that an error repeats."""


def show(value: object) -> str:
    """`value` as an error shows it: cut to `MAX_SHOWN` characters."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def closest(word: object, known: Iterable[str]) -> str:
    """A sentence that offers the known word nearest to `word`, or lists the known words."""
    names = list(known)
    match = difflib.get_close_matches(str(word), names, n=1, cutoff=0.6)
    return f"Did you mean `{match[0]}`?" if match else "Known: " + ", ".join(names) + "."


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML's safe loader, except that a key written twice is an error."""


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if isinstance(key, str) and key in seen:
            raise ConfigError("a key is written twice", where=f"line {line}", got=key, do=f"First seen in line {seen[key]}.")
        if isinstance(key, str):
            seen[key] = line
    mapping: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _read_yaml(path: Path) -> object:
    try:
        with path.open("rb") as file:
            return yaml.load(file, Loader=_Loader)
    except OSError as error:
        raise ConfigError("the recipe can't be read", where=str(path), got=error.strerror or type(error).__name__) from error
    except ConfigError as error:
        raise ConfigError.of([msgspec.structs.replace(p, where=f"{path}: {p.where}") for p in error.problems]) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError("the recipe is not YAML", where=str(path), got=" ".join(str(error).split())) from error


def check_shape(kind: Any, value: object, path: str = "") -> list[Problem]:
    """Everything in `value` that does not fit the type `kind`, each with its path below `path`. Empty: it fits."""
    origin = get_origin(kind)
    if origin is Annotated:
        inner = get_args(kind)[0]
        # Containers are walked so that each wrong item gets its own path; bounds of the container itself are checked last.
        problems = check_shape(inner, value, path)
        return problems or _check_leaf(kind, value, path)
    if origin in (Union, UnionType):
        if value is None and NoneType in get_args(kind):
            return []
        options = [option for option in get_args(kind) if option is not NoneType]
        return check_shape(options[0], value, path) if len(options) == 1 else _check_leaf(kind, value, path)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _check_struct(kind, value, path)
    if origin is list and isinstance(value, list):
        (item,) = get_args(kind)
        return [problem for i, entry in enumerate(value) for problem in check_shape(item, entry, f"{path}[{i}]")]
    return _check_leaf(kind, value, path)


def _check_struct(kind: type[msgspec.Struct], value: object, path: str) -> list[Problem]:
    if isinstance(value, kind):
        return []
    where = path or "the recipe"
    if not isinstance(value, Mapping):
        wanted = "keys " + ", ".join(kind.__struct_fields__)
        return [Problem("a mapping is wanted here", where=where, got=show(value), wanted=wanted)]
    hints = get_type_hints(kind, include_extras=True)
    prefix = f"{path}." if path else ""
    problems = [
        Problem("unknown setting", where=prefix + _key_text(key), got=show(value[key]), do=closest(key, hints))
        for key in value
        if key not in hints
    ]
    for field in msgspec.structs.fields(kind):
        if field.name in value:
            problems += check_shape(hints[field.name], value[field.name], prefix + field.name)
        elif field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
            wanted = ", ".join(map(str, literal_options(hints[field.name]))) or "a value"
            problems.append(Problem("a required setting is missing", where=prefix + field.name, wanted=wanted))
    return problems


def _key_text(key: object) -> str:
    return key if isinstance(key, str) and key.isidentifier() else show(key)


def _check_leaf(kind: Any, value: object, path: str) -> list[Problem]:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        literals = [str(option) for option in literal_options(kind)]
        do = closest(value, literals) if isinstance(value, str) and literals else ""
        wanted = "one of " + ", ".join(literals) if literals else " ".join(str(error).split()).replace("`", "")
        return [Problem("the value does not fit", where=path, got=show(value), wanted=wanted, do=do)]
    return []


def literal_options(kind: Any) -> list[object]:
    """The values that a `Literal` anywhere inside `kind` allows."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [option for part in get_args(kind) if not isinstance(part, msgspec.Meta) for option in literal_options(part)]


def parse_recipe(value: object, base: Path | None = None) -> tuple[Recipe | None, list[Problem]]:
    """A recipe from plain nested data, and every problem of its shape; no recipe when there are problems.

    `value` has the keys of `Recipe`. `base` is the folder that a path in `model.hf_config` is relative to (default: the working
    directory). The returned recipe holds the configuration itself, never its path.
    """
    if isinstance(value, Recipe):
        data, problems = value, []
    else:
        problems = check_shape(Recipe, value)
        if problems:
            return None, problems
        data = msgspec.convert(value, Recipe)
    hf_config = data.model.hf_config
    if isinstance(hf_config, str):
        hf_config, problems = _read_hf_config(hf_config, base)
        if problems:
            return None, problems
    model = msgspec.structs.replace(data.model, hf_config=hf_config)
    return msgspec.structs.replace(data, model=model), []


def _read_hf_config(written: str, base: Path | None) -> tuple[dict[str, Any], list[Problem]]:
    where = "model.hf_config"
    wanted = "a mapping, or the path of a JSON file relative to the recipe"
    path = (base or Path()) / written
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        got = f"{show(written)}: {error.strerror or type(error).__name__}"
        return {}, [Problem("the file can't be read", where=where, got=got, wanted=wanted, do=f"Looked for {path}.")]
    except (ValueError, RecursionError) as error:
        return {}, [Problem("the file is not JSON", where=where, got=show(str(error)), wanted=wanted)]
    if not isinstance(config, dict):
        return {}, [Problem("the file does not hold a mapping", where=where, got=show(config), wanted=wanted)]
    return config, []


def load_recipe(path: str | Path) -> Recipe:
    """The recipe in the YAML file `path`, with `model.hf_config` read in. Says nothing yet about whether it can work.

    Raises ConfigError that lists every problem: not YAML, unknown or missing or repeated keys, values that do not fit.
    """
    path = Path(path)
    recipe, problems = parse_recipe(_read_yaml(path), path.parent)
    if recipe is None:
        raise ConfigError.of(problems, f"{path}: {len(problems)} problem(s) in the recipe")
    return recipe


def find_recipes(folder: str | Path) -> list[Path]:
    """The recipe files (`*.yaml`, `*.yml`) of `folder`, sorted.

    Raises ConfigError when there is none: a check of all recipes must not pass because it saw no recipe.
    """
    folder = Path(folder)
    found = sorted(path for path in folder.glob("*.y*ml") if path.suffix in (".yaml", ".yml"))
    if not found:
        raise ConfigError("no recipe found", where=str(folder), wanted="files that end in .yaml or .yml")
    return found
