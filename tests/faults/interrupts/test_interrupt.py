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
from nbparallel.testing.waiting import wait_until
from tests.harness.turns import Promised


def interrupt_when_busy(session: Session, after: float) -> threading.Thread:
    """Send SIGINT to this process, as Jupyter does, once the ranks have run for `after` seconds."""

    def press() -> None:
        busy = ("computing", "waiting")
        wait_until(lambda: all(rank.state in busy for rank in session.statistics().ranks))
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
    "calls of C code": "import numpy as np; a = np.random.rand(100_000)\nwhile True: np.sort(a)",
}


@pytest.mark.parametrize("kind", CELLS)
def test_f20_f21_an_interrupt_frees_every_rank_and_keeps_it(
    kind: str, promised: Promised, three_ranks: Session
) -> None:
    """KeyboardInterrupt with the result; the same processes with their variables run the next cell."""
    three_ranks.run("kept = rank + 100")
    pids = [rank.pid for rank in three_ranks.statistics().ranks]
    thread = interrupt_when_busy(three_ranks, 0.05)
    with promised(1.0), pytest.raises(KeyboardInterrupt) as caught:
        three_ranks.run(CELLS[kind])
    thread.join()
    assert set(caught.value.result.ranks) == {0, 1, 2}  # type: ignore[attr-defined]
    assert "the cell was interrupted: rank" in str(caught.value), "and where"
    assert three_ranks.run("all_reduce(kept)").values == [303] * 3
    assert [rank.pid for rank in three_ranks.statistics().ranks] == pids


@pytest.mark.slow
def test_f20_at_random_moments(two_ranks: Session) -> None:
    """Whenever the interrupt comes, the cell ends by it or has ended, and a collective works afterwards."""
    generator = random.Random(20)
    pids = [rank.pid for rank in two_ranks.statistics().ranks]
    for _ in range(15):
        timer = threading.Timer(generator.uniform(0.0, 0.05), os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            two_ranks.run("import time\nfor _ in range(200): time.sleep(0.001); barrier()")
            timer.join()
        except KeyboardInterrupt:
            pass
        assert two_ranks.run("all_reduce(rank)").values == [1, 1]
    assert [rank.pid for rank in two_ranks.statistics().ranks] == pids


@pytest.mark.slow
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
def test_a_time_out_interrupts_and_says_where(three_ranks: Session) -> None:
    """CellTimeoutError is a TimeoutError with the result, and with where each rank was."""
    cell = "import time; print('began')\nif rank == 1: recv(src=0)\nif rank == 0:\n    time.sleep(60)"
    with pytest.raises(CellTimeoutError) as caught:
        three_ranks.run(cell, timeout=0.3)
    assert isinstance(caught.value, TimeoutError)
    assert str(caught.value) == (
        "the cell ran longer than its time-out of 0.3 s and was interrupted: rank 0 on line 4, "
        "rank 1 on line 2"
    )
    assert list(caught.value.failures) == [0, 1], "rank 2 had finished"
    assert caught.value.failures[1].frames[-1].source == "if rank == 1: recv(src=0)"
    assert caught.value.result.ranks[0].stdout == "began\n"
    assert three_ranks.run("rank").values == [0, 1, 2]


@pytest.mark.slow
def test_the_first_failure_ends_ranks_that_compute_after_a_second_of_grace(
    promised: Promised, three_ranks: Session
) -> None:
    """Who computes is interrupted and listed as freed, not as failed."""
    from nbparallel.errors import ParallelError

    with promised(2.0), pytest.raises(ParallelError) as caught:
        three_ranks.run("import time\nif rank == 1: raise ValueError('mine')\ntime.sleep(60)")
    assert list(caught.value.errors) == [1]
    assert "ranks 0, 2 were released" in str(caught.value)
