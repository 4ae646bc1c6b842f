"""What the panel says of each moment: a sentence, a row for each rank, memory, and who waited for whom."""

from __future__ import annotations

import html.parser
import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from nbparallel.errors import NO_RANKS
from nbparallel_widgets.panel_course import Course
from nbparallel_widgets.panel_view import SHOWN, PanelView, axis_end
from nbparallel_widgets.sheet import COLOURS, folds_bundle
from tests.widgets.activities import (
    COMPUTING,
    DONE,
    ENDED,
    FINISHED,
    IDLE,
    NONE,
    SEGMENTS,
    STRAGGLER,
    WAITING,
    ranks,
)

DEAD = replace(
    IDLE,
    state="dead",
    operation="was killed by SIGKILL: by hand",
    private_nbytes=0,
    computing=1.1,
    finished=1.1,
)
FAILED = replace(ENDED, state="failed")
MOVING = replace(DONE, phase="moving", moving_name="data", moving_nbytes=1 << 30)
BUSY = replace(COMPUTING, operations=7)
RUNNING = replace(STRAGGLER, culprits=(), ranks=ranks(BUSY, BUSY))
MAP = replace(RUNNING, items=60, ranks=ranks(replace(BUSY, items=20, item=44), replace(BUSY, items=23)))
EVEN = replace(DONE, ranks=ranks(ENDED, ENDED), waited=((0, 1.7), (1.7, 0)))
SENTENCES = {
    "rank 2 holds the others up: they wait for it 94 % of their time": STRAGGLER,
    "no rank stands out: 47 % of the time is waiting": replace(
        STRAGGLER,
        ranks=ranks(*[replace(WAITING, waits_for=(2, 3))] * 2, COMPUTING, COMPUTING),
        culprits=(2, 3),
    ),
    "the ranks compute": RUNNING,
    "the ranks call many short operations; how long they wait is known later": replace(
        RUNNING, ranks=ranks(COMPUTING, COMPUTING)
    ),
    "43 of 60 items done": MAP,
    "rank 1 failed on line 4": replace(RUNNING, ranks=ranks(BUSY, replace(FAILED, line=4))),
    "ranks 0-3: no cell has run yet": NONE,
    "starting 4 ranks": replace(NONE, phase="starting", number=3, starting_ranks=4, ranks=()),
    "starting 1 rank": replace(NONE, phase="starting", starting_ranks=1, ranks=()),
    "moving 1.0 GiB of `data` into shared memory": MOVING,
    "rank 2 held the others up: they waited for it 63 % of their time": DONE,
    "no rank stands out: 85 % of the time was waiting": EVEN,
    "finished": replace(DONE, ranks=ranks(IDLE), waited=()),
    "finished: 0 % of the time was waiting": replace(DONE, ranks=ranks(FINISHED), waited=()),
    "rank 1 failed on line 4, the first of ranks 0-1 that failed": replace(
        DONE, phase="failed", failed_rank=1, failed_line=4, ranks=ranks(FAILED, FAILED)
    ),
    "rank 1 was killed by SIGKILL on line 4: by hand": replace(
        DONE, phase="failed", failed_rank=1, failed_line=4, ranks=ranks(ENDED, DEAD)
    ),
    "ranks 0, 2 finished the cell without calling barrier": replace(
        DONE,
        phase="failed",
        failed_rank=1,
        failed_between="ranks 0, 2 finished the cell without calling barrier",
    ),
    "the cell failed": replace(DONE, phase="failed"),
    "interrupted": replace(DONE, phase="interrupted"),
}


@pytest.mark.parametrize("said", SENTENCES)
def test_the_title_is_a_sentence(said: str) -> None:
    """It says what stands out, or how the cell ended, in the same words as text and as HTML."""
    view = PanelView(SENTENCES[said])
    assert repr(view).splitlines()[0] == said
    assert f'role="status">{re.sub("`(.+?)`", r"<code>&1</code>", said).replace("&1", "data")}<' in (
        view._repr_html_()
    )


