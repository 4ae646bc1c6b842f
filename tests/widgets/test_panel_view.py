"""What the panel says of each moment: a sentence, a row for each rank, memory, and who waited for whom."""

from __future__ import annotations

import html.parser
import re
from dataclasses import replace
from typing import Any

import pytest

from nbparallel.errors import NO_RANKS
from nbparallel_widgets.panel_sheet import folds_bundle
from nbparallel_widgets.panel_view import SHOWN, PanelView, axis_end
from nbparallel_widgets.timeline_svg import COLOURS
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

DEAD = replace(IDLE, state="dead", operation="was killed by SIGKILL: by hand", private_nbytes=0)
FAILED = replace(ENDED, state="failed")
MOVING = replace(DONE, phase="moving", moving_name="data", moving_nbytes=1 << 30)
RUNNING = replace(STRAGGLER, culprits=())
SENTENCES = {
    "In[3]: ranks 0-1, 3 wait for **rank 2** (line 2, computing for 4.6 s)": STRAGGLER,
    "In[3]: ranks 0-1 wait for **ranks 2-3**, for 4.6 s": replace(
        STRAGGLER, ranks=ranks(WAITING, WAITING, COMPUTING, COMPUTING), culprits=(2, 3)
    ),
    "In[3]: rank 0 computes; ranks 1-2 have finished; 4.9 s so far": replace(
        RUNNING, ranks=ranks(COMPUTING, FINISHED, FINISHED)
    ),
    "In[3]: **rank 1** has failed; rank 0 computes; rank 2 was released; 4.9 s so far": replace(
        RUNNING,
        ranks=ranks(COMPUTING, replace(FINISHED, state="failed"), replace(FINISHED, state="released")),
    ),
    "In[3]: ranks 0-1 compute; 4.9 s so far": replace(RUNNING, ranks=ranks(COMPUTING, COMPUTING, IDLE)),
    "In[3]: rank 0 moves data; rank 1 waits; 4.9 s so far": replace(
        RUNNING, ranks=ranks(replace(COMPUTING, state="moving"), replace(WAITING, waits_for=()))
    ),
    "In[3]: ranks 0-1 wait for each other, for 4.6 s": replace(
        RUNNING, ranks=ranks(replace(WAITING, waits_for=(1,)), replace(WAITING, waits_for=(0,)))
    ),
    "In[3]: ranks 0-1 wait, for 4.6 s": replace(RUNNING, ranks=ranks(*[replace(WAITING, waits_for=())] * 2)),
    "ranks 0-3: no cell has run yet": NONE,
    "starting 4 ranks": replace(NONE, phase="starting", number=3, starting_ranks=4, ranks=()),
    "starting 1 rank": replace(NONE, phase="starting", starting_ranks=1, ranks=()),
    "moving 1.0 GiB of `data` into shared memory": MOVING,
    "In[3]: finished after 2.0 s; the longest wait: rank 0 for **rank 2**, 1.7 s": DONE,
    "In[3]: finished after 50 ms": replace(DONE, seconds=0.05, waited=()),
    "the last call finished after 2.0 s": replace(DONE, number=0, waited=()),
    "In[3]: failed on **rank 1**, line 4, after 2.0 s": replace(
        DONE, phase="failed", failed_rank=1, failed_line=4
    ),
    "In[3]: failed on ranks 0-1, first on **rank 1**, line 4, after 2.0 s": replace(
        DONE, phase="failed", failed_rank=1, failed_line=4, ranks=ranks(FAILED, FAILED)
    ),
    "In[3]: failed on ranks 0-1, first on **rank 1**, after 2.0 s": replace(
        DONE, phase="failed", failed_rank=1, ranks=ranks(FAILED, FAILED, ENDED)
    ),
    "In[3]: failed after 2.0 s: **rank 1** was killed by SIGKILL": replace(
        DONE, phase="failed", failed_rank=1, ranks=ranks(ENDED, DEAD)
    ),
    "In[3]: failed after 2.0 s: **ranks 0, 2** finished the cell without calling barrier": replace(
        DONE,
        phase="failed",
        failed_rank=1,
        failed_between="ranks 0, 2 finished the cell without calling barrier",
    ),
    "In[3]: failed after 2.0 s: ranks called different operations": replace(
        DONE, phase="failed", failed_rank=0, failed_between="ranks called different operations"
    ),
    "In[3]: failed after 2.0 s": replace(DONE, phase="failed"),
    "In[3]: interrupted after 2.0 s": replace(DONE, phase="interrupted"),
}


