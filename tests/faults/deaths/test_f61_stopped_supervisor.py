"""F61: a supervisor that is stopped for a while: ranks go on, and a death meanwhile is told after it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

import nbparallel as nbp
from nbparallel.errors import ParallelError, RankDiedError


@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_f61_deaths_during_a_stop_are_told_after_it() -> None:
    """Ranks talk while their supervisor is stopped; a death in that time is seen when it goes on."""
    with nbp.Session(2) as session:
        session.run("import os, time", namespace={})
        supervisor = session.statistics().supervisor_pid
        os.kill(supervisor, signal.SIGSTOP)
        try:
            cell = "x = all_reduce(rank + 1); send(x, 1 - rank); recv(src=1 - rank)"
            assert session.run(cell, namespace={}).values == [3, 3]
            waker = threading.Timer(0.8, os.kill, (supervisor, signal.SIGCONT))
            waker.start()
            with pytest.raises(ParallelError) as caught:
                session.run("if rank == 1: os.kill(os.getpid(), 9)\nbarrier()", namespace={})
        finally:
            os.kill(supervisor, signal.SIGCONT)
        waker.join()
        assert isinstance(caught.value.errors[1], RankDiedError)
        assert "SIGKILL" in str(caught.value)
        assert session.run("rank", namespace={}).values == [0, 1]
