"""What ranks do at this moment, read from memory: states, for whom a rank waits, times, segments."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nbparallel.errors import ParallelError
from nbparallel.session import Session
from nbparallel.session.monitoring.activity import RankActivity, SessionActivity
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.sharing import Store
from nbparallel.testing.waiting import wait_until
from nbparallel_widgets.panel_view import PanelView

SECONDS = 60.0


def waits(now: SessionActivity) -> bool:
    """Return whether rank 0 has waited for a while."""
    return now.ranks[0].state == "waiting" and now.ranks[0].seconds > 0.1


CELL = """\
x = nbp.zeros((1000, 1000))
import os, time
while rank == 1 and not os.path.exists(PATH):
    time.sleep(0.02)
all_reduce(rank)
"""
HELD = "import os, time\ndef hold(name):\n    while not os.path.exists(f'{PATH}/{name}'): time.sleep(0.005)\n"


@pytest.mark.slow
@pytest.mark.time_limit(90)
def test_a_cell_from_its_begin_to_its_end(tmp_path: object) -> None:
    """Before, during and after a cell; who waits names the rank that is missing; a dead one is called so."""
    with pytest.raises(RuntimeError, match="no ranks are running"):
        Session(2).activity()
    gc.collect()  # what an error of an earlier test refers to would count as a segment
    with Session(2) as session:
        before = session.activity()
        assert [rank.state for rank in before.ranks] == ["idle", "idle"]
        assert (before.running, before.seconds, before.segments, before.phase) == (False, 0.0, 0, "none")
        session.push(PATH=f"{tmp_path}/go")
        assert session.activity().seconds == 0.0, "what the session does by itself is no cell"
        pending = session.submit(CELL, execution_count=7)
        seen = wait_until(lambda: now if waits(now := session.activity()) else None, session.activity)
        first, second = seen.ranks
        assert (first.operation, first.waits_for, first.line) == ("all_reduce", (1,), 5)
        assert (second.state, second.line, second.waits_for) == ("computing", 3, ())
        assert (seen.running, seen.number, seen.phase, seen.culprits) == (True, 7, "running", (1,))
        assert first.waiting >= first.seconds
        open(f"{tmp_path}/go", "w").close()
        pending.result(SECONDS)
        after = session.activity()
        assert (after.running, [rank.state for rank in after.ranks]) == (False, ["idle", "idle"])
        assert (after.phase, after.culprits) == ("finished", ())
        assert 0 < after.ranks[0].waiting < after.seconds
        assert after.waited[0][1] == pytest.approx(after.ranks[0].waiting, rel=0.05)
        assert [rank.operations for rank in after.ranks] == [1, 1]
        assert (after.segments, after.nbytes) == (2, 2 * 8_000_000 + after.nbytes % 8_000_000)
        assert [rank.shared_nbytes for rank in after.ranks] == [after.nbytes // 2] * 2
        assert after.limit_nbytes is not None
        assert after.limit_nbytes > after.nbytes
        assert after.seconds == session.activity().seconds, "the clock stands still"
        with pytest.raises(ParallelError):
            session.run("import os\nif rank == 1: os.kill(os.getpid(), 9)\nbarrier()")
        dead = session.activity()
        assert dead.ranks[1].state == "dead"
        assert "SIGKILL" in dead.ranks[1].operation
        assert (dead.phase, dead.failed_rank) == ("failed", 1)
        assert 0 < dead.ranks[1].finished <= dead.seconds
        with pytest.raises(ParallelError):
            session.run("import os\nos.kill(os.getpid(), 9)", execution_count=9)
        timeline, dead = session.timeline(), session.activity()
        assert timeline is not None
        assert (timeline.number, dead.number) == (9, 9), "what is shown is this cell, though no rank is left"
        assert timeline.seconds == dead.seconds == max(rank.finished for rank in dead.ranks) > 0


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Return a session of three ranks."""
    with Session(3) as made:
        made.run("pass")
        yield made


@pytest.fixture
def held(session: Session, tmp_path: Any) -> Iterator[Callable[[str], None]]:
    """Have ranks wait in ``hold(name)`` until what is returned is called with the name."""
    session.run(HELD)
    session.push(PATH=str(tmp_path))
    yield lambda name: (tmp_path / name).touch()
    session.interrupt()  # what a test that failed left behind


def look(session: Session, when: Callable[[SessionActivity], bool]) -> SessionActivity:
    """Return what happens as soon as `when` is true of it."""
    return wait_until(lambda: now if when(now := session.activity()) else None, session.activity)


def whole(rank: RankActivity) -> float:
    """Return a rank's time in the cell."""
    return rank.computing + rank.waiting + rank.moving


