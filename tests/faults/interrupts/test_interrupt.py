"""Interrupts in a session: every rank stops, stays alive, keeps its variables; nobody else is hit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest

from nbparallel.errors import CellTimeoutError
from nbparallel.session import Session
from nbparallel.testing.waiting import Promised


def interrupt_when_busy(session: Session, after: float) -> threading.Thread:
    """Send SIGINT to this process, as Jupyter does, once the ranks have run for `after` seconds."""

    def press() -> None:
        deadline = time.monotonic() + 10
        while not all(rank.state in ("computing", "waiting") for rank in session.statistics().ranks):
            if time.monotonic() > deadline:
                return
            time.sleep(0.002)
        time.sleep(after)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


CELLS = {
    "python": "while True: n = sum(range(1000))",
    "sleep": "import time; time.sleep(60)",
    "recv": "recv(src=(rank + 1) % world_size) if rank == 0 else __import__('time').sleep(60)",
    "collective": "all_reduce(1) if rank else __import__('time').sleep(60)",
    "subprocess": "import subprocess; subprocess.run(['sleep', '60'])",
}


@pytest.mark.parametrize("kind", CELLS)
def test_f20_f21_an_interrupt_frees_every_rank_and_keeps_it(kind: str, promised: Promised) -> None:
    """KeyboardInterrupt with the result; the same processes with their variables run the next cell."""
    with Session(3) as session:
        session.run("kept = rank + 100")
        pids = [rank.pid for rank in session.statistics().ranks]
        thread = interrupt_when_busy(session, 0.05)
        with promised(1.0), pytest.raises(KeyboardInterrupt) as caught:
            session.run(CELLS[kind])
        thread.join()
        assert set(caught.value.result.ranks) == {0, 1, 2}  # type: ignore[attr-defined]
        assert "the cell was interrupted: rank" in str(caught.value), "and where"
        assert session.run("all_reduce(kept)").values == [303] * 3
        assert [rank.pid for rank in session.statistics().ranks] == pids


def test_f20_at_random_moments() -> None:
    """Whenever the interrupt comes, the cell ends by it or has ended, and a collective works afterwards."""
    generator = random.Random(20)
    with Session(2) as session:
        pids = [rank.pid for rank in session.statistics().ranks]
        for _ in range(15):
            timer = threading.Timer(generator.uniform(0.0, 0.05), os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                session.run("import time\nfor _ in range(200): time.sleep(0.001); barrier()")
                timer.join()
            except KeyboardInterrupt:
                pass
            assert session.run("all_reduce(rank)").values == [1, 1]
        assert [rank.pid for rank in session.statistics().ranks] == pids


def test_f25_idle_ranks_never_notice() -> None:
    """SIGINT to this process and to every rank while nothing runs changes nothing."""
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with Session(2) as session:
            session.run("x = rank")
            before = session.statistics()
            for _ in range(50):
                os.kill(os.getpid(), signal.SIGINT)
                for rank in before.ranks:
                    os.kill(rank.pid, signal.SIGINT)
            assert session.run("x").values == [0, 1]
            after = session.statistics()
            assert [rank.pid for rank in after.ranks] == [rank.pid for rank in before.ranks]
            assert after.epoch == before.epoch
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.slow
def test_a_rank_that_swallows_interrupts_is_ended_after_the_ladder() -> None:
    """Only the one that does not answer goes; it comes back with its number."""
    with Session(2) as session:
        session.run("x = rank")
        thread = interrupt_when_busy(session, 0.1)
        with pytest.raises(KeyboardInterrupt):
            session.run(
                "import time\n"
                "while True:\n"
                "    try:\n"
                "        time.sleep(60)\n"
                "    except KeyboardInterrupt:\n"
                "        if rank == 0: break\n"
            )
        thread.join()
        result = session.run("globals().get('x')")
        assert result.values == [0, None]
        (note,) = result.notes
        assert note.startswith("rank 1 was ended, because it did not answer the interrupt; it is back")


def test_a_time_out_interrupts_and_says_where() -> None:
    """CellTimeoutError is a TimeoutError with the result, and with where each rank was."""
    cell = "import time; print('began')\nif rank == 1: recv(src=0)\nif rank == 0:\n    time.sleep(60)"
    with Session(3) as session:
        with pytest.raises(CellTimeoutError) as caught:
            session.run(cell, timeout=0.3)
        assert isinstance(caught.value, TimeoutError)
        assert str(caught.value) == (
            "the cell ran longer than its time-out of 0.3 s and was interrupted: rank 0 on line 4, "
            "rank 1 on line 2"
        )
        assert list(caught.value.failures) == [0, 1], "rank 2 had finished"
        assert caught.value.failures[1].frames[-1].source == "if rank == 1: recv(src=0)"
        assert caught.value.result.ranks[0].stdout == "began\n"
        assert session.run("rank").values == [0, 1, 2]


def test_the_first_failure_ends_ranks_that_compute_after_a_second_of_grace(promised: Promised) -> None:
    """Who computes is interrupted and listed as freed, not as failed."""
    from nbparallel.errors import ParallelError

    with Session(3) as session:
        with promised(2.0), pytest.raises(ParallelError) as caught:
            session.run("import time\nif rank == 1: raise ValueError('mine')\ntime.sleep(60)")
        assert list(caught.value.errors) == [1]
        assert "ranks 0, 2 were freed" in str(caught.value)


def test_a_session_in_a_thread_is_interrupted_from_another() -> None:
    """`Session.interrupt` reaches a run wherever it waits, and is no trap for the main thread."""
    caught: list[BaseException] = []
    with Session(2) as session:

        def run() -> None:
            try:
                session.run("import time; time.sleep(60)")
            except KeyboardInterrupt as error:
                caught.append(error)

        session.interrupt()  # nothing runs: nothing happens
        session.run("pass")
        thread = threading.Thread(target=run)
        thread.start()
        while not all(rank.state == "computing" for rank in session.statistics().ranks):
            time.sleep(0.005)
        session.interrupt()
        thread.join()
        assert len(caught) == 1
        assert session.run("rank").values == [0, 1]
