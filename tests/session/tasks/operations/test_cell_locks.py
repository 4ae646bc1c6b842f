"""Locks in cells: what a death, the end of a cell and a new epoch make of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nbparallel.errors import ParallelError
from nbparallel.session import Session
from nbparallel.testing.waiting import wait_until

DIES = """
import os, signal
if rank == 1:
    with dist.lock("x"):
        os.kill(os.getpid(), signal.SIGKILL)
barrier()
"""
ASKS = """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    with dist.lock("x") as lock:
        found = lock.abandoned, [str(w.message) for w in seen]
found
"""


TURNS = """
import os, time
if rank:
    recv(src=0)
with dist.lock("t"):
    if rank == 0:
        send(0, 1)
        send(0, 2)
        while not os.path.exists(go):
            time.sleep(0.001)
"""


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Return three ranks."""
    with Session(3) as session:
        session.run("pass")  # makes the first control segment, before the leak check counts
        yield session


@pytest.mark.slow
@pytest.mark.fault("F39")
@pytest.mark.time_limit(60)
def test_the_first_holder_after_a_death_is_warned(session: Session) -> None:
    """Once, in the next cell that takes the lock, on whichever rank is first; the restarted rank included."""
    for asking in ((0, 1, 2), (1,)):
        with pytest.raises(ParallelError, match="SIGKILL"):
            session.run(DIES)
        assert session.run("with dist.lock('y') as y: pass\ny.abandoned").values == [()] * 3
        values = list(session.run(ASKS, ranks=asking).values)
        ((abandoned, (text,)),) = [value for value in values if value != ((), [])]
        assert abandoned == (1,)
        assert "'x' was held by rank 1, which took it on line 3, and died" in text
        assert list(session.run(ASKS).values) == [((), [])] * 3


@pytest.mark.slow
@pytest.mark.fault("F39")
@pytest.mark.time_limit(60)
def test_it_outlasts_epochs_in_which_no_rank_asks(session: Session) -> None:
    """A failure between the death and the next holder changes nothing."""
    with pytest.raises(ParallelError, match="SIGKILL"):
        session.run(DIES)
    with pytest.raises(ParallelError, match="ZeroDivisionError"):
        session.run("1 / rank")
    values = list(session.run(ASKS).values)
    assert sorted(abandoned for abandoned, _ in values) == [(), (), (1,)]


@pytest.mark.filterwarnings("default")  # ranks have those of this process, which are errors
@pytest.mark.slow
@pytest.mark.fault("F39")
@pytest.mark.time_limit(60)
def test_a_cell_that_goes_on_hands_the_lock_over(session: Session) -> None:
    """The ranks that wait get it, the first of them with a warning under the cell."""
    then = "import time\ntime.sleep(0.3)\nwith dist.lock('x') as lock:\n    pass\nlock.abandoned"
    with pytest.raises(ParallelError, match="SIGKILL") as error:
        session.run(DIES.replace("barrier()", then), on_error="continue")
    result = error.value.result
    assert sorted(result.values[rank] for rank in (0, 2)) == [(), (1,)]
    assert "half changed" in result.ranks[0].stderr + result.ranks[2].stderr
    assert list(session.run(ASKS).values) == [((), [])] * 3


@pytest.mark.fault("F39")
def test_a_lock_ends_with_its_cell(session: Session) -> None:
    """A line names it; no rank of the next cell waits, and its release there is an error."""
    result = session.run("lock = dist.lock('x')\nif rank == 2: lock.acquire()")
    assert [bool(rank.stderr) for rank in result.ranks.values()] == [False, False, True]
    assert "the lock 'x' since line 2 was not released" in result.ranks[2].stderr
    assert session.run("with lock: pass\nlock.name").values == ["x"] * 3
    with pytest.raises(ParallelError, match="rank 2 does not hold the lock 'x'"):
        session.run("if rank == 2: lock.release()")
    assert session.run("with lock: pass\nlock.name").values == ["x"] * 3, "kept beyond its epoch"


@pytest.mark.slow
def test_in_a_cell_on_some_ranks() -> None:
    """No other rank is needed, and the notebook's array counts right."""
    names = {"counter": np.zeros(1, int)}
    code = "for _ in range(200):\n    with dist.lock('c'): counter[0] += 1"
    with Session(3) as session:
        session.run(code, namespace=names, ranks=(0, 2), share="counter")
        session.run(code, namespace=names)
        assert names["counter"][0] == 1000


def test_a_wait_for_a_lock_is_on_the_timeline(session: Session, tmp_path: Path) -> None:
    """With the rank that held it, and its line."""
    go = tmp_path / "go"
    pending = session.submit(TURNS, namespace={"go": str(go)})
    wait_until(
        lambda: sum(rank.operation == "lock" for rank in session.activity().ranks) == 2, session.activity
    )
    time.sleep(0.1)
    go.touch()
    pending.result(60)
    timeline = session.timeline()
    assert timeline is not None
    waits = [wait for wait in timeline.waits() if wait.operation == "lock"]
    assert {wait.line for wait in waits} == {4}
    assert 0 in {wait.waits_for for wait in waits}
    assert sum(wait.seconds for wait in waits) > 0.05


@pytest.mark.slow
def test_many_abandoned_locks() -> None:
    """Ten that no rank takes again hide no newer one, and a rank that has learned of ten can hold others."""
    dies = """
import os, signal
if rank == 1:
    for n in {}:
        dist.lock(f"row{n}").acquire()
    os.kill(os.getpid(), signal.SIGKILL)
barrier()
"""
    with Session(2) as session:
        for numbers in (range(8), range(8, 12), [99]):
            with pytest.raises(ParallelError, match="SIGKILL"):
                session.run(dies.replace("{}", repr(list(numbers))))
        found = session.run(
            """
import warnings
warnings.simplefilter("ignore")
abandoned = []
for n in [99, *range(12)]:
    with dist.lock(f"row{n}") as lock:
        abandoned.append(lock.abandoned)
with dist.lock("p"):
    with dist.lock("q"):
        pass
abandoned
""",
            ranks=[0],
        )
        assert found.values[0] == [(1,)] * 13


def test_a_lock_taken_twice_is_said_once(session: Session) -> None:
    """The text is the same on each rank, and is not repeated for a rank that waited for the lock."""
    with pytest.raises(ParallelError, match="this rank holds the lock 'x' already since line 1") as caught:
        session.run("with dist.lock('x'):\n    with dist.lock('x'): pass")
    shown = "\n".join(caught.value._render_traceback_())
    assert shown.count("and cannot take it twice") == 1, shown
