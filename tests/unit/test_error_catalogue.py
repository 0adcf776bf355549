"""docs/errors.md says what the code says."""

from __future__ import annotations

import ast

from tools.error_catalogue import PAGE, page, problems


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == page(), "run: PYTHONPATH=. python tools/error_catalogue.py"


def test_texts_are_found_however_they_are_given(tmp_path) -> None:
    source = """
def one(n, why):
    do = "wait" if n else "call again"
    what, where = f"{n} ranks are late", "there"
    raise WireError(what, where=where, do=do)

def two():
    raise ConfigError("it is " "too long", do="cut it")
    raise WireError("it is small", wanted="8 bytes")
    [Problem("it is not there", "x", do=unknown())]
    raise ValueError("not ours")
"""
    path = tmp_path / "made.py"
    path.write_text(source)
    assert ast.parse(source)
    assert set(problems(path)) == {
        ("WireError", "… ranks are late", "wait / call again"),
        ("ConfigError", "it is too long", "cut it"),
        ("WireError", "it is small", "wanted: 8 bytes"),
        ("Problem", "it is not there", "…"),
    }