WHEN = {
    "In[3] runs · 4.9 s": RUNNING,
    "In[3] finished after 50 ms": replace(DONE, seconds=0.05),
    "the last call interrupted after 2.0 s": replace(DONE, number=0, phase="interrupted"),
    "a call runs · 4.9 s": replace(RUNNING, number=0),
    "In[3] failed after 2.0 s": replace(DONE, phase="failed"),
}


@pytest.mark.parametrize("said", WHEN)
def test_which_cell_it_is_and_how_far(said: str) -> None:
    """It stands beside the title."""
    assert said in repr(PanelView(WHEN[said])).splitlines()[1]
    assert f"<small>{said}</small>" in PanelView(WHEN[said])._repr_html_()


def _marks(activity: Any) -> list[str]:
    """Return the marked ranks with their chips, as text and HTML agree on them."""
    text, page = repr(PanelView(activity)), PanelView(activity)._repr_html_()
    marked = re.findall(r'<tr class="nbp-(hot|wrong)"><th[^>]*>rank (\d+).*?nbp-chip">(.*?)</span>', page)
    lines = [line for line in text.splitlines() if line.startswith("▶")]
    assert [line.split()[1] for line in lines] == [rank for _, rank, _ in marked]
    assert all(line.endswith(chip) for line, (_, _, chip) in zip(lines, marked, strict=True))
    return [f"{kind} {rank}: {chip}" for kind, rank, chip in marked]


def test_the_row_that_matters_is_marked_by_more_than_a_colour() -> None:
    """The rank that holds the others up, failed or died has a chip with words; red is for failures."""
    assert _marks(STRAGGLER) == ["hot 2: 3 ranks wait"]
    assert _marks(DONE) == ["hot 2: the others waited"]
    assert _marks(RUNNING) == _marks(EVEN) == []
    failed = replace(DONE, phase="failed", failed_rank=1, failed_line=4, ranks=ranks(ENDED, FAILED))
    assert _marks(failed) == ["wrong 1: failed"]
    assert _marks(replace(failed, ranks=ranks(ENDED, DEAD))) == ["wrong 1: dead"]
    absent = "rank 1 finished the cell without calling barrier"
    one = replace(failed, failed_rank=0, failed_between=absent, ranks=ranks(FAILED, ENDED))
    assert _marks(one) == ["wrong 1: left it out"]  # and not the victim, which raised the error
    assert _marks(replace(one, failed_between="ranks called different operations")) == []
    assert "nbp-bad" not in PanelView(STRAGGLER).figures_bundle()["text/html"]


def test_equal_states_are_one_line() -> None:
    """What several ranks do stands once, below the rows."""
    text = repr(PanelView(STRAGGLER))
    assert "ranks 0-1, 3: waiting for rank 2 in all_reduce, line 3" in text
    text = repr(PanelView(replace(DONE, ranks=ranks(ENDED, replace(ENDED, finished=1.5)), waited=())))
    assert "ranks 0-1: finished after 1.50 s to 2.00 s" in text
    others = ranks(*[replace(WAITING, state="released")] * 2, FAILED)
    text = repr(PanelView(replace(DONE, phase="failed", failed_rank=2, ranks=others)))
    assert "ranks 0-1: stopped, because another rank failed" in text


def strip(page: str, rank: int) -> list[tuple[str, str]]:
    """Return path and colour of each area in the strip of a rank."""
    row = page.partition(f'aria-label="rank {rank}: ')[2].partition("</svg>")[0]
    return re.findall(r'<path d="([^"]+)" fill="([^"]+)"', row)


def course_of(*activities: Any) -> Course:
    """Return what was seen, one after the other."""
    course = Course()
    for activity in activities:
        course.add(activity)
    return course


def at(seconds: float, **times: float) -> Any:
    """Return the activity of one rank that has spent its time so."""
    return replace(
        RUNNING, began_ns=5, seconds=seconds, ranks=ranks(replace(BUSY, **{"computing": 0.0, **times}))
    )


