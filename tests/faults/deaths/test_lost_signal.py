"""A SIGCHLD that never comes: a debugger that lets go of us just when a child dies may swallow it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

import pytest

from nbparallel.errors import ParallelError, RankDiedError
from nbparallel.session import Session

SEIZE, DETACH = 0x4206, 17
"""Requests of ptrace(2)."""
WALL = 0x40000000
"""Of waitpid(2): also of what is no child."""


@contextlib.contextmanager
def losing_the_next_signal(pid: int) -> Iterator[None]:
    """Trace a process, and let go of it when the next signal arrives, which it does not get."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(SEIZE, pid, None, None) != 0:
        pytest.skip(f"no process can be traced here: {os.strerror(ctypes.get_errno())}")
    yield
    _, status = os.waitpid(pid, WALL)
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGCHLD
    assert libc.ptrace(DETACH, pid, None, None) == 0


@pytest.mark.slow
def test_a_death_whose_signal_was_lost_is_seen_all_the_same() -> None:
    """The supervisor watches each rank's pidfd as well: nobody waits for ever."""
    with Session(2) as session:
        session.run("x = rank")
        seen = session.statistics()
        assert seen.supervisor_pid is not None
        assert seen.ranks[0].pid is not None
        with losing_the_next_signal(seen.supervisor_pid):
            os.kill(seen.ranks[0].pid, signal.SIGKILL)
        try:  # known to be dead, or found out in the middle of it
            result = session.run("all_reduce(rank)")
        except ParallelError as error:
            assert isinstance(error.errors[0], RankDiedError)  # noqa: PT017
            result = session.run("all_reduce(rank)")
        assert result.values == [1, 1]
