"""The table that every look at the system prints: as text, and as HTML for any theme and reader."""

from __future__ import annotations

import re

from nbparallel.errors.text.table import Table, bar

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
        r'<div [^>]*><p [^>]*><b [^>]*>a &lt;title&gt;</b></p><div role="group" aria-label="a &lt;title&gt;" '
        r'tabindex="0" style="overflow-x:auto"><table class="dataframe" [^>]*><thead>',
        html,
    ), "the title is no part of the table, however narrow that is; a wide table scrolls, by the keyboard too"
    assert "a &lt;title&gt;" in html
    assert "1 &amp; 2" in html
    assert "first<br>second" in html
    assert re.search(r'<td style="[^"]*;white-space:nowrap">1 &amp; 2</td>', html), "a number keeps its unit"
    assert re.search(r"<td [^>]*min-width:14em", Table("t", ("a", "b"), [("x", "word " * 9)]).html())
    assert html.count('scope="col"') == 3
    assert html.count('scope="row"') == 2
    assert not re.search(r"(?<!pointer;)color:|background:(?!none)|src=|href=|<script|<style", html)


def test_numbers_are_aligned_and_bars_drawn() -> None:
    """A column of numbers stands at the right, in text and HTML, a column with a word at the left."""
    table = Table("", ("a", "MiB", ""), [("x", "10.5", bar(1)), ("y", "<0.1", bar(0.25)), ("1", "", "")])
    assert table.text().splitlines() == ["a   MiB", "x  10.5  ██████████", "y  <0.1  ██▌", "1"]
    html = table.html()
    assert re.findall(r"text-align:right[^>]*>([^<]*)", html) == ["MiB", "10.5", "&lt;0.1", ""]
    assert re.findall(r"width:([\d.]+)px", html) == ["100", "25"]


def test_rows_after_the_eighth_are_folded() -> None:
    """Text says what is left out and how to see it; HTML has it in a fold, with columns as wide as above."""
    rows = [(f"name {i}", str(i)) for i in range(11)]
    table = Table("t", ("a", "b"), rows, "foot", "note", "3 more, 1 MiB")
    assert table.text().splitlines()[-4:] == ["name 7  7", "… 3 more, 1 MiB: with --all", "note", "foot"]
    above, below = table.html().split("<details>")
    assert (above.count('scope="row"'), below.count('scope="row"')) == (8, 3)
    assert re.findall(r"min-width:\d+ch", above) == re.findall(r"min-width:\d+ch", below) != []
    assert ">3 more, 1 MiB</summary>" in below
    assert table.unfolded().html().count("<details>") == 0
    assert len(table.unfolded().text().splitlines()) == 15


def test_long_cells_are_wrapped() -> None:
    """A sentence takes several lines of text, and as many as the page needs in HTML."""
    table = Table("", ("a", "b"), [("x", "word " * 30 + "end")])
    assert max(map(len, table.text().splitlines())) < 80
    assert "<br>" not in table.html()


def test_empty_tables_and_columns() -> None:
    """Without rows only title and foot are left; a column in which nothing stands can be left out."""
    empty = Table("nothing here", ("a", "b"), [], "one line\nanother")
    assert empty.text() == "nothing here\none line\nanother"
    assert "<th" not in empty.html()
    assert empty.html().count("<p ") == 1
    assert empty.html().count('<div style="opacity') == 2
    nameless = Table("", ("a", "b"), [("1", "2")]).html()
    assert "<p " not in nameless
    assert 'aria-label="a, b"' in nameless
    assert TABLE.without_empty_columns().head == ("name", "what")