@pytest.mark.slow
def test_a_rank_that_has_finished_computes_no_more(session: Session, held: Callable[[str], None]) -> None:
    """Its time stands still, with all its operations, while the others go on; the parts are the whole."""
    pending = session.submit("all_reduce(1)\nif rank == 2: hold('end')")
    states = ["finished", "finished", "computing"]
    seen = look(session, lambda now: [rank.state for rank in now.ranks] == states and now.ranks[2].line == 2)
    assert [rank.operations for rank in seen.ranks] == [1, 1, 1]
    later = look(session, lambda now: now.seconds > seen.seconds + 0.1)
    for first, then in zip(seen.ranks[:2], later.ranks[:2], strict=True):
        assert whole(first) == pytest.approx(first.finished)
        assert (first.computing, first.waiting, first.moving) == (then.computing, then.waiting, then.moving)
    assert later.ranks[2].state == "computing"
    assert (later.ranks[2].finished, whole(later.ranks[2])) == (0.0, pytest.approx(later.seconds))
    held("end")
    pending.result(SECONDS)
    ended = session.activity()
    assert ended.ranks[0].finished < seen.seconds < ended.ranks[2].finished <= ended.seconds
    assert whole(ended.ranks[0]) == pytest.approx(ended.ranks[0].finished)


@pytest.mark.slow
def test_a_rank_computes_since_its_last_operation(session: Session, held: Callable[[str], None]) -> None:
    """In a loop: the lines of the whole loop, and the time since the ranks met, not since the loop began."""
    pending = session.submit(
        "x = 1\nfor i in range(2):\n    if rank == 2: hold(f'go {i}')\n    barrier()\n\nx = 2"
    )
    look(session, lambda now: now.culprits == (2,) and now.ranks[2].line == 2)
    time.sleep(0.3)
    held("go 0")
    seen = look(session, lambda now: now.culprits == (2,) and now.ranks[2].operations == 1)
    slow = seen.ranks[2]
    assert (slow.state, slow.line, slow.last_line) == ("computing", 2, 4)
    assert slow.seconds <= seen.seconds - 0.3
    assert "in lines 2-4" in str(PanelView(seen))
    held("go 1")
    pending.result(SECONDS)


def test_short_operations_are_counted_or_not_shown(session: Session, held: Callable[[str], None]) -> None:
    """While many short ones run there is no number, rather than a wrong one; afterwards it is exact."""
    cell = "for i in range(500): all_reduce(1)\nall_gather(1)\nif rank == 1: hold('end')"
    pending = session.submit(f"for i in range(1):\n    {cell.splitlines()[0]}\n    hold('go')\n{cell}")
    seen = look(session, lambda now: all(rank.state == "computing" and rank.line for rank in now.ranks))
    assert {rank.operations for rank in seen.ranks} <= {None, *range(501)}
    held("go")
    seen = look(session, lambda now: now.ranks[0].state == "finished" and now.ranks[1].line == 6)
    assert [seen.ranks[rank].operations for rank in (0, 1)] == [1001, 1001]
    held("end")
    pending.result(SECONDS)
    assert [rank.operations for rank in session.activity().ranks] == [1001] * 3
    timeline = session.timeline()
    assert timeline is not None
    assert [row.operations for row in timeline.rows] == [1001] * 3


def test_who_is_waited_for_in_a_group(session: Session, held: Callable[[str], None]) -> None:
    """Members of a smaller group say for whom they wait; who waits itself is no culprit."""
    cell = "g = dist.new_group([0, 1])\nif rank == 1: recv(src=2)\nif rank == 2: hold('go'); send(1, 1)\n"
    pending = session.submit(
        cell + "if rank < 2: all_reduce(1, group=g); hold('end'); all_reduce(1, group=g)"
    )
    held("end")
    seen = look(session, lambda now: now.ranks[0].waits_for == (1,) and now.ranks[1].waits_for == (2,))
    assert seen.culprits == (2,)
    held("go")
    pending.result(SECONDS)
    pending = session.submit("if rank == 0: barrier(group=g)\nif rank == 1: hold('last'); barrier(group=g)")
    seen = look(session, lambda now: now.ranks[0].waits_for == (1,))
    assert seen.culprits == (1,)
    held("last")
    pending.result(SECONDS)


