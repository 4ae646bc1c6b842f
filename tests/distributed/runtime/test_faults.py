"""Ranks that die or are interrupted at every point of every operation (F3, F21)."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.runtime import fault_injection
from nbparallel.errors import ForkedRankError, NbParallelError, PeerFailedError
from nbparallel.session.tasks.escalation import REPEAT_SECONDS
from tests.harness.ranks import RankOutcome, Running, context_of

SIZES = {"8 B": 1, "64 KiB": 8192, "16 MiB": 2 << 20}
PATIENCE = 5
"""How many times the promised 0.2 s a test allows: the promise is for a quiet machine, this one is shared."""


def work_all_reduce(c: Communicator, count: int, shared: bool, *, late: bool = False) -> Any:
    """Reduce until somebody fails; return who, when, and whether anybody wrote to the array afterwards."""
    x = context_of(c).store.empty(count) if shared else np.empty(count)
    pause = 0.02
    while True:
        x[...] = c.rank
        if late:
            time.sleep(pause)
            pause = min(2 * pause, 1.0)  # on a busy machine the others look for long before they sleep
        try:
            c.all_reduce(x)
        except NbParallelError as error:
            ended = time.monotonic_ns()
            x[...] = -1
            time.sleep(0.02)  # late writers would show now
            untouched = bool((x == -1).all())
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
        assert untouched, "somebody wrote into the array after the operation had failed"
        if died:
            assert "SIGKILL" in text
            assert ended - found[victim].death_ns < PATIENCE * 0.2e9


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.fault("F3")
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shared", [False, True])
def test_killed_inside_all_reduce(outcomes: Any, n: int, size: str, shared: bool) -> None:
    """Kill -9 at every fault point: all survivors raise PeerFailedError in 0.2 s, and nobody writes late."""
    points = [p for p in fault_injection.POINTS if p != "waiting"]  # that one has its own test
    for point, victim in itertools.product(points, {0, n - 1}):
        found = outcomes(
            n,
            lambda c: work_all_reduce(c, SIZES[size], shared),
            faults=f"{point}:{victim}:2:kill",
        )
        check(found, victim, died=True)


@pytest.mark.matrix(cover=())
@pytest.mark.fault("F3")
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("size", SIZES)
def test_killed_while_waiting(outcomes: Any, n: int, size: str) -> None:
    """A kill -9 of a rank that sleeps for a late one: everybody else is freed."""
    for shared, victim in itertools.product((False, True), {0, n - 1}):

        def work(c: Communicator, shared: bool = shared, victim: int = victim) -> Any:
            return work_all_reduce(c, SIZES[size], shared, late=c.rank == (victim + 1) % n)

        check(outcomes(n, work, faults=f"waiting:{victim}:1:kill"), victim, died=True)


@pytest.mark.matrix
@pytest.mark.fault("F3")
@pytest.mark.parametrize("point", [p for p in fault_injection.POINTS if p != "waiting"])
@pytest.mark.parametrize("size", SIZES)
def test_killed_inside_send(outcomes: Any, point: str, size: str) -> None:
    """Kill -9 of a sender at every point: the receiver gets the whole message or PeerFailedError."""

    def work(c: Communicator) -> Any:
        if c.rank == 0:
            while True:
                c.send(np.ones(SIZES[size]), 1)
                assert c.recv(src=1) == "next"
        try:
            while True:
                assert (c.recv(src=0) == 1).all()
                c.send("next", 0)
        except PeerFailedError as error:
            return error.rank
        except LookupError:
            return 0  # its memory went with it, between its last word and our fetch

    found = outcomes(2, work, faults=f"{point}:0:3:kill")
    assert found[0].signal == signal.SIGKILL
    assert found[1].error is None, found
    assert found[1].value == 0


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.fault("F21")
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("action", ["interrupt", "raise"])
def test_interrupted_inside_all_reduce(outcomes: Any, size: str, shared: bool, action: str) -> None:
    """SIGINT or an error at every fault point: that rank raises it, the others are freed."""
    points = [p for p in fault_injection.POINTS if p != "waiting"]
    for point, victim in itertools.product(points, (0, 2)):

        def work(c: Communicator, victim: int = victim) -> Any:
            x = context_of(c).store.empty(SIZES[size]) if shared else np.empty(SIZES[size])
            if c.rank != victim:
                return work_all_reduce(c, SIZES[size], shared)
            try:
                while True:
                    c.all_reduce(x)
            except (KeyboardInterrupt, fault_injection.FaultInjected):
                x[...] = -1
                time.sleep(0.05)
                assert (x == -1).all(), "a late writer"
                # "leave" lies behind the collective's end: nothing was broken then, so the cell has to end.
                raise

        found = outcomes(3, work, faults=f"{point}:{victim}:2:{action}")
        expected = KeyboardInterrupt if action == "interrupt" else fault_injection.FaultInjected
        assert isinstance(found[victim].error, expected), found
        check(found, victim, died=False)


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.fault("F21")
@pytest.mark.parametrize("what", ["recv", "recv any", "barrier", "all_reduce", "broadcast", "send"])
def test_every_rank_interrupted(outcomes: Any, what: str) -> None:
    """SIGINT to all ranks ends every wait in 0.5 s: by it, or because another rank was interrupted first."""

    def work(c: Communicator) -> Any:
        if c.rank == 0:
            time.sleep(0.4)
            c.recv(src=1, tag=99)
        calls = {
            "recv": lambda: c.recv(src=0), "recv any": c.recv, "barrier": c.barrier,
            "all_reduce": lambda: c.all_reduce(np.ones(9)), "broadcast": lambda: c.broadcast(None),
            "send": lambda: [c.send(np.ones(3000), 0) for _ in range(100)],
        }  # fmt: skip
        calls[what]()
        return None

    def meanwhile(running: Running) -> bool:
        if time.monotonic_ns() - running.started_ns < 0.2e9:
            return False
        for pid in running.pids:
            os.kill(pid, signal.SIGINT)
        return True

    begin = time.monotonic_ns()
    found = outcomes(3, work, meanwhile=meanwhile)
    assert any(isinstance(outcome.error, KeyboardInterrupt) for outcome in found), found
    for outcome in found:
        if not isinstance(outcome.error, KeyboardInterrupt):
            assert isinstance(outcome.error, PeerFailedError), outcome
            assert "was interrupted" in str(outcome.error), outcome
        assert outcome.error_ns - begin < 1.5e9


@pytest.mark.slow
@pytest.mark.fault("F21")
@pytest.mark.time_limit(60)
def test_interrupts_at_random_moments(outcomes: Any) -> None:
    """SIGINT at any bytecode leaves no rank in an operation: one raises it, the others are freed."""
    rng = np.random.default_rng(0)
    for _ in range(12):
        moment, victim = rng.uniform(0.03, 0.08), int(rng.integers(3))

        def work(c: Communicator) -> Any:
            x, y = np.ones(10), context_of(c).store.empty(200_000)
            y[...] = 1
            while True:
                c.all_reduce(x, "max")
                c.all_reduce(y, "max")
                c.send(x, (c.rank + 1) % 3)
                c.recv(src=(c.rank - 1) % 3)
                c.barrier()

        next_press = [moment * 1e9]

        def meanwhile(running: Running, next_press: list[float] = next_press, victim: int = victim) -> bool:
            if time.monotonic_ns() - running.started_ns >= next_press[0]:
                os.kill(running.pids[victim], signal.SIGINT)
                # Python drops what is raised in a `__del__`: as the notebook does, again as long as it runs
                next_press[0] += REPEAT_SECONDS * 1e9
            return False

        found = outcomes(3, work, meanwhile=meanwhile)
        assert isinstance(found[victim].error, KeyboardInterrupt), found
        for outcome in found:
            assert outcome.rank == victim or isinstance(outcome.error, PeerFailedError), outcome


@pytest.mark.slow
@pytest.mark.time_limit(60)
def test_no_late_writer(outcomes: Any) -> None:
    """A rank whose peer is stopped while it writes into others' arrays raises only after it was freed."""

    def work(c: Communicator) -> Any:
        x = context_of(c).store.empty(2 << 20)
        x[...] = 1
        begin = time.monotonic()
        try:
            while True:
                c.all_reduce(x, "max")
                if c.rank == 2:
                    raise ValueError("before the others arrive")
        except NbParallelError:
            x[...] = -1
            waited = time.monotonic() - begin
            time.sleep(0.1)
            assert (x == -1).all(), "a late writer"
            return waited

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

    # Rank 0 stops in the middle of writing; rank 1 is interrupted by nobody but fails with rank 2's death.
    def failing(c: Communicator) -> Any:
        if c.rank == 2:
            x = context_of(c).store.empty(2 << 20)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                while True:
                    c.all_reduce(x, "max")
            except KeyboardInterrupt:
                x[...] = -1
                time.sleep(0.1)
                assert (x == -1).all(), "a late writer"
                raise
        return work(c)

    found = outcomes(3, failing, faults="half_payload:0:2:stop", meanwhile=meanwhile)
    assert found[0].error is None, found
    assert found[1].error is None, found
    assert isinstance(found[2].error, KeyboardInterrupt), found
    assert found[1].value > 1.0, "it raised while rank 0 could still write"


