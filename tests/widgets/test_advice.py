"""Advice below a timeline: each rule with a program that has the fault, and one that has not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nbparallel.session import Session
from nbparallel.session.monitoring.timeline import Timeline
from nbparallel_widgets import timeline_view
from nbparallel_widgets.measured_view import ProfileView
from nbparallel_widgets.timeline_view import TimelineView, advice


@pytest.fixture(scope="module")
def two() -> Iterator[Session]:
    """Give two ranks to all tests of this module."""
    with Session(2) as session:
        session.run("import time\nimport numpy as np")
        yield session


def timeline_of(session: Session, cell: str, **names: Any) -> Timeline:
    """Return the timeline of a cell that is run."""
    session.run(cell, namespace=names)
    found = session.timeline()
    assert found is not None
    return replace(found, cpus=8)  # wherever the test runs


@pytest.mark.parametrize(
    ("fault", "cure", "words"),
    [
        (
            "time.sleep(0.1 + 0.5 * (rank == 1))\nbarrier()",
            "time.sleep(0.3)\nbarrier()",
            "rank 1 computed .*: deal the work .* nbp.map",
        ),
        (
            "for i in range(20_000): all_reduce(1.0)",
            "all_reduce(np.ones(3000))\ntime.sleep(0.2)",
            "20,000 small operations a rank took .* %.*, mostly all_reduce on line 1: .* in an array",
        ),
        (
            "x = np.ones(2_000_000)\nfor i in range(40): all_reduce(x)",
            "x = nbp.zeros(2_000_000)\nfor i in range(40): all_reduce(x)",
            "ranks passed arrays of their own, 1.2 GiB in all: those of nbp.zeros",
        ),
    ],
    ids=["uneven", "small operations", "private arrays"],
)
def test_a_cell_is_advised(two: Session, fault: str, cure: str, words: str) -> None:
    """The fault is named with its figure and a remedy; the program that has the remedy gets no such line."""
    assert any(re.search(words, line) for line in advice(timeline_of(two, fault)))
    assert not any(re.search(words, line) for line in advice(timeline_of(two, cure)))


def test_more_ranks_than_cpus_are_advised(two: Session) -> None:
    """Ranks that compute and get no CPU; not those that sleep, nor those that have one each."""
    busy = timeline_of(two, "end = time.process_time() + 0.2\nwhile time.process_time() < end: pass")
    assert busy.cpu_seconds >= 0.4
    busy = replace(
        busy, cpu_seconds=sum(row.total("computing") for row in busy.rows) / 2
    )  # whatever else runs
    (line,) = advice(replace(busy, cpus=1))
    assert line.startswith("2 ranks share 1 CPU and had none for 50 % of the time")
    assert not advice(replace(busy, cpus=2))
    assert not advice(replace(timeline_of(two, "time.sleep(0.2)"), cpus=1))


def test_an_object_that_is_copied_for_each_cell_is_advised(two: Session) -> None:
    """From the third cell in a row on; an array, and an object that does not change, are copied once."""
    for number in range(4):
        found = advice(timeline_of(two, "time.sleep(0.1)\nlen(text)", text=bytes([number]) * (2 << 20)))
        assert bool(found) == (number >= 2)
    (line,) = found
    assert line.startswith("text (2.0 MiB) was copied for each of the last 4 cells: ")
    for _ in range(4):
        found = advice(timeline_of(two, "time.sleep(0.1)\nlen(text)", text=bytes([number]) * (2 << 20)))
    assert not found


def test_advice_stands_below_the_timeline(two: Session) -> None:
    """In text and in HTML, three lines at most; nothing below a short cell."""
    timeline = timeline_of(two, "time.sleep(0.1 + 0.5 * (rank == 1))\nbarrier()")
    for shown in (timeline_view.text(timeline), TimelineView(timeline)._repr_html_()):
        assert "advice: rank 1 computed" in shown
    copied = {f"x{number}": (2 << 20, 5) for number in range(9)}
    assert len(advice(replace(timeline, copied=copied))) == 3
    assert not advice(replace(timeline, seconds=0.04))


REPEATED = "all ranks have the same {} then: compute it once"


@pytest.mark.parametrize(
    ("fault", "cure", "words"),
    [
        (
            "table = np.cumsum(np.sin(np.arange(9_000_000)))\nbarrier()",
            "table = np.cumsum(np.sin(np.arange(rank, 18_000_000, 2)))\nbarrier()",
            rf"line 1 took \d+ % of the time, and {REPEATED.format('table')}",
        ),
        (
            "total = 0.5\nfor step in range(3_000_000):\n    total += step",
            "total = 0.5\nfor step in range(3_000_000):\n    total += step * rank",
            rf"line 2 took \d+ % of the time, and {REPEATED.format('total')}",
        ),
        (
            "def heavy(n):\n    time.sleep(0.1)\n    return n / 7\ny = heavy(3)",
            "def heavy(n):\n    time.sleep(0.1)\n    return n / 7\ny = all_reduce(heavy(3))",
            rf"line 4 took \d+ % of the time, and {REPEATED.format('y')}",
        ),
        (
            "time.sleep(0.1 + 0.5 * (rank == 1))\nbarrier()",
            "time.sleep(0.3)\ndone = True\nbarrier()",
            r"rank 1 computed .*: deal the work .* nbp.map",
        ),
    ],
    ids=["a statement", "a loop", "in a function", "uneven"],
)
def test_a_profile_advises(two: Session, fault: str, cure: str, words: str) -> None:
    """Of a statement that all ranks repeat, and uneven work; with the efficiency, in text and in HTML."""
    found = two.run(fault, profile=True).profile
    assert found is not None
    for shown in (str(found), ProfileView(found)._repr_html_()):
        assert re.search(f"advice: {words}", shown), shown
        assert "% of the ranks' time was computing = " in shown.replace("&#x27;", "'")
    good = two.run(cure, profile=True).profile
    assert not re.search(words, str(good))


def test_what_ranks_have_alike_by_chance_is_no_repetition(two: Session) -> None:
    """Numbers with few digits, and what an operation has made the same."""
    for cell in (
        "n = 1000 if time.sleep(0.1) is None else 0",
        "n = 9 ** 9999 + (time.sleep(0.1) or 0)",  # too many digits for `repr`
        "x = all_reduce(time.sleep(0.1) or 1234.5)",
    ):
        assert "have the same" not in str(two.run(cell, profile=True).profile)
