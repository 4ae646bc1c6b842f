"""Ranks that die, are interrupted or fail inside each of the collectives (F3, F21, F30)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.runtime import peer_memory
from nbparallel.errors import NbParallelError, PeerFailedError
from tests.harness import fault_injection
from tests.harness.ranks import RankOutcome, Running, context_of

POINTS = [p for p in fault_injection.POINTS if p != "waiting"]
VICTIM = 2
"""The root: of the others not all bring something."""
READ_IN_PLACE = ("all_reduce", "reduce_scatter", "all_gather", "scatter", "all_to_all", "broadcast")
OPERATIONS = (*READ_IN_PLACE, "reduce", "gather", "group", "scan", "exscan", "maxloc")
WAYS = {"small": 9, "shared": 20_011, "read in place": 20_011, "copied": 20_011}
"""How arrays of so many elements travel, in small steps."""


def call_of(
    c: Communicator, operation: str, way: str
) -> tuple[Callable[[], None], list[np.ndarray[Any, Any]]]:
    """Return a call that compares what came, and the arrays that it is given."""
    me, n, root, size = c.rank, c.world_size, VICTIM, WAYS[way]
    make = context_of(c).store.empty if way == "shared" else np.empty
    group = c.new_group(range(n), tag="again")
    x, *arrays = (make(size) for _ in range(1 + 2 * n))
    out, values = arrays[:n], arrays[n:]
    part = np.array_split(x, n)[me].copy()

    def fill() -> None:
        for array in (x, *arrays):
            array[...] = np.arange(size) + me

    def combined(call: Callable[[], object], count: int) -> None:
        fill()
        call()
        assert not count or (x == np.arange(size) * count + sum(range(count))).all()

    def moved(call: Callable[[], object], sources: range) -> None:
        fill()
        call()
        assert all((out[source] == np.arange(size) + source).all() for source in sources)

    everybody, mine = range(n), me == root
    calls: dict[str, Callable[[], None]] = {
        "all_reduce": lambda: combined(lambda: c.all_reduce(x), n),
        "group": lambda: combined(lambda: c.all_reduce(x, group=group), n),
        "reduce": lambda: combined(lambda: c.reduce(x, root), n * mine),
        "scan": lambda: combined(lambda: c.scan(x), me + 1),
        "exscan": lambda: combined(lambda: c.exscan(x), me),
        "maxloc": lambda: combined(lambda: c.maxloc(x), 0),
        "reduce_scatter": lambda: combined(lambda: c.reduce_scatter(part, np.array_split(x, n)), 0),
        "all_gather": lambda: moved(lambda: c.all_gather(out, x), everybody),
        "gather": lambda: moved(
            lambda: c.gather(x, out if mine else None, dst=root), everybody if mine else range(0)
        ),
        "scatter": lambda: moved(
            lambda: c.scatter(out[root], values if mine else None, src=root), range(root, root + 1)
        ),
        "all_to_all": lambda: moved(lambda: c.all_to_all(out, values), everybody),
        "broadcast": lambda: moved(lambda: c.broadcast(out[root], src=root), range(root, root + 1)),
    }
    return calls[operation], [x, part, *arrays]


def repeat(c: Communicator, operation: str, way: str, victim: int = VICTIM) -> Any:
    """Call until somebody fails; return the error, when it came, and how many bytes were read in place."""
    call, arrays = call_of(c, operation, way)
    memory = context_of(c).peers.memory
    read, nbytes = memory.read, [0]

    def counted(blocks: Any) -> Any:
        nbytes[0] += sum(into.nbytes for _, _, into in blocks)
        return read(blocks)

    memory.read = counted  # type: ignore[method-assign]
    try:
        while True:
            call()
    except (NbParallelError, KeyboardInterrupt, fault_injection.FaultInjected) as error:
        ended = time.monotonic_ns()
        for array in arrays:
            array[...] = -1
        time.sleep(0.02)  # late writers would show now
        assert all((array == -1).all() for array in arrays), "a late writer"
        if c.rank == victim:
            raise
        return type(error).__name__, getattr(error, "rank", None), str(error), ended, nbytes[0]


def check(found: list[RankOutcome], victim: int, *, died: bool) -> None:
    """Assert that the survivors were freed in time, and know whom to blame."""
    for outcome in found:
        if outcome.rank == victim:
            assert not died or outcome.signal == signal.SIGKILL
            continue
        assert outcome.error is None, outcome
        name, blamed, text, ended, _ = outcome.value
        assert (name, blamed) == ("PeerFailedError", victim), outcome
        if died:
            assert "SIGKILL" in text
            assert ended - found[victim].death_ns < 1e9  # five times the promise: this machine is shared


@pytest.mark.slow
@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.fault("F3")
@pytest.mark.fault("F21")
@pytest.mark.time_limit(120)
@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_point(outcomes: Any, monkeypatch: pytest.MonkeyPatch, operation: str, way: str) -> None:
    """Kill -9, an interrupt, an error at every point: the others know who it was, and nobody writes late."""
    if way == "copied":
        monkeypatch.setenv(peer_memory.OFF, "0")
    for turn, point in enumerate(POINTS):
        for action, kind in (
            ("kill", None), ("interrupt", KeyboardInterrupt), ("raise", fault_injection.FaultInjected),
        ):  # fmt: skip
            nth = 30 + turn if point == "half_payload" else 4
            found = outcomes(
                3, lambda c: repeat(c, operation, way), faults=f"{point}:{VICTIM}:{nth}:{action}"
            )
            assert kind is None or isinstance(found[VICTIM].error, kind), found
            check(found, VICTIM, died=kind is None)
            nbytes = [found[rank].value[-1] for rank in (0, 1)]
            assert way != "copied" or not any(nbytes)
            if way == "read in place" and operation in READ_IN_PLACE:
                assert any(nbytes), (point, action, "nothing was read")


@pytest.mark.matrix(cover=(), size=4)
@pytest.mark.fault("F3")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_while_waiting(outcomes: Any, operation: str) -> None:
    """A kill -9 of a rank that sleeps for a late one: everybody else is freed."""

    def work(c: Communicator) -> Any:
        if c.rank == 2:
            time.sleep(0.1)
        return repeat(c, operation, "small", 1)

    check(outcomes(3, work, faults="waiting:1:1:kill"), 1, died=True)


@pytest.mark.slow
@pytest.mark.fault("F21")
def test_every_rank_interrupted(outcomes: Any) -> None:
    """SIGINT to all ranks ends every collective: by it, or because another rank was interrupted first."""
    for operation in OPERATIONS:

        def work(c: Communicator, operation: str = operation) -> None:
            call, _ = call_of(c, operation, "small")
            if c.rank == 0:
                c.recv(src=1, tag=99)
            call()

        def meanwhile(running: Running) -> bool:
            if time.monotonic_ns() - running.started_ns < 0.1e9:
                return False
            for pid in running.pids:
                os.kill(pid, signal.SIGINT)
            return True

        found = outcomes(3, work, meanwhile=meanwhile)
        assert any(isinstance(outcome.error, KeyboardInterrupt) for outcome in found), (operation, found)
        for outcome in found:
            if not isinstance(outcome.error, KeyboardInterrupt):
                assert isinstance(outcome.error, PeerFailedError), (operation, outcome)
                assert "was interrupted" in str(outcome.error), (operation, outcome)


def killed_at_random(outcomes: Any, seed: int, times: int) -> None:
    """Kill a random rank at a random moment of everything, again and again."""
    rng = np.random.default_rng(seed)
    for _ in range(times):
        moment, victim, n = rng.uniform(0.0, 0.06), int(rng.integers(3)), 3

        def work(c: Communicator, n: int = n) -> Any:
            small, shared, large = np.ones(10), context_of(c).store.empty(60_000), np.ones(300_000)
            shared[...] = 1
            try:
                while True:
                    for x in (small, shared, large):
                        c.all_reduce(x, "max")
                    c.send(small, (c.rank + 1) % n)
                    c.recv(src=(c.rank - 1) % n)
                    c.all_gather(small)
                    c.broadcast(large, src=1)
            except NbParallelError as error:
                return type(error).__name__, getattr(error, "rank", None), str(error)

        def meanwhile(running: Running, moment: float = moment, victim: int = victim) -> bool:
            if time.monotonic_ns() - running.started_ns < moment * 1e9:
                return False
            os.kill(running.pids[victim], signal.SIGKILL)
            return True

        for outcome in outcomes(n, work, meanwhile=meanwhile, seconds=120):
            if outcome.rank == victim:
                assert outcome.signal == signal.SIGKILL, outcome
                continue
            assert outcome.error is None, outcome
            name, blamed, text = outcome.value
            if name == "SegmentLostError":
                continue  # its memory went with it, between its last word and our fetch: nobody keeps it here
            assert (name, blamed) == ("PeerFailedError", victim), outcome
            assert "SIGKILL" in text


@pytest.mark.slow
@pytest.mark.fault("F3")
@pytest.mark.time_limit(600)
def test_killed_at_random_moments(outcomes: Any) -> None:
    """The others are freed and know who died, wherever it was."""
    killed_at_random(outcomes, 0, 10)


@pytest.mark.stress
@pytest.mark.once
@pytest.mark.time_limit(3600)
def test_killed_at_a_thousand_random_moments(outcomes: Any) -> None:
    """The same a thousand times."""
    killed_at_random(outcomes, 1, 1000)
