"""docs/wires.md names every field of every message, and no field that is none."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from vllm_refit_ext.core import manifest, messages
from vllm_refit_ext.core.messages import (
    CollectiveInfo,
    Message,
    NixlInfo,
    NixlRank,
    PrepareReply,
    Published,
    RingInfo,
    ShmInfo,
    Status,
    TakeReply,
    UpdateInfo,
    UpdateReport,
)

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/wires.md").read_text()


def fields(kind: type[msgspec.Struct]) -> set[str]:
    return {f.name for f in msgspec.structs.fields(kind)}


def named(start: str, end: str = "\n\n") -> str:
    begin = TEXT.index(start)
    return TEXT[begin : TEXT.index(end, begin)]


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        (PrepareReply, "`PrepareReply`: `rank`"),
        (UpdateReport, "`rank`, `version`, `writer`"),
        (CollectiveInfo, "`collective`: `{"),
    ],
)
def test_a_list_of_fields_is_the_struct(kind: type[msgspec.Struct], start: str) -> None:
    text = re.sub(r"\([^)]*\)", "", named(start)).replace('"', "`").replace("`{`", "`")
    found = (
        set(re.findall(r"`(\w+)`", text)) if kind is not CollectiveInfo else set(re.findall(r"`(\w+)`", text.partition("}")[0]))
    )
    assert found - {kind.__name__} - {"collective"} == fields(kind)


def test_the_table_of_an_update_is_the_struct() -> None:
    table = named("| field | meaning |")
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == fields(UpdateInfo)


def test_every_field_of_the_other_messages_is_named() -> None:
    words = set(re.findall(r"\w+", TEXT))
    for kind in (ShmInfo, NixlInfo, NixlRank, RingInfo, Status, TakeReply, Published, manifest.Offer, manifest.TensorSpec):
        assert fields(kind) <= words, kind


def test_every_message_documents_its_fields() -> None:
    """The docstring of a struct is where a reader looks first."""
    for kind in (PrepareReply, UpdateInfo):
        text = kind.__doc__ or ""
        wires = {"shm", "ipc", "nixl", "ring", "collective"}
        assert {name for name in fields(kind) if f"{name}:" not in text} <= wires | {"protocol", "wire"}, kind
    assert issubclass(PrepareReply, Message)
    assert messages.Envelope.__doc__


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_the_docs_name_exist(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"`((?:tests|docs|benchmarks|examples|tools|vllm_refit_ext|megatron_sender)/[\w./-]+\.\w+)`", text):
        assert (ROOT / path).exists(), path
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)$", text, re.M)}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif not target.startswith("http"):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_there_are_eight_pages() -> None:
    """Beside the catalogue of errors, which a program makes."""
    assert len([page for page in PAGES if page.name != "errors.md"]) == 8
