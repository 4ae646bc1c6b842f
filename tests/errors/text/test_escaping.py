"""Text of users in messages, tables, HTML and SVG: whatever it holds can be sent, and is seen."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given, strategies as st

from nbparallel.errors import BusyError, FileDescriptorLimitError, ParallelError
from nbparallel.errors.text.escaping import encodable, escape_html, visible
from nbparallel.errors.text.table import Table

ANY = st.text(st.characters(codec=None))
"""Any characters, halves of surrogate pairs too."""


@given(ANY)
def test_any_text_is_well_formed_and_visible(text: str) -> None:
    """HTML and SVG of it parse to a text that UTF-8 holds, in which nothing turns or hides other text."""
    parsed = ElementTree.fromstring(f'<text title="{escape_html(text)}">{escape_html(text)}</text>')
    for part in (parsed.text or "", visible(text)):
        part.encode()
        assert not {"\x00", "\x07", "\x1b", "\x85", "\u202e", "\u2066", "\ud800"} & set(part)
    encodable(text).encode()


def test_ordinary_text_stays() -> None:
    """Letters of every script, line ends, tabs and emoji are as they were."""
    for text in ("a\n\tb", "λ 中文 العربية", "\N{GRINNING FACE} e\u0301", ""):
        assert (visible(text), encodable(text)) == (text, text)
    assert visible("a\x07\u202eb\ud800") == "a\\x07\\u202eb\\ud800"
    assert escape_html("<\x1b[31m>") == "&lt;\\x1b[31m&gt;"


def test_tables_escape_names() -> None:
    """As text, where columns stay aligned, and as HTML."""
    table = Table("of \ud800", ("name", "is"), [("a\u202e\ud800b", "1"), ("c", "two\nlines")], "foot \x1b")
    text = table.text()
    assert text.splitlines() == [
        "of \\ud800", "name            is", "a\\u202e\\ud800b  1", "c               two",
        "                lines", "foot \\x1b",
    ]  # fmt: skip
    for form in (text, table.html()):
        form.encode()
        assert "\u202e" not in form


@pytest.mark.parametrize("error", [BusyError, lambda text: FileDescriptorLimitError(24, text)])
def test_every_error_of_ours_can_be_sent(error: type[BusyError]) -> None:
    """Its text holds no lone surrogate, whatever name of the user's is in it."""
    assert "x\\ud800" in str(error("x\ud800"))
    assert str(ParallelError("x\ud800", [ValueError()])) == "x\\ud800"


def test_importing_the_errors_stays_cheap() -> None:
    """The supervisor imports them: no parser of HTML comes along."""
    code = "import sys, nbparallel.errors; print([m for m in ('html', 'difflib') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stdout == "[]\n"
