"""The timeline as strips and as text: both say the same, in every theme, without scripts."""

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
from nbparallel_widgets import timeline_view
from nbparallel_widgets.sheet import COLOURS, HEIGHTS
from nbparallel_widgets.timeline_view import TimelineView


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


EVEN = Timeline(
    1,
    1.0,
    tuple(row(r, (COMPUTING, 0.6, "", -1), (WAITING, 1.0, "barrier", 1 - r)) for r in range(2)),
    (),
)
WIDE = Timeline(
    8,
    9.0,
    (
        *(row(r, (COMPUTING, 1.0 + r / 10, "", -1), (WAITING, 9.0, "all_reduce", 11)) for r in range(11)),
        row(11, (COMPUTING, 9.0, "", -1)),
    ),
    ("y = all_reduce(x)",),
)
SENTENCES = {
    "rank 2 was killed by SIGKILL": SMALL,
    "rank 1 came last to all_reduce (line 2): rank 0 waited 0.40 s": replace(SMALL, rows=SMALL.rows[:2]),
    "rank 11 came last to all_reduce (line 2): 11 ranks waited 7.00 to 8.00 s, 82.5 s in all": WIDE,
    "no rank stands out: 40 % of the time was waiting": EVEN,
    "0 % of the time was waiting": Timeline(1, 1.0, (row(0, (COMPUTING, 1.0, "", -1)),), ()),
}


@pytest.mark.parametrize("said", SENTENCES)
def test_what_stands_out_is_said_first(said: str) -> None:
    """One sentence, in the same words as text and as HTML."""
    assert repr(TimelineView(SENTENCES[said])).splitlines()[0] == said
    assert f'<b class="nbp-title">{said}</b>' in TimelineView(SENTENCES[said])._repr_html_()


def test_text() -> None:
    """In a terminal: a bar of letters for each rank, the longest waits first, an axis, and the waits."""
    lines = repr(TimelineView(SMALL)).splitlines()
    assert lines[1] == "In[3] on ranks 0-2: 1 s"
    assert lines[2] == "█ computing   · waiting   ▒ moving   ? not noted"
    bars = [line.split("|") for line in lines[3:6]]
    assert [(bar[0].strip(), len(bar[1]), bar[2].strip()) for bar in bars] == [
        ("rank 1", 60, "0.00 s"), ("rank 0", 60, "0.40 s"), ("rank 2", 60, "0.00 s")
    ]  # fmt: skip
    assert re.fullmatch("█{12}·{24}▒{6}█{18}", bars[1][1])
    assert bars[2][1].strip() == "was killed by SIGKILL"
    assert lines[6].split()[:7] == ["0", "0.2", "0.4", "0.6", "0.8", "1", "s"]
    assert re.split(r"\s{2,}", lines[-1].strip()) == [
        "400 ms", "rank 0", "rank 1", "all_reduce", "2", "x < y & all_reduce(z)"
    ]  # fmt: skip


def test_efficiency_is_a_product() -> None:
    """The share of computing is how evenly the work was divided times what the busiest rank computed."""
    two = Timeline(1, 2.0, (row(0, (COMPUTING, 0.5, "", -1)), row(1, (COMPUTING, 1.0, "", -1))), ())
    assert timeline_view.efficiency(two).startswith("38 % of the ranks' time was computing = 75 % (")
    assert timeline_view.efficiency(two).endswith("× 50 % (what the busiest rank computed)")
    assert timeline_view.efficiency(replace(two, rows=two.rows[:1])) == ""