@pytest.mark.parametrize("said", SENTENCES)
def test_the_title_is_a_sentence(said: str) -> None:
    """It says what happens, or how the cell ended, in the same words as text and as HTML."""
    view = PanelView(SENTENCES[said])
    assert repr(view).splitlines()[0] == said.replace("**", "")
    bold = re.sub(r"`(.+?)`", r"<code>\1</code>", re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", said))
    assert f"<caption>{bold}</caption>" in view._repr_html_()


def test_the_straggler_is_marked_by_more_than_a_colour() -> None:
    """The row of the rank that others wait for has a sign and words, in text and in HTML; no other row."""
    text = repr(PanelView(STRAGGLER))
    (row,) = [line for line in text.splitlines() if "▶" in line]
    assert row.split() == [
        "▶", "2", f"|{'█' * 24}|", "4.90", "s", "0.00", "s", "0.00", "s", "29.0", "MiB",
        "computing,", "line", "2;", "others", "wait", "for", "it",
    ]  # fmt: skip
    page = PanelView(STRAGGLER).figures_bundle()["text/html"]
    assert page.count("▶ rank 2</th>") == page.count("▶") == page.count('class="nbp-marked"') == 1
    failed = replace(DONE, phase="failed", failed_rank=1, failed_line=4)
    assert "▶ 1" in repr(PanelView(failed))
    absent = "rank 1 finished the cell without calling barrier"
    one = replace(
        failed, failed_rank=0, failed_between=absent, ranks=ranks(replace(ENDED, state="failed"), ENDED)
    )
    assert re.findall("▶ (.)", repr(PanelView(one))) == ["1"]  # and not the victim, which raised the error
    assert "▶" not in repr(PanelView(replace(one, failed_between="ranks called different operations")))
    assert "▶" not in repr(PanelView(DONE))


def test_one_axis_for_all_bars() -> None:
    """A rank that finished early has an empty rest, and is not counted as computing."""
    activity = replace(RUNNING, seconds=4.3, ranks=ranks(replace(COMPUTING, computing=4.3), FINISHED))
    assert axis_end(activity) == 5.0
    page = PanelView(activity).figures_bundle()["text/html"]
    assert 'aria-label="rank 0: computing 4.30 s, waiting 0.00 s, moving 0.00 s of 5.00 s"' in page
    assert 'aria-label="rank 1: computing 0.30 s, waiting 0.00 s, moving 0.00 s of 5.00 s"' in page
    assert f'width="86.00%" height="14" fill="{COLOURS["computing"]}"' in page
    assert f'width="6.00%" height="14" fill="{COLOURS["computing"]}"' in page
    assert "finished after 300 ms" in page
    assert axis_end(DONE) == 2.0  # ended: the longest bar fills it


def test_kinds_follow_each_other_in_a_bar() -> None:
    """Computing, waiting, moving, then empty; each with a height of its own, in percent of the width."""
    rank = replace(ENDED, computing=1.0, waiting=0.5, moving=0.25, finished=1.75)
    page = PanelView(replace(DONE, ranks=ranks(rank), waited=())).figures_bundle()["text/html"]
    found = re.findall(r'<rect x="([\d.]+)%" y="[\d.]+" width="([\d.]+)%" height="(\d+)" fill="(#\w+)"', page)
    assert found == [
        ("0.00", "50.00", "14", COLOURS["computing"]),
        ("50.00", "25.00", "5", COLOURS["waiting"]),
        ("75.00", "12.50", "9", COLOURS["moving"]),
    ]
    text = repr(PanelView(replace(DONE, ranks=ranks(rank), waited=())))
    assert f"|{'█' * 12}{'·' * 6}{'▒' * 3}   |" in text


def test_nothing_has_a_width_in_pixels() -> None:
    """What is as wide as the page cannot be cut off by it."""
    page = PanelView(STRAGGLER).figures_bundle()["text/html"]
    for svg in re.findall(r"<svg[^>]*role=\"img\"[^>]*>", page):
        assert 'width="100%"' in svg


def test_columns_stand_still() -> None:
    """All times of a table have one unit and as many decimals, whatever they are; numbers end in a column."""
    lines = repr(PanelView(STRAGGLER)).splitlines()[1:6]
    head, rows = lines[0], lines[1:]
    for name in ("computing", "waiting", "moving", "own memory"):
        end = head.index(name) + len(name)
        assert all(row[end - 1] in "sB" and row[end] == " " for row in rows)
    later = repr(PanelView(replace(STRAGGLER, seconds=4.95))).splitlines()[1]
    assert later == head


def test_only_what_is_known_is_shown() -> None:
    """Operations that are not counted exactly, a limit or segments that are not known, are left out."""
    activity = replace(STRAGGLER, limit_nbytes=None)
    text = repr(PanelView(activity))
    assert "shared memory: 153.6 MiB · file_descriptor · 3 segments" in text
    (row,) = [line for line in text.splitlines() if line.startswith("rank 0")]
    assert row.split() == ["rank", "0", "29.0", "MiB", "153.0", "MiB", "0", "B", "-"]


def test_memory() -> None:
    """Shared of how much, each rank's own, and what each segment is and which processes use it."""
    view = PanelView(DONE, SEGMENTS)
    text = repr(view)
    assert (
        "shared memory: 153.6 MiB of 20.7 GiB · file_descriptor · 3 segments"
        " · 1.0 MiB more kept for the next arrays" in text
    )
    assert re.search(r"data, x +100\.0 MiB +file_descriptor +notebook, ranks 0-3 +notebook", text)
    assert re.search(r"no name +1\.0 MiB +mmap +rank 1 +rank 1", text)
    page = view._repr_html_()
    assert "153.6 MiB of 20.7 GiB · file_descriptor" in page
    assert "<td>notebook, ranks 0-3</td>" in page


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
    states = [*[WAITING] * 300, COMPUTING, *[FINISHED] * 199]
    activity = replace(STRAGGLER, ranks=ranks(*states), culprits=(300,))
    text = repr(PanelView(activity))
    assert "▶ 300" in text
    assert text.count("|█") == SHOWN
    assert "… and 436 more ranks: 237 waiting, 199 finished" in text
    assert len(PanelView(activity).figures_bundle()["text/html"]) < 150_000


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
    """A failed rank's line, how another died; a rank that is started has done nothing yet."""
    failed = replace(ENDED, state="failed")
    view = PanelView(replace(DONE, phase="failed", failed_rank=0, failed_line=4, ranks=ranks(failed, DEAD)))
    assert re.search(r"^▶ 0 .* failed, line 4$", repr(view), re.M)
    assert re.search(r"^  1 .* - .*killed by SIGKILL; the next cell starts it again$", repr(view), re.M)
    assert "rank 1 " not in repr(view).partition("Memory of each rank")[2].partition("Waiting")[0]
    starting = replace(IDLE, state="starting", private_nbytes=0)
    text = repr(PanelView(replace(NONE, phase="starting", starting_ranks=1, ranks=ranks(starting))))
    assert re.search(r"^  0 +\| +\| +- +- +- +- +starting$", text, re.M)


def test_what_the_last_cell_did_is_not_what_happens_now() -> None:
    """While ranks start, or an array moves, the bars and times of the cell before are not shown."""
    text = repr(PanelView(MOVING))
    assert re.search(r"^  0 +\| +\| +- +- +- +29.0 MiB +idle$", text, re.M)
    assert "█" not in text.replace("█ computing", "")
    assert (
        COLOURS["computing"]
        not in PanelView(MOVING)
        .figures_bundle()["text/html"]
        .partition("<tbody>")[2]
        .partition("</tbody>")[0]
    )


def test_only_figures_of_a_cell_that_runs_can_stand_still() -> None:
    """They hold what the style sheet shows when no news come; what is shown once, or is over, does not."""
    stale = PanelView(STRAGGLER).figures_bundle()["text/html"]
    assert "No news for 5 s: after the page was loaded again or the kernel was restarted" in stale
    assert "No news" not in PanelView(STRAGGLER)._repr_html_()
    assert "No news" not in PanelView(STRAGGLER).figures_bundle()["text/plain"]
    assert "No news" not in PanelView(DONE).figures_bundle()["text/html"]


def test_no_ranks() -> None:
    """Without ranks it says so, and how they start."""
    assert repr(PanelView(None)) == NO_RANKS
    assert NO_RANKS in PanelView(None)._repr_html_()
