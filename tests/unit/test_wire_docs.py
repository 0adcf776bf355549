"""docs/wire.md names every field of every message, and no field that is none."""

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
TEXT = (ROOT / "docs/wire.md").read_text()


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


def test_tests_that_the_docs_name_exist() -> None:
    for document in ("docs/wire.md", "docs/invariants.md"):
        for path in re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / document).read_text()):
            assert (ROOT / path).exists(), path
