"""Ranks that die, stop, are interrupted or fail while large private arrays move, read in place or staged."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.collectives import direct, in_place
from nbparallel.distributed.runtime import fault_injection, peer_memory
from nbparallel.errors import CollectiveTimeoutError, NbParallelError, PeerFailedError
from nbparallel.testing.waiting import wait_until
from tests.harness.ranks import Running, context_of, parts_of

SIZE = 20_011
"""Elements: more than a slot holds."""
POINTS = [p for p in fault_injection.POINTS if p != "waiting"]
VICTIM = 2
"""The root: of the others not all bring something."""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in place what does not fit into a slot, in small steps; ranks are forked and inherit that."""
    for constant in [name for name in vars(in_place) if name.startswith("LEAST_")]:
        monkeypatch.setattr(in_place, constant, 0)
    monkeypatch.setattr(in_place, "BLOCK", 9_000)
    monkeypatch.setattr(in_place, "PIECE", 15_000)
    monkeypatch.setattr(direct, "PIECE", 32 << 10)


def call_of(c: Communicator, operation: str) -> tuple[Callable[[], None], list[np.ndarray[Any, Any]]]:
    """Return a call that compares what came, and the arrays that it is given."""
    me, n = c.rank, c.world_size
    x = np.empty(SIZE)
    out = [np.empty(SIZE) for _ in range(n)]
    part = np.array_split(x, n)[me].copy()

    def fill() -> None:
        x[...] = np.arange(SIZE) + me
        for array in out:
            array[...] = np.arange(SIZE) + me

    def check(found: Any, expected: Any) -> None:
        assert (found == np.arange(SIZE)[: found.size] * expected[0] + expected[1]).all()

    def reduction(call: Callable[[], Any], readers: tuple[int, ...]) -> None:
        fill()
        call()
        if me in readers:
            check(x, (n, sum(range(n))))

    def moved(call: Callable[[], Any], sources: tuple[int, ...]) -> None:
        fill()
        call()
        for source in sources:
            check(out[source], (1, source))

    values = [np.empty(SIZE) for _ in range(n)]
    for array in values:
        array[...] = np.arange(SIZE) + me
    everybody, root = tuple(range(n)), VICTIM
    calls: dict[str, Callable[[], None]] = {
        "all_reduce": lambda: reduction(lambda: c.all_reduce(x), everybody),
        "reduce": lambda: reduction(lambda: c.reduce(x, root), (root,)),
        "reduce_scatter": lambda: reduction(lambda: c.reduce_scatter(part, np.array_split(x, n)), ()),
        "all_gather": lambda: moved(lambda: c.all_gather(out, x), everybody),
        "gather": lambda: moved(
            lambda: c.gather(x, out if me == root else None, dst=root), everybody if me == root else ()
        ),
        "scatter": lambda: moved(
            lambda: c.scatter(out[root], values if me == root else None, src=root), (root,)
        ),
        "all_to_all": lambda: moved(lambda: c.all_to_all(out, values), everybody),
        "broadcast": lambda: moved(lambda: c.broadcast(out[root], src=root), (root,)),
    }
    return calls[operation], [x, part, *out, *values]


OPERATIONS = (
    "all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "scatter", "all_to_all", "broadcast",
)  # fmt: skip


def repeat(c: Communicator, operation: str, least: int = 0) -> Any:
    """Call until somebody fails; return whom that blames, and how many bytes were read in place."""
    call, arrays = call_of(c, operation)
    memory = context_of(c).peers.memory
    read, count = memory.read, [0]

    def counted(blocks: Any) -> Any:
        count[0] += sum(into.nbytes for _, _, into in blocks)
        return read(blocks)

    memory.read = counted  # type: ignore[method-assign]
    try:
        while not least or least > context_of(c).operations:
            call()
    except (NbParallelError, KeyboardInterrupt, fault_injection.FaultInjected) as error:
        for array in arrays:
            array[...] = -1
        time.sleep(0.02)  # late writers would show now
        assert all((array == -1).all() for array in arrays), "a late writer"
        if c.rank == VICTIM:
            raise
        return type(error).__name__, getattr(error, "rank", None), count[0]
    return "ended", None, count[0]


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.fault("F3")
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_point(outcomes: Any, monkeypatch: pytest.MonkeyPatch, operation: str, on: bool) -> None:
    """Kill -9, an interrupt, an error at every point: the others know who it was, and nobody writes late."""
    if not on:
        monkeypatch.setenv(peer_memory.OFF, "0")
    for turn, point in enumerate(POINTS):
        for action in ("kill", "interrupt", "raise"):
            nth = 30 + turn if point == "half_payload" else 4
            found = outcomes(3, lambda c: repeat(c, operation), faults=f"{point}:{VICTIM}:{nth}:{action}")
            if action == "kill":
                assert found[VICTIM].signal == signal.SIGKILL
            else:
                expected = KeyboardInterrupt if action == "interrupt" else fault_injection.FaultInjected
                assert isinstance(found[VICTIM].error, expected), found
            for rank in (0, 1):
                name, blamed, nbytes = found[rank].value
                assert (name, blamed) == ("PeerFailedError", VICTIM), (point, action, found)
                assert on or not nbytes
            if on and operation not in ("gather", "reduce"):
                assert any(found[rank].value[2] for rank in (0, 1)), (point, action, "nothing was read")


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.fault("F21")
@pytest.mark.time_limit(120)
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_stopped_and_continued(
    outcomes: Any, monkeypatch: pytest.MonkeyPatch, operation: str, on: bool
) -> None:
    """A rank that is stopped in the middle, and goes on, delays the others and changes nothing."""
    if not on:
        monkeypatch.setenv(peer_memory.OFF, "0")
    for point, nth in (("half_payload", 30), ("wrote_flag", 4), ("leave", 4)):
        stopped = [0.0]

        def meanwhile(running: Running, stopped: list[float] = stopped) -> bool:
            now = time.monotonic()
            if not stopped[0]:
                with open(f"/proc/{running.pids[VICTIM]}/stat") as file:
                    if file.read().rpartition(")")[2].split()[0] == "T":
                        stopped[0] = now
                return False
            if now - stopped[0] < 0.1:
                return False
            os.kill(running.pids[VICTIM], signal.SIGCONT)
            return True

        found = outcomes(
            3, lambda c: repeat(c, operation, 30), faults=f"{point}:{VICTIM}:{nth}:stop", meanwhile=meanwhile
        )
        assert [(o.error, o.value and o.value[0]) for o in found] == [(None, "ended")] * 3
        assert stopped[0], "nobody was stopped"


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
        steps = {"confirm": reading.confirm, "fetch": lambda: reading.fetch(1, bytes(8), np.empty(SIZE))}
        with pytest.raises(NbParallelError, match=r"rank 1 died: its process ended") as caught:
            steps[step]()
        assert peer_memory.refusal is None
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


@pytest.mark.fault("F3")
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
        for _ in range(200):
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
