"""What the program's own code raises while it waits for ranks: a time-out by alarm, by another thread."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from nbparallel.session import Session
from nbparallel.session.interrupts import InterruptCounter
from nbparallel.testing.waiting import wait_until
from tests.harness.turns import Promised

ENDLESS = "import time\nopen(started, 'w').close()\nwhile True: time.sleep(0.01); print('late')"


class OwnTimeoutError(Exception):
    """What a time-out decorator raises."""


@contextmanager
def handled(number: int, handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Have a handler of the program's own for a signal."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        assert signal.getsignal(number) is handler, "it is the program's again"
        signal.signal(number, before)


def give_up(number: int, _frame: FrameType | None) -> None:
    """Raise, as handlers of alarms do."""
    raise OwnTimeoutError(f"signal {number}")


def when_there(path: Path, act: Callable[[], object]) -> threading.Thread:
    """Act as soon as a file exists."""

    def wait() -> None:
        wait_until(path.exists)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def check_stopped(session: Session, pids: list[int]) -> None:
    """Check that no rank goes on: the next cell works on the same processes, and prints nothing else."""
    after = session.run("print('next'); all_reduce(kept)")
    assert list(after.values) == [200, 200]
    assert [part.stdout for part in after.ranks.values()] == ["next\n"] * 2
    assert [rank.pid for rank in session.statistics().ranks] == pids


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.parametrize("name", ["SIGALRM", "SIGUSR1", "SIGTERM"])
def test_an_exception_of_a_signal_handler_stops_the_ranks(
    name: str, tmp_path: Path, promised: Promised
) -> None:
    """The cell ends with that exception within a second, and with a note on where the ranks were."""
    started, number = tmp_path / "started", int(getattr(signal, name))
    with Session(2) as session, handled(number, give_up):
        session.run("kept = 100")
        pids = [rank.pid for rank in session.statistics().ranks]
        thread = when_there(started, lambda: os.kill(os.getpid(), number))
        with promised(1.5), pytest.raises(OwnTimeoutError) as caught:
            session.run(ENDLESS, namespace={"started": str(started)})
        thread.join()
        (note,) = caught.value.__notes__
        assert note.startswith("the ranks were interrupted"), note
        check_stopped(session, pids)


@pytest.mark.slow
def test_a_timer_that_fires_again_and_again(tmp_path: Path) -> None:
    """It counts once: the ranks are interrupted, and none is killed."""
    started, raised = tmp_path / "started", threading.Event()
    stuck = ENDLESS.replace("while", "try:\n  while") + "\nfinally: time.sleep(0.3)"

    def fire() -> None:
        while not raised.is_set():  # the watchdog of the tests has the process's timer
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.005)

    with Session(2) as session, handled(signal.SIGUSR1, give_up):
        session.run("kept = 100")
        pids = [rank.pid for rank in session.statistics().ranks]
        thread = when_there(started, fire)
        caught: list[OwnTimeoutError] = []
        try:
            session.run(stuck, namespace={"started": str(started)})
        except OwnTimeoutError as error:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the next one must not hit the test
            caught.append(error)
        raised.set()
        thread.join()
        assert "the ranks were interrupted" in "".join(caught[0].__notes__)
        signal.signal(signal.SIGUSR1, give_up)
        check_stopped(session, pids)


@pytest.mark.slow
def test_an_exception_of_another_thread_stops_the_ranks(tmp_path: Path) -> None:
    """So do time-outs that raise in the waiting thread through the interpreter."""
    started, main = tmp_path / "started", threading.get_ident()

    def raise_there() -> None:
        kind = ctypes.py_object(OwnTimeoutError)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), kind) == 1

    with Session(2) as session:
        session.run("kept = 100")
        pids = [rank.pid for rank in session.statistics().ranks]
        thread = when_there(started, raise_there)
        with pytest.raises(OwnTimeoutError):
            session.run(ENDLESS, namespace={"started": str(started)})
        thread.join()
        check_stopped(session, pids)


@pytest.mark.slow
def test_a_start_that_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves no process, and the session can be started again."""
    from nbparallel.session.processes.rank_pool import RankPool

    next_event, rung = RankPool.next_event, []

    def ring(self: RankPool, timeout: float | None) -> Any:
        if not rung:
            rung.append(True)
            os.kill(os.getpid(), signal.SIGALRM)
        return next_event(self, timeout)

    monkeypatch.setattr(RankPool, "next_event", ring)
    with handled(signal.SIGALRM, give_up):
        session = Session(2)
        try:
            with pytest.raises(OwnTimeoutError):
                session.start()
            assert list(session.run("rank").values) == [0, 1]
        finally:
            session.stop()


def test_without_ranks_to_wait_for_a_handler_raises_as_ever() -> None:
    """Outside of the block, and in a handler that was kept from inside of it, nothing is deferred."""
    with handled(signal.SIGALRM, give_up):
        with InterruptCounter():
            kept: Any = signal.getsignal(signal.SIGALRM)
            assert kept is not give_up
        with pytest.raises(OwnTimeoutError):
            kept(signal.SIGALRM, None)
        with pytest.raises(OwnTimeoutError):
            signal.raise_signal(signal.SIGALRM)