def test_a_strip_is_in_true_order() -> None:
    """Computing, waiting, then both in turns, which is shown in proportion; kinds differ in height."""
    course = course_of(
        at(1.0, computing=1.0), at(2.0, computing=1.0, waiting=1.0), at(3.0, computing=1.5, waiting=1.5)
    )
    activity = at(3.0, computing=1.5, waiting=1.5)
    assert axis_end(activity) == 3.0
    page = PanelView(activity, course=course).figures_bundle()["text/html"]
    assert strip(page, 0) == [
        ("M333.3 14v-4h333.3V14zM666.7 14v-2h333.3V14z", COLOURS["waiting"]),
        ("M0.0 14v-14h333.3V14zM666.7 12v-7h333.3V12z", COLOURS["computing"]),
    ]
    assert f"|{'█' * 8}{'·' * 8}{'█' * 8}|" in repr(PanelView(activity, course=course))


def test_a_letter_is_what_took_most_of_its_time() -> None:
    """However far apart samples were: 2.2 s of waiting, seen in steps, are more than 2 s of computing."""
    seen = [at(2.0 + i, computing=2.0, waiting=float(i)) for i in range(99)]
    assert axis_end(seen[-1]) / 24 == pytest.approx(4.17, abs=0.01), "of a letter"
    assert f"|{'·' * 24}|" in repr(PanelView(seen[-1], course=course_of(*seen)))


def test_equal_neighbours_are_one_piece_and_long_cells_stay_small() -> None:
    """A cell of an hour is there from its beginning, at less resolution; a course has a bounded size."""
    course = Course()
    for i in range(1, 5000):
        course.add(at(0.2 * i, computing=0.1 * i, waiting=0.1 * i))
    stretches = list(course.stretches(0))
    assert 50 < len(stretches) <= 120
    assert (stretches[0].begin, stretches[-1].end) == (0.0, pytest.approx(999.8))
    assert sum(stretch.waiting for stretch in stretches) == pytest.approx(499.9)
    page = PanelView(at(999.8, computing=499.9, waiting=499.9), course=course).figures_bundle()["text/html"]
    assert all(path.count("M") <= 8 for path, _ in strip(page, 0))


def test_what_is_known_later_is_drawn_later() -> None:
    """Waits of many short operations are counted when their statement ends: till then a piece is open."""
    unknown = replace(at(2.0, computing=2.0), ranks=ranks(replace(COMPUTING, computing=2.0)))
    course = course_of(at(1.0, computing=1.0), unknown, at(3.0, computing=1.5, waiting=1.5))
    assert [stretch[:4] for stretch in course.stretches(0)] == [(0.0, 1.0, 1.0, 0.0), (1.0, 3.0, 0.5, 1.5)]


def test_ranks_may_come_in_any_order() -> None:
    """On several hosts they come host by host."""
    one, other = replace(BUSY, rank=0, computing=1.0), replace(BUSY, rank=3, computing=0.0, waiting=1.0)
    course = course_of(replace(RUNNING, began_ns=5, seconds=1.0, ranks=(other, one)))
    assert [stretch.waiting for stretch in course.stretches(3)] == [1.0]
    assert [stretch.computing for stretch in course.stretches(0)] == [1.0]
    assert list(course.stretches(1)) == []


def test_a_new_cell_has_a_new_course() -> None:
    """And what was seen of another one is not shown with it."""
    course = course_of(at(9.0, computing=9.0))
    later = replace(at(1.0, computing=1.0), began_ns=6)
    page = PanelView(later, course=course).figures_bundle()["text/html"]
    assert [path for path, _ in strip(page, 0)] == ["M0.0 14v-14h1000.0V14z"]
    course.add(later)
    assert len(list(course.stretches(0))) == 1


