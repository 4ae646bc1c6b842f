"""Ranks that die or come late while others read large private arrays where they lie."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.runtime import peer_memory
from nbparallel.errors import CollectiveTimeoutError, NbParallelError, PeerFailedError
from nbparallel.testing.waiting import wait_until
from tests.harness.ranks import context_of, parts_of

pytestmark = pytest.mark.usefixtures("small_steps")
SIZE = 20_011
"""Elements: more than a slot holds."""


@pytest.mark.slow
@pytest.mark.fault("F3")
@pytest.mark.parametrize("step", ["confirm", "fetch"])
def test_a_death_that_is_not_recorded_yet(outcomes: Any, step: str) -> None:
    """What was read of a rank whose process has ended is not used, before anybody has recorded its death.

    Nor is the rank blamed that could not read it, and others are read as before.
    """

    def work(c: Communicator) -> Any:
        context, memory = context_of(c), context_of(c).peers.memory
        x = np.ones(SIZE)
        c.all_reduce(x)
        if c.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: memory.ended([1]) is not None)
        assert memory.ended([2]) is None
        reading, context.open = parts_of(c).collectives.in_place, 1
        steps = {"confirm": reading.confirm, "fetch": lambda: reading.fetch(1, 0, np.empty(SIZE))}
        with pytest.raises(NbParallelError, match=r"rank 1 died: its process ended") as caught:
            steps[step]()
        assert not peer_memory.refused
        return getattr(caught.value, "rank", None)

    found = outcomes(2, work, write_deaths=False)
    assert found[0].value == 1, found


@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_time_runs_out_for_an_array_that_nobody_reads(outcomes: Any, operation: str) -> None:
    """The error says so: all have arrived.  What the late reader gets after that does not count."""

    def work(c: Communicator) -> None:
        memory, x = context_of(c).peers.memory, np.ones(SIZE)
        several = [np.ones(SIZE) for _ in range(2)] if c.rank == 0 else None
        source = 1 if operation == "gather" else 0
        read = memory.read

        def late(blocks: Any) -> Any:
            wait_until(lambda: context_of(c).peers.has_failed(source), seconds=10)
            return read(blocks)

        def move(timeout: float | None = None) -> None:
            if operation == "gather":
                c.gather(x, several, timeout=timeout)
            else:
                c.scatter(x, several, timeout=timeout)

        for _ in range(3):
            move()
        memory.read = late  # type: ignore[method-assign]
        move(0.2 if c.rank == source else None)

    found = outcomes(2, work)
    source = 1 if operation == "gather" else 0
    late = found[source].error
    assert isinstance(late, CollectiveTimeoutError)
    assert str(late).endswith(f"rank {1 - source} did not read what this rank brought"), late
    assert isinstance(found[1 - source].error, PeerFailedError), found


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["broadcast", "scatter"])
def test_a_member_that_has_ended_behind_the_call(outcomes: Any, operation: str) -> None:
    """Only those that were read of have to live until then: others may have ended, as a script's ranks do."""

    def work(c: Communicator) -> str:
        memory = context_of(c).peers.memory
        read = memory.read
        c.all_reduce(np.ones(SIZE))  # so that all know all others' processes

        def move() -> None:
            out = np.full(SIZE, float(c.rank))
            if operation == "broadcast":
                c.broadcast(out)
            else:
                c.scatter(out, [np.zeros(SIZE)] * 3 if c.rank == 0 else None)
            assert not out.any()

        def late(blocks: Any) -> Any:
            wait_until(lambda: memory.ended([1]) is not None)
            return read(blocks)

        move()
        move()
        if c.rank == 2:
            memory.read = late  # type: ignore[method-assign]
        move()
        if c.rank == 1:
            c.finish_cell()
            c.end_cell(None)
            os._exit(0)
        return "moved"

    found = outcomes(3, work, write_deaths=False)
    assert [(found[i].error, found[i].value) for i in (0, 2)] == [(None, "moved")] * 2, found


@pytest.mark.slow
@pytest.mark.fault("F18")
def test_a_process_id_that_is_used_again(tmp_path: Any) -> None:
    """The memory of another process under the number of a dead rank is never taken for that rank's."""
    last = "/proc/sys/kernel/ns_last_pid"
    if not os.access(last, os.W_OK):
        pytest.skip("only root can choose a process id")
    from tests.harness.ranks import run_ranks

    def work(c: Communicator) -> str:
        memory = context_of(c).peers.memory
        x = np.ones(SIZE)
        c.all_reduce(x)
        pid = memory.pids[1 - c.rank]
        if c.rank == 1:
            (tmp_path / "address").write_text(str(memory.address(x)))
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), "the test's process has not reaped it")
        address = int((tmp_path / "address").read_text())
        for _ in range(40):  # each fork takes up to 0.1 s beside other work
            with open(last, "w") as file:
                file.write(str(pid - 1))
            other = os.fork()
            if other == 0:
                signal.pause()
            if other == pid:
                break
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
        else:
            return "not used again"
        try:
            found = np.zeros(8)
            error = memory.read([(1, address, found)])
            assert error is None, "this rank's forked child has memory at that address"
            assert memory.ended([1]) == 1, "and yet it is known not to be rank 1"
            del memory.pids[1], memory.pidfds[1]
            assert memory.probe(1) is not None, "nor would it have been taken for it"
        finally:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
        return "used again"

    found = run_ranks(2, work)
    assert found[0].error is None, found[0].error
    if found[0].value == "not used again":
        pytest.skip("the system gave the number to nobody")
    assert found[0].value == "used again"