def test_a_rank_that_moves_says_so(session: Session, held: Callable[[str], None]) -> None:
    """In an operation and not waiting: the time is that of the operation, and its name is known."""
    cell = "class Slow:\n    def __reduce__(self):\n        hold('moved')\n        return int, ()\n"
    pending = session.submit(cell + "if rank == 0: send(Slow(), 1)\nif rank == 1: recv(src=0)")
    seen = look(session, lambda now: now.ranks[0].moving > 0.1)
    mover = seen.ranks[0]
    assert (mover.state, mover.operation, mover.line) == ("moving", "send", 5)
    assert whole(mover) == pytest.approx(seen.seconds)
    held("moved")
    pending.result(SECONDS)
    after = session.activity()
    assert after.ranks[0].moving >= mover.moving
    assert after.waited[1][0] > 0.05


@pytest.mark.slow
def test_a_failed_cell_does_not_look_finished(session: Session, held: Callable[[str], None]) -> None:
    """The rank that failed, its line, and those that it ended; the same after an interrupt."""
    pending = session.submit("import os\nif rank == 1: 1 / 0\nif rank == 2: hold('never')\nbarrier()")
    with pytest.raises(ParallelError):
        pending.result(SECONDS)
    seen = session.activity()
    assert (seen.phase, seen.failed_rank, seen.failed_line) == ("failed", 1, 2)
    assert [rank.state for rank in seen.ranks] == ["released", "failed", "released"]
    assert all(whole(rank) == pytest.approx(rank.finished) for rank in seen.ranks)
    with pytest.raises(ParallelError):
        session.run("if rank != 1: barrier()")
    assert session.activity().failed_between.startswith("rank 1 finished the cell without calling barrier")
    pending = session.submit("hold('never')")
    look(session, lambda now: all(rank.line for rank in now.ranks))
    session.interrupt()
    with pytest.raises(KeyboardInterrupt):
        pending.result(SECONDS)
    seen = session.activity()
    assert (seen.phase, seen.failed_rank, {rank.state for rank in seen.ranks}) == (
        "interrupted",
        -1,
        {"interrupted"},
    )
    session.run("pass")
    assert (session.activity().phase, {rank.state for rank in session.activity().ranks}) == (
        "finished",
        {"idle"},
    )


@pytest.mark.slow
def test_what_happens_before_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """While ranks start, and while an array goes into shared memory, that is what is shown."""
    steps = {"start": (threading.Event(), threading.Event()), "move": (threading.Event(), threading.Event())}

    def slowly(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def later(*args: Any, **options: Any) -> Any:
            begun, go = steps[step]
            begun.set()
            assert go.wait(SECONDS)
            return function(*args, **options)

        return later

    monkeypatch.setattr(RankPool, "start", slowly("start", RankPool.start))
    monkeypatch.setattr(Store, "share", slowly("move", Store.share))
    session = Session(2)
    namespace = {"data": np.ones(1 << 17)}
    thread = threading.Thread(target=lambda: session.run("data.sum()", namespace=namespace))
    thread.start()
    try:
        begun, go = steps["start"]
        assert begun.wait(SECONDS)
        seen = session.activity()
        assert (seen.phase, seen.starting_ranks) == ("starting", 2)
        assert [rank.state for rank in seen.ranks] == ["starting"] * 2
        go.set()
        begun, go = steps["move"]
        assert begun.wait(SECONDS)
        seen = session.activity()
        assert (seen.phase, seen.moving_name, seen.moving_nbytes) == ("moving", "data", 1 << 20)
        assert seen.starting_ranks == 0
        go.set()
        thread.join(SECONDS)
        assert session.activity().phase == "finished"
    finally:
        for _, go in steps.values():
            go.set()
        thread.join(SECONDS)
        session.stop()


LOOP = """\
import os, time
x = rank
for step in range(100_000):
    until = time.perf_counter() + 0.01 * rank
    while time.perf_counter() < until: pass
    if all_reduce(int(os.path.exists(PATH))): break
"""


@pytest.mark.slow
def test_the_line_inside_of_a_loop(tmp_path: Any) -> None:
    """Of a rank that computes in a loop with operations, the line is what it executes at this moment.

    CPython 3.15 has not been looked at: no line is said there.
    """
    path, lines = tmp_path / "end", list[int]()
    with Session(2) as session:
        session.push(PATH=str(path))
        cell = threading.Thread(target=session.run, args=(LOOP,))
        cell.start()
        try:

            def enough() -> bool:
                rank = session.activity().ranks[1]
                lines.extend([rank.inside] * (rank.state == "computing" and rank.last_line == 6))
                return len(lines) >= 100

            wait_until(enough)
        finally:
            path.touch()
            cell.join()
        assert session.activity().ranks[1].inside == 0
    assert set(lines) <= {0, 3, 4, 5, 6}
    assert lines.count(5) > 80 or sys.version_info >= (3, 15)