def test_the_slowest_rank_is_named_in_nearly_every_sample() -> None:
    """In a loop whose slowest rank is known the sentence names it, and changes at most once a second."""
    course, random = Course(), Random(7)
    work = (0.02, 0.05, 0.15, 0.09)  # seconds of each rank in a step
    named, now = [], 0.0
    for _ in range(60):
        now += 0.2 * random.uniform(0.9, 1.1)
        phase = now % max(work)
        spent = [(now // max(work)) * seconds + min(phase, seconds) for seconds in work]
        missing = tuple(rank for rank, seconds in enumerate(work) if phase < seconds)
        here = ranks(
            *(
                replace(BUSY, computing=spent[rank], waiting=now - spent[rank])
                if rank in missing
                else replace(
                    WAITING, operations=7, computing=spent[rank], waiting=now - spent[rank], waits_for=missing
                )
                for rank in range(4)
            )
        )
        activity = replace(RUNNING, began_ns=5, seconds=now, ranks=here, culprits=missing)
        course.add(activity)
        if now > 1:
            named.append(
                "rank 2 holds the others up" in repr(PanelView(activity, course=course)).splitlines()[0]
            )
    assert sum(named) >= 0.95 * len(named)


def test_a_sentence_stays_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it can be read; the end of the cell, and a count, do not wait."""
    now = [100.0]
    monkeypatch.setattr("nbparallel_widgets.panel_course.time.monotonic", lambda: now[0])
    course = Course()
    said = []
    for _ in range(50):
        now[0] += 0.2
        said.append(course.steady(f"it is {now[0]:.1f}", RUNNING))
    assert len(set(said)) == 10
    assert course.steady("finished", DONE) == "finished"
    assert course.steady("44 of 60 items done", MAP) == "44 of 60 items done"
    assert course.steady("45 of 60 items done", MAP) == "45 of 60 items done"


def test_items() -> None:
    """A map shows how many are done, by which rank, which item each has, the slowest, and the time left."""
    first = replace(MAP, began_ns=5, seconds=1.0, ranks=ranks(replace(BUSY, items=3, item=35), BUSY))
    idle = replace(MAP, began_ns=5, seconds=0.5, ranks=ranks(BUSY, replace(FINISHED, items=3, item=2)))
    course = course_of(idle, first, replace(first, seconds=4.1), replace(MAP, began_ns=5))
    view = PanelView(replace(MAP, began_ns=5), course=course)
    text, page = repr(view), view._repr_html_()
    assert "about 2 s left · the slowest took 3.5 s: item 35" in text
    assert "item 44" in text
    assert 'style="width:71.7%"' in page
    assert '<td class="nbp-share">23</td>' in page
    assert page.count('nbp-cut"/>') == 2
    assert len(re.findall("v14", page.partition('aria-label="rank 0: ')[2].partition("nbp-cut")[0])) == 20


def test_the_line_inside_of_a_loop() -> None:
    """On which line of it ranks computed in most samples; and where the rank that matters is now."""
    slow = replace(COMPUTING, line=2, last_line=5)
    samples = [
        replace(STRAGGLER, began_ns=5, seconds=at, ranks=ranks(WAITING, replace(slow, inside=line)))
        for at, line in ((1.0, 4), (2.0, 3), (3.0, 0), (4.9, 4))
    ]
    text = repr(PanelView(samples[-1], course=course_of(*samples)))
    assert "in lines 2-5, mostly at line 4" in text
    even = course_of(*samples[:2])
    assert "in lines 2-5\n" in repr(PanelView(samples[1], course=even))
    one = replace(samples[-1], culprits=(1,), ranks=ranks(replace(WAITING, waits_for=(1,)), slow))
    assert "line 4; 1 rank waits" in repr(
        PanelView(replace(one, ranks=ranks(replace(WAITING, waits_for=(1,)), replace(slow, inside=4))))
    )


def test_columns_stand_still() -> None:
    """Numbers end in a column, whatever they are."""
    lines = repr(PanelView(STRAGGLER)).splitlines()[2:7]
    head, rows = lines[0], lines[1:]
    for name in ("computing", "waiting", "moving", "own memory"):
        end = head.index(name) + len(name)
        assert all(row[end - 1] in "%B" for row in rows)
    assert repr(PanelView(replace(STRAGGLER, seconds=4.95))).splitlines()[2] == head


def test_only_what_is_known_is_shown() -> None:
    """Operations that are not counted exactly, a limit or segments that are not known, are left out."""
    activity = replace(STRAGGLER, limit_nbytes=None)
    text = repr(PanelView(activity))
    assert "memory: shared 153.6 MiB · file_descriptor · 3 segments" in text
    (row,) = [line for line in text.splitlines() if line.startswith("rank 0")]
    assert row.split() == ["rank", "0", "29.0", "MiB", "153.0", "MiB", "0", "B", "-"]


def test_memory() -> None:
    """Shared, ranks' own and other programs of the whole; the arrays in proportion; who uses each segment."""
    gib = 1 << 30
    done = replace(DONE, memory_nbytes=24 * gib, limit_nbytes=20 * gib)
    view = PanelView(done, SEGMENTS)
    text, page = repr(view), view._repr_html_()
    assert (
        "memory: shared 153.6 MiB · kept for the next arrays 1.0 MiB · ranks' own 116.0 MiB"
        " · other programs 3.9 GiB · free 19.8 GiB of 24.0 GiB · file_descriptor · 3 segments" in text
    )
    assert "arrays: data, x 100.0 MiB, no name 1.0 MiB" in text
    assert 'style="flex:990 1 0" class="nbp-box" title="data, x 100.0 MiB"' in page
    assert re.search(r"data, x +100\.0 MiB +file_descriptor +notebook, ranks 0-3 +notebook", text)
    assert re.search(r"no name +1\.0 MiB +mmap +rank 1 +rank 1", text)
    assert "<td>notebook, ranks 0-3</td>" in page
    moving = replace(done, phase="moving", moving_name="big", moving_nbytes=gib)
    assert "big, on its way 1.0 GiB, data, x 100.0 MiB" in repr(PanelView(moving, SEGMENTS))
    many = [replace(SEGMENTS[0], names=(f"a{i}",)) for i in range(25)]
    assert "a5 100.0 MiB, 19 others 1.9 GiB" in repr(PanelView(done, many))


def test_which_waited_for_which() -> None:
    """A small table of waiting time, and one of bytes, ranks by ranks."""
    text = repr(PanelView(DONE, SEGMENTS))
    assert "Waiting time in In[3]: row waited for column" in text
    assert re.search(r"^rank 0 +· +· +1\.70 s +·$", text, re.M)
    assert re.search(r"^rank 1 +· +· +3\.0 MiB +·$", text, re.M)
    quiet = replace(DONE, waited=((0.0, 0.0), (0.0, 0.0)), moved=((0, 0), (0, 0)))
    assert "no rank waited for another one" in PanelView(quiet)._repr_html_()
    many = [[0.0] * 20 for _ in range(20)]
    many[7][3] = 1.5
    text = repr(PanelView(replace(DONE, waited=tuple(map(tuple, many)))))
    assert re.search(r"^rank 7 +rank 3 +1\.50 s$", text, re.M)


def test_many_ranks() -> None:
    """Of hundreds of ranks the important ones have a row, the others are counted."""
    states = [*[WAITING] * 300, BUSY, *[FINISHED] * 199]
    activity = replace(
        STRAGGLER, ranks=ranks(*(replace(one, waits_for=()) for one in states)), culprits=(300,)
    )
    text = repr(PanelView(activity))
    assert "▶ 300" in text
    assert sum(line.startswith(("  ", "▶ ")) and "|" in line for line in text.splitlines()) == SHOWN
    assert "… and 436 more ranks: 237 waiting, 199 finished" in text
    course = Course()
    for i in range(1, 300):
        some = [replace(one, computing=0.1 * i, waiting=0.1 * (i % 3)) for one in activity.ranks]
        course.add(replace(activity, seconds=0.2 * i, ranks=tuple(some)))
    assert len(PanelView(activity, course=course).figures_bundle()["text/html"]) < 400_000


class _Outline(html.parser.HTMLParser):
    """Checks that elements are nested, and collects tables."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("activity", [NONE, STRAGGLER, DONE], ids=["none", "running", "finished"])
def test_pages_can_be_read_aloud(activity: Any) -> None:
    """Elements are nested; every table has a caption, every head a scope, every picture a name; no script."""
    page = PanelView(activity, SEGMENTS)._repr_html_() + folds_bundle("a", live=True)["text/html"]
    outline = _Outline()
    outline.feed(page)
    assert outline.open == []
    tags = [tag for tag, _ in outline.seen]
    assert tags.count("caption") == tags.count("table")
    assert all(attributes.get("scope") in ("row", "col") for tag, attributes in outline.seen if tag == "th")
    for tag, attributes in outline.seen:
        if tag == "svg":
            assert attributes.get("aria-hidden") == "true" or attributes["aria-label"]
        assert "id" not in attributes  # a page may have several copies
    assert "script" not in tags


def test_names_cannot_break_the_page() -> None:
    """What comes from the notebook is escaped."""
    segment = replace(SEGMENTS[0], names=("<b>",))
    assert "&lt;b&gt;" in PanelView(DONE, (segment,))._repr_html_()


def test_rows_of_ranks_that_failed_died_or_start() -> None:
    """A failed rank's line, what a dead one has lost; a rank that is started has done nothing yet."""
    view = PanelView(replace(DONE, phase="failed", failed_rank=0, failed_line=4, ranks=ranks(FAILED, DEAD)))
    text, page = repr(view), view._repr_html_()
    assert re.search(r"^▶ 0 .* line 4; failed$", text, re.M)
    assert "rank 1: dead: the next cell starts it again, without its variables" in text
    assert "rank 1 " not in text.partition("Memory of each rank")[2].partition("Waiting")[0]
    assert page.count('class="nbp-x"/>') == 1, "the mark where its time ends"
    starting = replace(IDLE, state="starting", private_nbytes=0)
    text = repr(PanelView(replace(NONE, phase="starting", starting_ranks=1, ranks=ranks(starting))))
    assert re.search(r"^  0 +\| +\| +- +- +- +-$", text, re.M)
    assert "rank 0: starting" in text


def test_what_the_last_cell_did_is_not_what_happens_now() -> None:
    """While ranks start, or an array moves, strips and shares of the cell before are not shown."""
    view = PanelView(MOVING, course=course_of(DONE))
    assert re.search(r"^  0 +\| +\| +- +- +- +29.0 MiB$", repr(view), re.M)
    assert strip(view.figures_bundle()["text/html"], 0) == []


def test_only_figures_of_a_cell_that_runs_can_stand_still() -> None:
    """What the style sheet shows without news is there; not in what is shown once, or is over."""
    stale = PanelView(STRAGGLER, as_of="17:31:54").figures_bundle()
    assert "no news since 17:31:54: the page was loaded again, or the kernel restarted" in stale["text/html"]
    assert "no news" not in stale["text/plain"]
    assert stale["text/plain"].endswith("as of 17:31:54")
    assert "no news" not in PanelView(STRAGGLER)._repr_html_()
    assert "no news" not in PanelView(DONE).figures_bundle()["text/html"]


def test_no_ranks() -> None:
    """Without ranks it says so, and how they start."""
    assert repr(PanelView(None)) == NO_RANKS
    assert NO_RANKS in PanelView(None)._repr_html_()


def test_bars_of_ranks_are_steps() -> None:
    """How far ranks say that they are: the last one above, each in its row; nothing of a bar that is full."""
    behind = replace(BUSY, step=31, steps=40, seconds_left=3.2)
    bars = replace(
        RUNNING, ranks=ranks(replace(behind, step=40), replace(behind, step=35, seconds_left=1), behind)
    )
    text = repr(PanelView(bars))
    assert "step 31 of 40 (rank 2) · about 3 s left" in text
    assert text.count("step 35 of 40") == text.count("step 31 of 40") - 1 == 1
    assert "step 40" not in text
    assert "step 35 of 40</td>" in PanelView(bars)._repr_html_()
