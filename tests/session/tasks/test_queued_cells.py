"""Cells in flight: `Session.submit` with `queue`."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from nbparallel.errors import BusyError, ClosedError, ParallelError, StaleWorkError
from nbparallel.session import PendingCell, Session
from nbparallel.testing.waiting import wait_until

WAIT = "import time\nwhile not flag[0]:\n    time.sleep(0.005)\n"


@pytest.fixture
def session(two_ranks: Session) -> Session:
    """Two ranks."""
    return two_ranks


def occupy(session: Session) -> tuple[PendingCell, dict[str, Any]]:
    """Return a cell that runs until ``flag[0]`` of the namespace is set, and that namespace."""
    namespace: dict[str, Any] = {"flag": np.zeros(1)}
    return session.submit(f"{WAIT}'first'", namespace=namespace), namespace


@pytest.mark.slow
def test_queued_cells_run_one_after_the_other(session: Session) -> None:
    """In the order in which they were submitted; the caller goes on, and without `queue` it is refused."""
    first, namespace = occupy(session)
    cells = [
        session.submit(f"order = globals().get('order', []) + [{n}]\norder", queue=True) for n in range(5)
    ]
    assert [cell.state for cell in (first, *cells)] == ["running", *["queued"] * 5]
    assert cells[0].stdout(0) == ""
    assert not cells[0].wait(0.05)
    for other in (session.run, session.submit):
        with pytest.raises(BusyError):
            other("1")
    namespace["flag"][0] = 1
    assert list(cells[-1].result(30).values) == [[0, 1, 2, 3, 4]] * 2
    assert [cell.state for cell in cells] == ["done"] * 5
    assert first.result(30).values == ["first"] * 2
    assert session.submit("del order\n7", queue=True).result(30).values == [7, 7]


def test_names_are_those_of_the_time_when_it_was_submitted(session: Session) -> None:
    """Later changes do not reach it, but for arrays, which are the same memory."""
    _, namespace = occupy(session)
    namespace.update(number=1, items=[1], array=np.zeros(2), large={"a": np.arange(200_000)}, gone="here")
    exec("def doubled(): return 2 * number", namespace)
    used = "number, items, array.tolist(), int(large['a'][0]), gone, doubled()"
    queued = session.submit(used, namespace=namespace, queue=True)
    array = namespace["array"]
    namespace["number"] = 5
    namespace["items"].append(2)
    namespace["large"]["a"][0] = 7
    array[0] = 3
    namespace["array"] = np.ones(1)
    del namespace["gone"]
    later = session.submit(
        "number, items, array.tolist(), 'gone' in globals()", namespace=namespace, queue=True
    )
    namespace["flag"][0] = 1
    assert queued.result(30).values[1] == (1, [1], [3.0, 0.0], 0, "here", 2)
    assert later.result(30).values[1] == (5, [1, 2], [1.0], False)


def test_what_a_rank_assigns_in_between_is_its_own(session: Session) -> None:
    """A name that the running cell assigns stays the rank's, although a queued one moved the array."""
    namespace: dict[str, Any] = {"flag": np.zeros(1), "x": np.zeros(3)}
    first = session.submit(f"{WAIT}x = 'mine'", namespace=namespace)
    queued = session.submit("x", namespace=namespace, queue=True)
    namespace["flag"][0] = 1
    assert queued.result(30).values == ["mine", "mine"]
    assert first.done()


def test_a_cell_that_cannot_run_is_refused_when_it_is_submitted(session: Session) -> None:
    """And the queue goes on without it."""
    first, namespace = occupy(session)
    namespace["lock"] = threading.Lock()
    for cell, error, options in (
        ("x = (", SyntaxError, {}),
        ("lock", TypeError, {"namespace": namespace}),
        ("1", ValueError, {"ranks": [7]}),
        ("1", TypeError, {"colour": "red"}),
        ("flag", BusyError, {"namespace": namespace, "share": "flag"}),
    ):
        with pytest.raises(error):
            session.submit(cell, queue=True, **options)  # type: ignore[arg-type]
    after = session.submit("8", queue=True)
    namespace["flag"][0] = 1
    assert after.result(30).values == [8, 8]
    assert first.done()


def test_one_that_fails_or_is_cancelled_does_not_stop_the_others(session: Session) -> None:
    """Cancelled before its turn it never runs."""
    first, namespace = occupy(session)
    fails, cancelled, last = (
        session.submit(cell, queue=True) for cell in ("1 / 0", "never = 1", "'never' in globals()")
    )
    assert cancelled.cancel()
    assert isinstance(cancelled.exception(30), KeyboardInterrupt)
    assert (cancelled.state, fails.state) == ("cancelled", "queued")
    namespace["flag"][0] = 1
    assert isinstance(fails.exception(30), ParallelError)
    assert last.result(30).values == [False, False]
    _, namespace = occupy(session)
    running = session.submit("print('begun', flush=True)\ntime.sleep(100)", queue=True)
    waiting = session.submit("9", queue=True)
    namespace["flag"][0] = 1
    wait_until(lambda: "begun" in running.stdout(0))
    assert (running.state, waiting.state) == ("running", "queued")
    assert running.cancel()
    assert isinstance(running.exception(30), KeyboardInterrupt)
    assert waiting.result(30).values == [9, 9]
    assert first.done()


