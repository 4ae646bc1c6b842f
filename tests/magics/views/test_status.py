"""Panel, timeline, `%parallel_status` and `statistics()` are one set of numbers, and these are right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nbparallel as nbp
from nbparallel.errors.text.table import Table
from nbparallel.session import Session
from nbparallel.session.monitoring.timeline import COMPUTING, MOVING, WAITING
from nbparallel.testing.waiting import wait_until
from nbparallel_magics.views.status import status_table

CELL = """\
import time
def timed(operation, *args, **options):
    begin = time.monotonic_ns()
    operation(*args, **options)
    spent.append(time.monotonic_ns() - begin)
spent = []
for _ in range(300): timed(all_reduce, 1)
time.sleep(SLEEP * (rank == 2))
timed(all_reduce, 1)
if rank == 0: timed(send, x, 1)
if rank == 1: timed(recv, src=0)
timed(broadcast, x if rank == 3 else None, 3)
if rank == 1: time.sleep(SLEEP / 2)
timed(barrier)
sum(spent) / 1e9
"""
OPERATIONS = [304, 304, 303, 303]
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def same(found: float, expected: float) -> bool:
    """Return whether two numbers agree within 5 % or 1 ms."""
    return abs(found - expected) <= max(1e-3, 0.05 * max(found, expected))


def rows_of(table: Table) -> list[dict[str, float]]:
    """Return the rows of a table by column; times in seconds."""
    found = []
    for row in table.rows:
        values = {}
        for name, cell in zip(table.head, row, strict=True):
            name, _, unit = name.rstrip(")").partition(" (")
            values[name] = float(cell) * UNITS.get(unit, 1.0)
        found.append(values)
    return found


@pytest.mark.parametrize("sleep", [0.05, pytest.param(3.0, marks=pytest.mark.slow)])
def test_one_set_of_numbers(sleep: float) -> None:
    """Known sleeps, bytes and waits, in a cell of 50 ms and in one of seconds: all four say the same."""
    namespace: dict[str, Any] = {"x": nbp.share(np.ones(1 << 17)), "SLEEP": sleep}
    with Session(4) as session:
        assert "last cell" not in repr(status_table(session.statistics()))
        # on a busy machine a rank may wake later than the one that it was to wait for
        assert any(_all_say_the_same(session, namespace, sleep) for _ in range(5))
        wait_until(lambda: one_memory(session))


def _all_say_the_same(session: Session, namespace: dict[str, Any], sleep: float) -> bool:
    """Run the cell and compare; return whether ranks waited for each other as they were to."""
    result = session.run(CELL, namespace=namespace, execution_count=5)
    activity, statistics, timeline = session.activity(), session.statistics(), session.timeline()
    assert timeline is not None
    table = status_table(statistics)
    assert table.note.endswith("; times and operations are of the last cell")
    shown = rows_of(table)
    assert activity.seconds == timeline.seconds
    for rank in range(4):
        panel, status, line = activity.ranks[rank], shown[rank], timeline.rows[rank]
        counted = statistics.ranks[rank]
        for kind in (COMPUTING, WAITING, MOVING):
            expected = getattr(panel, kind)
            assert getattr(counted, kind) == expected
            assert same(line.total(kind), expected), (rank, kind)
            assert same(status[kind], expected) or abs(status[kind] - expected) <= 0.005, (rank, kind)
        assert panel.operations == counted.operations == line.operations == OPERATIONS[rank]
        assert status["operations"] == OPERATIONS[rank]
        assert panel.computing + panel.waiting + panel.moving == pytest.approx(panel.finished)
        assert panel.finished == line.ended
        assert same(result[rank].wait_seconds, panel.waiting)
        # what the rank measured around its operations, of which 200 short ones count as computing
        noted = sum(span.seconds for span in line.spans if span.kind in (WAITING, MOVING))
        assert noted <= result.values[rank] + 1e-3
        assert panel.waiting <= result.values[rank] + 1e-3
        assert panel.finished <= activity.seconds
        assert sum(activity.waited[rank]) <= panel.waiting + 1e-3
    assert activity.ranks[2].computing >= sleep
    assert activity.ranks[1].computing >= sleep / 2
    waits = ((0, 2, sleep), (3, 2, sleep), (0, 1, sleep / 2), (2, 1, sleep / 2))
    return all(activity.waited[waiter][other] >= least - 0.02 for waiter, other, least in waits)


def one_memory(session: Session) -> bool:
    """Return whether sums of memory are those of the list; what was sent may be on its way back."""
    activity, statistics = session.activity(), session.statistics()
    made = {segment.maker: 0 for segment in statistics.segments}
    for segment in statistics.segments:
        made[segment.maker] += segment.nbytes
    assert statistics.shared_nbytes == sum(made.values())
    assert statistics.shared_segments == len(statistics.segments)
    of_ranks = [rank.shared_nbytes for rank in activity.ranks]
    return (
        (activity.nbytes, activity.segments) == (statistics.shared_nbytes, statistics.shared_segments)
        and of_ranks == [made.get(f"rank {rank}", 0) for rank in range(4)]
        and of_ranks == [rank.shared_nbytes for rank in statistics.ranks]
    )


@pytest.mark.slow
def test_bytes_between_ranks() -> None:
    """What went from which rank to which other is exact, or not there."""
    mib = 1 << 20
    with Session(3) as session:
        cell = (
            "import numpy as np\nx = np.ones(1 << 17)\nif rank == 0: send(x, 2)\nif rank == 2: recv(src=0)\n"
        )
        session.run(cell + "broadcast(x, 1)\nall_reduce(x)\nbarrier()")
        once = ((0, mib, 2 * mib), (2 * mib, 0, 2 * mib), (mib, mib, 0))
        assert session.activity().moved == once
        session.run("all_gather(x)")
        assert session.activity().moved == (), "how much of it went where is not noted"
        session.run("pass")
        assert session.activity().moved == ((0,) * 3,) * 3


@pytest.mark.slow
def test_status_has_no_column_without_a_cell() -> None:
    """Before the first cell there are no times; own memory and shared pages are columns of their own."""
    with Session(1) as session:
        table = status_table(session.statistics())
        assert "computing" not in repr(table)
        assert table.title == "1 rank: idle"
        (row,) = rows_of(table)
        assert {"own memory", "shared pages", "threads"} <= set(row)
        session.run("pass")
        assert "computing" in repr(status_table(session.statistics()))