def test_all_waiting_is_accounted_for() -> None:
    """Equal places are one row; of many, the rest is one; what was counted and not drawn is one."""
    spans = [
        piece
        for i in range(20)
        for piece in ((COMPUTING, i + 0.5, "", -1), (WAITING, i + 0.5 + 0.02 * i, f"send{i}", 1))
    ]
    counted = replace(row(0, *spans, (COMPUTING, 20.0, "", -1)), omitted=1234)
    waited = replace(counted, times=RankTimes(10**9, 9 * 10**9, 10**10, 20 * 10**9, 1274))
    text = repr(TimelineView(Timeline(0, 20.0, (waited,), ())))
    assert re.search(r"380 ms +rank 0 +rank 1 +send19", text)
    assert re.search(r"1.82 s +in 14 other places", text)
    assert re.search(r"5.2 s +in operations that are counted, not drawn", text)
    assert "short operations that were counted, not drawn: rank 0: 1,234" in text
    rows = timeline_view.waits_grid(WIDE).rows
    assert [list(one[:5]) for one in rows] == [["82.5 s", "ranks 0-10", "rank 11", "all_reduce", "2"]]


def test_what_is_only_counted_is_drawn_in_proportion() -> None:
    """Between operations that are drawn stands as much waiting as their figures say, not computing."""
    counted = replace(row(0, (WAITING, 1.0, "recv", 1), (COMPUTING, 11.0, "", -1)), omitted=1234)
    waited = replace(counted, times=RankTimes(2 * 10**9, 9 * 10**9, 0, 11 * 10**9, 1235))
    view = TimelineView(Timeline(0, 11.0, (waited,), ()))
    assert "rank 0 |" + 60 * "·" in repr(view)
    low, high = (f'<path d="M90.9 {floor}v-3h909.1V{floor}z" fill="{COLOURS[kind]}"/>'
                 for floor, kind in ((14, WAITING), (11, COMPUTING)))  # fmt: skip
    assert low + high in view._repr_html_()
    exact = replace(counted, omitted=0)
    assert "·····██████" in repr(TimelineView(Timeline(0, 11.0, (exact,), ())))


def _strips(view: TimelineView) -> list[str]:
    return re.findall(r"<svg role=\"img\".*?</svg>", view._repr_html_(), re.DOTALL)


def test_strips() -> None:
    """Each rank has one, as wide as the page, that says in words what it shows, and what each piece is."""
    view = TimelineView(SMALL)
    page, strips = view._repr_html_(), _strips(view)
    assert 'aria-label="rank 1: computing 600 ms, waiting 0 s, moving 100 ms"' in strips[0]
    for picture in strips:
        tree = ElementTree.fromstring(picture)
        assert (tree.get("width"), tree.get("preserveAspectRatio")) == ("100%", "none")
    painted = {e.get("fill") for picture in strips for e in ElementTree.fromstring(picture).iter()}
    assert painted == {None, "currentColor", *COLOURS.values()}
    assert "all_reduce: waiting for rank 1, 400 ms, 80 B, line 2</title>" in strips[1]
    assert '<tr class="nbp-wrong"><th scope="row" class="nbp-rank">rank 2</th>' in page
    for word in ("computing", "waiting", "moving", "not noted", ">0.4<"):
        assert word in page
    one = TimelineView(replace(SMALL, rows=SMALL.rows[:2]))._repr_html_()
    assert re.search(r'nbp-hot"><th[^>]*>rank 1<.*1 rank waited</span>', one)


def test_many_ranks_fold() -> None:
    """The rank that others waited for stands first; of the others, those above the fold waited longest."""
    page = TimelineView(WIDE)._repr_html_()
    order = re.findall(r'class="nbp-rank">rank (\d+)<', page)
    assert order == ["11", *map(str, range(11))]
    assert "<summary>4 more: ranks 7-10, waited 7.00 to 7.30 s</summary>" in page
    assert page.count("11 ranks waited</span>") == 1


def test_thousands_of_operations_fit() -> None:
    """Spans too narrow to be seen are drawn together, in proportion: the picture of any cell stays small."""
    spans = [
        (kind, (3 * i + j) / 1500, "" if kind == COMPUTING else "send", 0 if kind == WAITING else -1)
        for i in range(500)
        for j, kind in enumerate((COMPUTING, WAITING, MOVING), 1)
    ]
    found = Timeline(1, 1.0, tuple(row(rank, *spans) for rank in range(2)), ())
    view = TimelineView(found)
    assert sum(map(len, _strips(view))) < 40_000
    assert "1,000 short pieces of operations" in _strips(view)[0]
    assert set(repr(view).splitlines()[3].split("|")[1]) <= set("█·▒")


