"""The table that every look at the system prints: as text, and as HTML for any theme and reader."""

from __future__ import annotations

import re

from nbparallel.errors.text.table import Table

TABLE = Table("a <title>", ("name", "what", "why"), [("x", "1 & 2", ""), ("long name", "first\nsecond", "")])


def test_text_has_columns() -> None:
    """Cells of several lines take several lines; nothing is wider than it must be."""
    assert TABLE.text().splitlines() == [
        "a <title>",
        "name       what    why",
        "x          1 & 2",
        "long name  first",
        "           second",
    ]


def test_html_escapes_and_can_be_read_aloud() -> None:
    """It has a title, and heads for columns and rows; text is escaped; no colour and no asset is named."""
    html = TABLE.html()
    assert re.match(
        r'<p><b>a &lt;title&gt;</b></p><div role="group" aria-label="a &lt;title&gt;" tabindex="0" '
        r'style="overflow-x:auto"><table class="dataframe"><thead>',
        html,
    ), "the title is no part of the table, however narrow that is; a wide table scrolls, by the keyboard too"
    assert "a &lt;title&gt;" in html
    assert "1 &amp; 2" in html
    assert "first<br>second" in html
    assert '<td style="padding:.2em .6em;text-align:left;white-space:nowrap">1 &amp; 2</td>' in html, (
        "a number keeps its unit"
    )
    assert (
        '<td style="padding:.2em .6em;text-align:left;min-width:14em">'
        in Table("t", ("a", "b"), [("x", "word " * 9)]).html()
    )
    assert html.count('scope="col"') == 3
    assert html.count('scope="row"') == 2
    assert not re.search(r"color|background|src=|href=|<script|<style", html)


def test_empty_tables_and_columns() -> None:
    """Without rows only title and foot are left; a column in which nothing stands can be left out."""
    empty = Table("nothing here", ("a", "b"), [], "one line\nanother")
    assert empty.text() == "nothing here\none line\nanother"
    assert "<th" not in empty.html()
    assert empty.html().count("<p>") == 3
    nameless = Table("", ("a", "b"), [("1", "2")]).html()
    assert "<p>" not in nameless
    assert 'aria-label="a, b"' in nameless
    assert TABLE.without_empty_columns().head == ("name", "what")
