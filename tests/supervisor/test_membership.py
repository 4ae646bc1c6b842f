"""The roll of a world that is being put together, and how strangers' exit statuses are learnt."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.worlds import World, exit_code_of
from nbparallel.wire.identity import Join, Process, process_of


def _join(rank: int, size: int = 3, versions: str = "1", cpus: tuple[int, ...] = (0,)) -> Join:
    return Join(rank, size, versions, cpus)


@given(st.permutations(range(5)))
def test_any_order_of_arrival_is_fine(order: list[int]) -> None:
    """The world is complete with the last rank, whoever that is; until then it says who is missing."""
    world = World()
    for count, rank in enumerate(order):
        assert not world.complete
        assert world.enter(_join(rank, 5, cpus=(rank // 2, 7)), Process(100 + rank, 1)) == ""
        for other in order[count + 1 :]:
            assert str(other) in world.missing or "-" in world.missing
    assert world.complete
    assert world.processes == tuple(Process(100 + rank, 1) for rank in range(5))
    assert world.cpus == 4  # 0, 1, 2 and 7: each counted once


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (_join(0), "rank 0 joined twice, as process 10 and as process 11"),
        (_join(1, 4), "rank 0 .process 10. has 3, rank 1 .process 11. has 4"),
        (_join(1, versions="2"), "not all run the same: rank 0 .process 10. 1, rank 1 .process 11. 2"),
        (_join(3), "process 11 joined as rank 3 of 3"),
        (_join(0, 5000), "process 11 joined as rank 0 of 5000"),
    ],
)
def test_those_who_do_not_fit_are_named(second: Join, said: str) -> None:
    """Both processes and what each says stand in the message, and nobody is counted twice."""
    world = World()
    assert world.enter(_join(0), Process(10, 1)) == ""
    problem = world.enter(second, Process(11, 1))
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(problem)
    assert not world.complete


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{}",
        b"[]",
        b"[1,2,3,4]",
        b'[true,2,"x",[]]',
        b'[-1,2,"x",[0]]',
        b'[0,2,"x",["a"]]',
        rb'[0,2,"\ud800",[0]]',
        b"\xff",
        b"[1.5",
    ],
)
def test_a_damaged_join_is_refused(payload: bytes) -> None:
    """Nothing but a complete JOIN gets to the roll."""
    with pytest.raises(ProtocolError):
        Join.unpack(payload)


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize(("code", "found"), [("sys.exit(5)", 5), ("os.kill(0, 9)", -9)])
def test_how_a_stranger_ended(reaped: bool, code: str, found: int | None) -> None:
    """Exit code and signal are known before its parent has waited; after that, if the system tells."""
    argv = [sys.executable, "-S", "-c", f"import os, sys; sys.stdin.read(); {code}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True) as popen:
        pidfd, process = os.pidfd_open(popen.pid), process_of(popen.pid)
        try:
            assert popen.stdin is not None
            popen.stdin.close()
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            assert poll.poll(30_000)
            if reaped:
                popen.wait()
                found = found if _tells_afterwards() else None
            assert exit_code_of(pidfd, process) == found
        finally:
            os.close(pidfd)
            popen.wait()


def _tells_afterwards() -> bool:
    version = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    return version >= (6, 15)