def test_nothing_happened() -> None:
    """A cell of no length, and one of which no rank is left, are shown."""
    for found in (Timeline(1, 0.0, (row(0),), ()), Timeline(0, 0.0, (row(0, died="died"),), ())):
        assert repr(TimelineView(found)).splitlines()[1] in (
            "In[1] on rank 0: 0 s", "the last call on rank 0: 0 s"
        )  # fmt: skip
        assert "<svg" in TimelineView(found)._repr_html_()


@pytest.mark.parametrize("seconds", [3e-6, 0.0021, 0.99, 1.0, 7.3, 100.0, 86_400.0])
def test_axes(seconds: float) -> None:
    """Every axis has two to nine ticks within it, with short labels."""
    places, unit = timeline_view.ticks(seconds, 8)
    assert 2 <= len(places) <= 9
    assert places[0] == (0.0, "0")
    assert all(0 <= place <= seconds * (1 + 1e-9) for place, _ in places)
    assert all(len(label) <= 5 for _, label in places)
    assert unit in ("s", "ms", "µs")


def test_seconds() -> None:
    """Spans of time have one unit and three digits."""
    found = [seconds_text(s) for s in (1.2345, 0.0123, 4.5e-6, 0.0, 71.0, 1234.5, 2e-7, 0.9996)]
    assert found == ["1.23 s", "12.3 ms", "4.5 µs", "0 s", "71 s", "1234 s", "0.2 µs", "1000 ms"]


def test_a_part_is_summed() -> None:
    """Spans are cut at its ends, sums are theirs, and the axis goes on counting from the cell's beginning."""
    part = WIDE.part(8.0, 20.0)
    assert (part.begin, part.seconds) == (8.0, 1.0)
    assert [row.total(WAITING) for row in part.rows] == [1.0] * 11 + [0.0]
    assert part.rows[11].total(COMPUTING) == 1.0
    assert "they waited" not in timeline_view.verdict(part)
    assert timeline_view.verdict(part).endswith("11 ranks waited 1.00 s, 11 s in all")
    text = repr(TimelineView(part))
    assert "In[8] on ranks 0-11: 8 s to 9 s" in text
    assert re.search(r"\n +8 +8\.2 +8\.4 +8\.6 +8\.8 +9 s", text)
    page = TimelineView(part)._repr_html_()
    assert re.findall(r'left:([\d.]+)%">([\d.]+)', page)[:2] == [("0.00", "8"), ("20.00", "8.2")]
    assert TimelineView(WIDE.part(0.0, 9.0))._repr_html_() == TimelineView(WIDE)._repr_html_()
    assert len(timeline_view.axis(WIDE.part(8.9999999, 9.0))[0]) < 10
    many = replace(SMALL.rows[0], spans=(Span(COMPUTING, 0.0, 1.0),), operations=3000)
    assert repr(TimelineView(replace(SMALL, rows=(many, many))))


def test_every_kind_is_in_the_legend_and_differs_without_colour() -> None:
    """Both forms explain each kind that they show; a kind has its own letter, height and colour."""
    for found, kinds in ((SMALL, set(COLOURS)), (WIDE, {COMPUTING, WAITING, MOVING})):
        legend = timeline_view.legend(found)
        page = TimelineView(found)._repr_html_()
        for kind in COLOURS:
            assert (f" {kind}" in legend) == (kind in kinds) == (f"</svg>{kind}</span>" in page)
    for looks in (timeline_view.LETTERS, HEIGHTS, COLOURS):
        assert len({looks[kind] for kind in COLOURS}) == len(COLOURS)
    assert all(abs(HEIGHTS[a] - HEIGHTS[b]) >= 2 for a in HEIGHTS for b in HEIGHTS if a != b)
