"""Ranks that die, are interrupted or fail inside each of the collectives (F3, F21, F30)."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.runtime import fault_injection
from nbparallel.errors import NbParallelError, PeerFailedError
from tests.harness.ranks import RankOutcome, Running, context_of

POINTS = [p for p in fault_injection.POINTS if p != "waiting"]
OPERATIONS = (
    "all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "scatter", "all_to_all", "group",
    "list", "broadcast", "scan", "exscan", "maxloc",
)  # fmt: skip
SIZES = {"8 B": 1, "4 MiB": 1 << 19}


def arrays(c: Communicator, count: int, shared: bool) -> list[np.ndarray[Any, Any]]:
    """Return an input and outputs for three ranks."""
    make = context_of(c).store.empty if shared else np.empty
    return [make(count) for _ in range(4)]


def call_of(c: Communicator, operation: str, x: list[Any]) -> Callable[[], Any]:
    """Return a call that all three ranks make."""
    group = c.new_group([0, 1, 2], tag="again")
    turns = itertools.count()  # of roots: not all points lie on the way of the others
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: c.all_reduce(x[0]),
        "reduce": lambda: c.reduce(x[0], 1),
        "reduce_scatter": lambda: c.reduce_scatter(x[0]),
        "all_gather": lambda: c.all_gather(x[0]),
        "gather": lambda: c.gather(x[0], dst=1),
        "scatter": lambda: c.scatter(x[1:] if c.rank == 1 else None, src=1),
        "all_to_all": lambda: c.all_to_all(x[1:]),
        "group": lambda: c.all_reduce(x[0], "max", group=group),
        "list": lambda: c.all_gather(x[1:], x[0]),
        "broadcast": lambda: c.broadcast(x[0], next(turns) % 3),
        "scan": lambda: c.scan(x[0], "max"),
        "exscan": lambda: c.exscan(x[0], "max"),
        "maxloc": lambda: c.maxloc(x[0]),
    }
    return calls[operation]


def repeat(c: Communicator, operation: str, count: int, shared: bool) -> Any:
    """Call until somebody fails; return whom that blames, when, and whether anybody wrote afterwards."""
    mine = arrays(c, count, shared)
    call = call_of(c, operation, mine)
    while True:
        for i, array in enumerate(mine):
            array[...] = c.rank + i
        try:
            call()
        except NbParallelError as error:
            ended = time.monotonic_ns()
            for array in mine:
                array[...] = -1
            time.sleep(0.02)  # late writers would show now
            untouched = all((array == -1).all() for array in mine)
            return type(error).__name__, getattr(error, "rank", None), ended, untouched, str(error)


def check(found: list[RankOutcome], victim: int, *, died: bool) -> None:
    """Assert that the survivors were freed in time, know whom to blame, and own their memory."""
    for outcome in found:
        if outcome.rank == victim:
            assert not died or outcome.signal == signal.SIGKILL
            continue
        assert outcome.error is None, outcome
        name, blamed, ended, untouched, text = outcome.value
        assert name == "PeerFailedError", outcome
        assert blamed == victim, outcome
        assert untouched, "somebody wrote into an array after the operation had failed"
        if died:
            assert "SIGKILL" in text
            assert ended - found[victim].death_ns < 1e9  # five times the promise: this machine is shared


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.fault("F3")
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed(outcomes: Any, operation: str) -> None:
    """Kill -9 at every fault point: all survivors raise PeerFailedError in time, and nobody writes late."""
    for turn, (point, size) in enumerate(itertools.product(POINTS, SIZES)):
        victim, shared = turn % 3, turn % 4 < 2
        found = outcomes(
            3,
            lambda c, size=size, shared=shared: repeat(c, operation, SIZES[size], shared),
            faults=f"{point}:{victim}:2:kill",
        )
        check(found, victim, died=True)


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.fault("F21")
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_interrupted(outcomes: Any, operation: str) -> None:
    """SIGINT or an error inside: that rank raises it and owns its memory, the others are freed."""
    for turn, (point, action) in enumerate(itertools.product(POINTS, ("interrupt", "raise"))):
        victim, shared, count = (turn + 1) % 3, turn % 4 < 2, list(SIZES.values())[turn % 2]

        def work(c: Communicator, victim: int = victim, shared: bool = shared, count: int = count) -> Any:
            if c.rank != victim:
                return repeat(c, operation, count, shared)
            mine = arrays(c, count, shared)
            call = call_of(c, operation, mine)
            try:
                while True:
                    call()
            except (KeyboardInterrupt, fault_injection.FaultInjected):
                for array in mine:
                    array[...] = -1
                time.sleep(0.02)
                assert all((array == -1).all() for array in mine), "a late writer"
                raise

        found = outcomes(3, work, faults=f"{point}:{victim}:2:{action}")
        expected = KeyboardInterrupt if action == "interrupt" else fault_injection.FaultInjected
        assert isinstance(found[victim].error, expected), found
        check(found, victim, died=False)


@pytest.mark.matrix(cover=(), size=4)
@pytest.mark.fault("F3")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_killed_while_waiting(outcomes: Any, operation: str) -> None:
    """A kill -9 of a rank that sleeps for a late one: everybody else is freed."""

    def work(c: Communicator) -> Any:
        if c.rank == 2:
            time.sleep(0.1)
        return repeat(c, operation, 1, shared=False)

    check(outcomes(3, work, faults="waiting:1:1:kill"), 1, died=True)


@pytest.mark.slow
@pytest.mark.fault("F21")
def test_every_rank_interrupted(outcomes: Any) -> None:
    """SIGINT to all ranks ends every collective: by it, or because another rank was interrupted first."""
    for operation in OPERATIONS:

        def work(c: Communicator, operation: str = operation) -> None:
            call = call_of(c, operation, arrays(c, 1, shared=False))
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


@pytest.mark.slow
@pytest.mark.fault("F3")
def test_no_late_writer_into_the_root(outcomes: Any) -> None:
    """A root of reduce that is interrupted raises only when no stopped peer can still write its part."""

    def work(c: Communicator) -> float:
        x = context_of(c).store.empty(2 << 20)
        x[...] = 1
        if c.rank == 0:
            try:
                while True:
                    c.reduce(x, 1, "max")
            except NbParallelError:
                return 0.0
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        begin = time.monotonic()
        try:
            while True:
                c.reduce(x, 1, "max")
        except KeyboardInterrupt:
            x[...] = -1
            waited = time.monotonic() - begin
            time.sleep(0.1)
            assert (x == -1).all(), "a late writer"
            if waited < 1:
                raise AssertionError("it raised while rank 0 could still write") from None
            raise

    state = {"stopped": 0.0}

    def meanwhile(running: Running) -> bool:
        now = time.monotonic()
        if not state["stopped"]:
            with open(f"/proc/{running.pids[0]}/stat") as file:
                if file.read().split()[2] == "T":
                    state["stopped"] = now
            return False
        if now - state["stopped"] < 1.3:
            return False
        os.kill(running.pids[0], signal.SIGCONT)
        return True

    found = outcomes(2, work, faults="half_payload:0:2:stop", meanwhile=meanwhile)
    assert isinstance(found[1].error, KeyboardInterrupt), found
    assert found[0].error is None, found


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