@pytest.mark.slow
def test_what_waits_ends_with_the_session() -> None:
    """As the cell that runs: each with an error, and no thread stays."""
    with Session(2) as session:
        cells = [occupy(session)[0], *(session.submit("1", queue=True) for _ in range(3))]
    assert all(isinstance(cell.exception(30), ClosedError) for cell in cells)
    wait_until(lambda: all(thread.name != "nbparallel-pending" for thread in threading.enumerate()))


@pytest.mark.slow
def test_ranks_that_are_lost_in_between(two_ranks: Session) -> None:
    """A small object comes with the cell; a large one that the rank had is missed with its name."""
    namespace: dict[str, Any] = {"flag": np.zeros(1), "small": [1], "large": [np.ma.zeros(300_000)]}
    two_ranks.run("small, large", namespace=namespace)
    die = "import os, signal\nrank == 1 and os.kill(os.getpid(), signal.SIGKILL)"
    first = two_ranks.submit(f"{WAIT}{die}", namespace=namespace)
    one, two = (two_ranks.submit(name, namespace=namespace, queue=True) for name in ("small", "large"))
    namespace["flag"][0] = 1
    assert isinstance(first.exception(30), ParallelError)
    assert one.result(30).values == [[1], [1]]
    with pytest.raises(StaleWorkError, match="rank 1 has lost large while this cell waited"):
        two.result(30)
    assert two_ranks.run("len(large)", namespace=namespace).values == [1, 1]


@pytest.mark.slow
def test_a_handle_can_be_kept(session: Session) -> None:
    """It holds its result, and nothing of the cell, the session, or the cells before it."""
    first, namespace = occupy(session)
    queued = session.submit("rank", queue=True)
    namespace["flag"][0] = 1
    assert queued.result(30).values == [0, 1]
    gone = weakref.ref(first)
    del first
    wait_until(lambda: gc.collect() >= 0 and gone() is None)
    with Session(1) as other:
        kept = other.submit("5")
        assert kept.result(30).values == [5]
        reference = weakref.ref(other)
    del other
    wait_until(lambda: gc.collect() >= 0 and reference() is None)
    assert kept.result().values == [5]


@pytest.mark.slow
def test_no_cell_overtakes_what_waits_when_others_are_cancelled(session: Session) -> None:
    """Behind a cell that is cancelled while it waits comes what is behind the cell before it."""
    session.run("order = []")
    for _ in range(10):
        first, namespace = occupy(session)
        cells = [session.submit("order.append(1)", queue=True)]
        dropped = session.submit("order.append(0)", queue=True)
        cells.append(
            session.submit("order.append(2)", queue=True)
        )  # behind a cell that waits, and is dropped
        assert dropped.cancel()
        assert isinstance(dropped.exception(10), KeyboardInterrupt)
        for _ in range(3):
            last = session.submit("order.append(0)", queue=True)
            assert last.cancel()
            assert isinstance(last.exception(10), KeyboardInterrupt)
        cells.append(session.submit("order.append(3)", queue=True))  # behind those that were last
        cells.append(session.submit("order.append(4)", queue=True))
        namespace["flag"][0] = 1
        for cell in (first, *cells):
            cell.result(30)
        assert session.run("order.copy(), order.clear()").values == [([1, 2, 3, 4], None)] * 2


@pytest.mark.slow
def test_a_cell_that_never_began_ends_its_output(session: Session) -> None:
    """It is cancelled while it waits: what shows its output may go."""
    ended = threading.Event()

    class Sink:
        def finish(self) -> None:
            ended.set()

    _, namespace = occupy(session)
    queued = session.submit("1", queue=True, sink=Sink())  # type: ignore[arg-type]
    assert queued.cancel()
    assert isinstance(queued.exception(10), KeyboardInterrupt)
    assert ended.is_set()
    namespace["flag"][0] = 1
    assert session.submit("2", queue=True).result(30).values == [2, 2]


@pytest.mark.slow
def test_a_callback_that_raises_stops_no_other(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown as what a thread raises is; later ones are called, and the queue goes on at once."""
    shown: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda hooked: shown.append(str(hooked.exc_value)))
    called = threading.Event()
    first, namespace = occupy(session)

    def fail(_: PendingCell) -> None:
        raise ValueError("of a callback")

    first.add_done_callback(fail)
    first.add_done_callback(lambda _: called.set())
    queued = session.submit("1", queue=True)
    namespace["flag"][0] = 1
    assert queued.result(30).values == [1, 1]
    assert called.wait(10)
    first.add_done_callback(fail)
    assert shown == ["of a callback"] * 2
