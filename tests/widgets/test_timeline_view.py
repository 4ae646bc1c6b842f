"""The timeline's picture and its text: they tell the same, in every theme, without scripts."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from nbparallel.session.monitoring.timeline import (
    COMPUTING,
    MOVING,
    UNKNOWN,
    WAITING,
    RankRow,
    Span,
    Timeline,
)
from nbparallel.session.results import RankTimes
from nbparallel.wire.units import seconds_text
from nbparallel_widgets import timeline_text
from nbparallel_widgets.timeline_svg import COLOURS, TimelineView, svg


def row(rank: int, *spans: tuple[str, float, str, int], died: str = "") -> RankRow:
    """Return a row from kinds, ends, operations and who was waited for; each span begins where one ends."""
    made, begin = [], 0.0
    for kind, end, operation, waits_for in spans:
        made.append(Span(kind, begin, end, operation, 2, 80, -1, waits_for))
        begin = end
    return RankRow(rank, 100 + rank, 0.0, begin, tuple(made), (), 2, 0, died)


SMALL = Timeline(
    3,
    1.0,
    (
        row(
            0, (COMPUTING, 0.2, "", -1), (WAITING, 0.6, "all_reduce", 1), (MOVING, 0.7, "all_reduce", 1),
            (COMPUTING, 1.0, "", -1),
        ),
        row(1, (COMPUTING, 0.6, "", -1), (MOVING, 0.7, "all_reduce", -1), (UNKNOWN, 1.0, "", -1)),
        row(2, died="was killed by SIGKILL"),
    ),
    ("%%parallel", "x < y & all_reduce(z)"),
)  # fmt: skip


def test_text() -> None:
    """In a terminal there is one bar of letters for each rank, an axis, a table and who waited for whom."""
    lines = repr(TimelineView(SMALL)).splitlines()
    assert lines[0] == "In[3] on ranks 0-2: 1 s"
    assert lines[1] == "█ computing   · waiting   ▒ moving   ? not noted"
    bars = [line.split("|")[1] for line in lines[2:5]]
    assert [len(bar) for bar in bars] == [60, 60, 60]
    assert re.fullmatch("█{12}·{24}▒{6}█{18}", bars[0])
    assert bars[2].strip() == "was killed by SIGKILL"
    assert lines[5].split() == ["0", "0.2", "0.4", "0.6", "0.8", "1", "s"]
    assert re.split(r"\s{2,}", lines[7]) == [
        "0", "500 ms", "400 ms", "100 ms", "2", "for rank 1 in all_reduce, line 2"
    ]  # fmt: skip
    assert lines[-1] == "rank 0 waited 400 ms for rank 1 in all_reduce, line 2:  x < y & all_reduce(z)"


def test_short_waits_are_summed_up() -> None:
    """What is short beside the cell, or too many, is one line; so are operations that were only counted."""
    spans = [
        piece
        for i in range(20)
        for piece in ((COMPUTING, i + 0.5, "", -1), (WAITING, i + 0.5 + 0.02 * i, f"send{i}", 1))
    ]
    counted = replace(row(0, *spans, (COMPUTING, 20.0, "", -1)), omitted=1234)
    lines = repr(TimelineView(Timeline(0, 20.0, (counted,), ()))).splitlines()[-8:]
    assert lines[0] == "rank 0 waited 380 ms for rank 1 in send19, line 2"
    assert lines[5].startswith("rank 0 waited 280 ms")
    assert lines[6] == "and 14 shorter waits, 1.82 s in all"
    assert lines[7] == "short operations that were counted, not drawn: rank 0: 1,234"
    waited = replace(counted, times=RankTimes(10**9, 9 * 10**9, 10**10, 20 * 10**9, 1274))
    last = repr(TimelineView(Timeline(0, 20.0, (waited,), ()))).splitlines()[-1]
    assert last.endswith("not drawn: rank 0: 1,234 (5.2 s waiting)")


def test_picture() -> None:
    """The picture is one well-formed element that says in words what it shows, in the page's colours."""
    tree = ElementTree.fromstring(svg(SMALL))
    assert tree.get("role") == "img"
    assert "rank 0: computing 500 ms, waiting 400 ms" in (tree.get("aria-label") or "")
    tags = {element.tag.split("}")[1] for element in tree.iter()}
    assert tags == {"svg", "desc", "text", "rect", "path", "circle", "title", "g"} - {"g"}
    words = [element.text for element in tree.iter() if element.tag.endswith("}text")]
    for word in ("rank 0", "computing", "waiting", "moving", "not noted", "waits for rank 1", "0.4"):
        assert word in words
    painted = {e.get("fill") for e in tree.iter()} | {e.get("stroke") for e in tree.iter()}
    assert painted == {None, "none", "currentColor", *COLOURS.values()}
    titles = [e.text or "" for e in tree.iter() if e.tag.endswith("}title")]
    assert "all_reduce: waiting for rank 1, 400 ms, 80 B, line 2\nx < y & all_reduce(z)" in titles
    html = TimelineView(SMALL)._repr_html_()
    assert html.count("<table") == 1
    assert "max-width:max(100%,640px)" in html, "a narrow page scrolls, and letters stay readable"
    assert html.count('style="overflow-x:auto"') == 2
    assert "waited most" in html


def test_thousands_of_operations_fit() -> None:
    """Spans too narrow to be seen are drawn together: the picture of any cell stays small."""
    spans = [
        (kind, (3 * i + j) / 1500, "" if kind == COMPUTING else "send", 0 if kind == WAITING else -1)
        for i in range(500)
        for j, kind in enumerate((COMPUTING, WAITING, MOVING), 1)
    ]
    found = Timeline(1, 1.0, tuple(row(rank, *spans) for rank in range(2)), ())
    picture = svg(found)
    assert len(picture) < 60_000
    assert "1,000 short pieces of operations" in picture
    assert set(repr(TimelineView(found)).splitlines()[2].split("|")[1]) <= set("█·▒")


def test_nothing_happened() -> None:
    """A cell of no length, and one of which no rank is left, are shown."""
    for found in (Timeline(1, 0.0, (row(0),), ()), Timeline(0, 0.0, (row(0, died="died"),), ())):
        assert repr(TimelineView(found)).startswith(("In[1] on rank 0: 0 s", "the last call on rank 0: 0 s"))
        ElementTree.fromstring(svg(found))


@pytest.mark.parametrize("seconds", [3e-6, 0.0021, 0.99, 1.0, 7.3, 100.0, 86_400.0])
def test_axes(seconds: float) -> None:
    """Every axis has two to nine ticks within it, with short labels."""
    places, unit = timeline_text.ticks(seconds, 8)
    assert 2 <= len(places) <= 9
    assert places[0] == (0.0, "0")
    assert all(0 <= place <= seconds * (1 + 1e-9) for place, _ in places)
    assert all(len(label) <= 5 for _, label in places)
    assert unit in ("s", "ms", "µs")


def test_seconds() -> None:
    """Spans of time have one unit and three digits."""
    found = [seconds_text(s) for s in (1.2345, 0.0123, 4.5e-6, 0.0, 71.0, 1234.5, 2e-7, 0.9996)]
    assert found == ["1.23 s", "12.3 ms", "4.5 µs", "0 s", "71 s", "1234 s", "0.2 µs", "1000 ms"]