def test_after_a_failure_the_epoch_is_void(outcomes: Any) -> None:
    """A failure that the program caught cannot be used on: every operation tells the first cause."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            raise ValueError("first")
        with pytest.raises(PeerFailedError, match="ValueError"):
            c.barrier()
        for call in (lambda: c.send(1, 0), lambda: c.recv(src=0), c.barrier, lambda: c.all_reduce(1)):
            with pytest.raises(PeerFailedError, match=r"until the next cell.*ValueError.*first"):
                call()
        assert c.failed

    assert [type(o.error) for o in outcomes(3, work)] == [ValueError, type(None), type(None)]


@pytest.mark.fault("F64")
def test_a_forked_child_is_inert(ranks: Any) -> None:
    """In a forked child every operation raises ForkedRankError; the rank itself goes on."""

    def work(c: Communicator) -> None:
        pid = os.fork()
        if pid == 0:
            refused = 0
            for call in (c.barrier, lambda: c.send(1, 0), lambda: c.recv(src=0), lambda: c.all_reduce(1)):
                try:
                    call()
                except ForkedRankError:
                    refused += 1
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
        assert c.all_reduce(1) == 2

    ranks(2, work)


@pytest.mark.fault("F65")
def test_threads_take_turns(ranks: Any) -> None:
    """A second thread inside an operation gets an error at once; one after the other is fine."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            errors: list[Exception] = []

            def other() -> None:
                try:
                    c.barrier()
                except RuntimeError as error:
                    errors.append(error)

            thread = threading.Timer(0.1, other)
            thread.start()
            assert c.recv(src=1) == "late"
            thread.join()
            assert "another thread" in str(errors[0])
        else:
            time.sleep(0.3)
            c.send("late", 0)
        result: list[int] = []
        thread = threading.Thread(target=lambda: result.append(c.all_reduce(1)))
        thread.start()
        thread.join()
        assert result == [2]

    ranks(2, work)


def test_outside_a_cell(ranks: Any) -> None:
    """Operations work only while a cell runs."""

    def work(c: Communicator) -> None:
        c.barrier()
        c.end_cell(None)
        with pytest.raises(RuntimeError, match="while a cell runs"):
            c.send(1, 0)

    ranks(2, work)
