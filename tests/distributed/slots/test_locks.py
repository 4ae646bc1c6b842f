"""Locks between ranks: one holder, in order, released whatever becomes of it, never waited for in vain."""

from __future__ import annotations

import mmap
import os
import signal
import time
import warnings
from typing import Any

import numpy as np
import pytest

import nbparallel.distributed as dist
from nbparallel.distributed import Communicator
from nbparallel.errors import CollectiveTimeoutError, DeadlockError, ForkedRankError, PeerFailedError
from nbparallel.testing.ranks import Running, context_of
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.control import ControlView, Operation, State


def numbers(count: int = 64) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return numbers that ranks forked later share, writable."""
    return np.frombuffer(mmap.mmap(-1, count * 8), np.int64)


def waits(c: Communicator, rank: int, operation: Operation = Operation.lock) -> bool:
    """Whether a rank sleeps in an operation."""
    record = context_of(c).view.read_slot(rank)
    return record.state is State.WAITING and record.operation is operation


def increment(shared: Any, times: int) -> None:
    """Count up in steps that another rank could come between."""
    for _ in range(times):
        with dist.lock("counter"):
            value = shared[0]
            shared[1] += 1
            shared[0] = value + 1


@pytest.mark.parametrize(("n", "cpus"), [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2)])
def test_one_rank_at_a_time(ranks: Any, n: int, cpus: int) -> None:
    """Every increment of all ranks counts, whether ranks spin or sleep while they wait."""
    shared, times = numbers(), 300

    def work(c: Communicator) -> list[int]:
        c.barrier()
        increment(shared, times)
        c.barrier()
        return [int(shared[0]), int(shared[1])]

    assert ranks(n, work, usable_cpus=cpus) == [[n * times] * 2] * n


def test_without_it_increments_are_lost(ranks: Any) -> None:
    """The test above would notice: two ranks that read the same number write the same one."""
    shared = numbers()

    def work(c: Communicator) -> int:
        value = shared[0]
        c.barrier()
        shared[0] = value + 1
        c.barrier()
        return int(shared[0])

    assert ranks(2, work) == [1, 1]


def test_first_come_first_served(ranks: Any) -> None:
    """Ranks get the lock in the order in which they called, and again if they call again."""
    shared = numbers()

    def work(c: Communicator) -> list[int]:
        lock = dist.lock("queue")
        if c.rank == 0:
            with lock:
                for rank in (3, 1, 2):
                    c.send("go", rank)
                    wait_until(lambda rank=rank: waits(c, rank))  # type: ignore[misc]
        else:
            c.recv(src=0)
            for _ in range(2):
                with lock:
                    shared[1 + shared[0]] = c.rank
                    shared[0] += 1
                    time.sleep(0.02)  # long enough for the one before to call again
        c.barrier()
        return shared[1:7].tolist()

    assert ranks(4, work) == [[3, 1, 2, 3, 1, 2]] * 4


@pytest.mark.fault("F34")
def test_a_holder_that_waits_for_a_waiter_is_a_deadlock(outcomes: Any) -> None:
    """Found within two seconds on both, with the lines of the lock and of the call; a third rank goes on."""

    def work(c: Communicator) -> tuple[str, float]:
        pair = c.new_group([0, 1])
        begin = time.monotonic()
        if c.rank == 2:
            return "", 0.0
        try:
            if c.rank == 0:
                with dist.lock("a'b"):
                    c.barrier(pair)
            wait_until(lambda: waits(c, 0, Operation.new_group) or waits(c, 0, Operation.barrier))
            with dist.lock("a'b"):
                c.barrier(pair)
        except DeadlockError as error:
            return str(error), time.monotonic() - begin
        return "", 0.0

    line = work.__code__.co_firstlineno
    found = outcomes(3, work)
    for outcome in found[:2]:
        assert outcome.error is None, outcome
        text, seconds = outcome.value
        held = f'rank 1 waits in lock("a\'b") (line {line + 10}), which rank 0 holds since line {line + 7}'
        assert held in text
        assert "rank 0 waits in" in text
        assert seconds < 2.5


@pytest.mark.fault("F34")
def test_two_locks_in_different_order_are_a_deadlock(outcomes: Any) -> None:
    """Each rank holds what the other wants: both raise, though the first that does releases its lock."""

    def work(c: Communicator) -> str:
        mine, other = ("a", "b") if c.rank == 0 else ("b", "a")
        try:
            with dist.lock(mine):
                c.barrier()
                with dist.lock(other):
                    return ""
        except DeadlockError as error:
            assert not context_of(c).view.read_locks(c.rank)
            return str(error)

    for outcome in outcomes(2, work):
        assert outcome.error is None, outcome
        assert "rank 0 waits in lock('b')" in outcome.value
        assert "rank 1 waits in lock('a')" in outcome.value


@pytest.mark.slow
@pytest.mark.fault("F34")
def test_a_slow_holder_is_no_deadlock(ranks: Any) -> None:
    """A rank that computes with the lock held is waited for, by several ranks in a row."""

    def work(c: Communicator) -> None:
        with dist.lock("slow"):
            time.sleep(0.5)

    ranks(3, work)


def test_a_time_out_names_the_holder(ranks: Any) -> None:
    """It leaves the queue, so that ranks behind it are not kept; and the next call works."""

    def work(c: Communicator) -> None:
        first = dist.lock("t")
        line = 0
        if c.rank == 0:
            line = work.__code__.co_firstlineno + 5
            with first:
                c.send(line, 1)
                c.send(line, 2)
                c.recv(src=1)
        elif c.rank == 1:
            line = c.recv(src=0)
            for seconds in (0, 0.1):
                with pytest.raises(CollectiveTimeoutError, match=rf"rank 0 holds it since line {line}"):
                    dist.lock("t", timeout=seconds).acquire()
                assert not context_of(c).view.read_locks(1)
            wait_until(lambda: waits(c, 2))
            with pytest.raises(CollectiveTimeoutError, match="rank 0 holds it"):
                dist.lock("t", timeout=0.2).acquire()
            c.send("go", 0)
            with first:
                pass
        else:
            c.recv(src=0)
            with first:
                pass
        c.barrier()

    ranks(3, work)


def test_wrong_uses_raise_on_the_caller(ranks: Any) -> None:
    """Twice the same, too many, a release of what is not held: RuntimeError, and everything else works."""

    def work(c: Communicator) -> None:
        line = work.__code__.co_firstlineno + 2
        with dist.lock("x") as lock:
            with pytest.raises(
                RuntimeError, match=f"'x' already since line {line}, and cannot take it twice"
            ):
                dist.lock("x").acquire()
            names = [f"{c.rank} {i}" for i in range(9)]
            assert all(dist.lock(name).acquire() for name in names)
            with pytest.raises(RuntimeError, match="at most 10 locks"):
                dist.lock("y").acquire()
            for name in reversed(names):
                dist.lock(name).release()
            with pytest.raises(RuntimeError, match="does not hold the lock 'y'"):
                dist.lock("y").release()
            assert repr(lock) == "<NamedLock 'x'>"
        with pytest.raises(RuntimeError, match="does not hold"):
            lock.release()
        with lock, dist.lock("y"):
            pass
        assert c.all_reduce(1) == 2
        assert context_of(c).words[context_of(c).view.word_locks(c.rank)] == 0

    ranks(2, work)


def test_names_are_apart_and_released_in_any_order(ranks: Any) -> None:
    """Locks of different names do not keep each other, however their holds overlap."""

    def work(c: Communicator) -> None:
        one, other, third = (dist.lock(f"{name}{c.rank}") for name in "abc")
        one.acquire(), other.acquire()
        c.barrier()
        one.release()
        third.acquire()
        c.barrier()
        other.release(), third.release()
        with dist.lock("a0"), dist.lock("b1"), dist.lock("ä\ud800"):
            pass

    ranks(2, work)


@pytest.mark.fault("F39")
def test_a_dead_holder_in_a_cell_that_stops(outcomes: Any) -> None:
    """The ranks that wait raise PeerFailedError in time, and the lock stays abandoned for the next epoch."""

    def work(c: Communicator) -> Any:
        if c.rank == 0:
            with dist.lock("x"):
                wait_until(lambda: waits(c, 1) and waits(c, 2))
                os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: bool(context_of(c).view.read_locks(0)))
        if c.rank == 3:  # it comes when no rank waits any more, and may not get the lock either
            wait_until(lambda: bool(context_of(c).words[context_of(c).view.word_death(0)]))
            wait_until(lambda: not any(context_of(c).view.read_locks(r) for r in (1, 2)))
        try:
            dist.lock("x").acquire()
        except PeerFailedError as error:
            abandoned = context_of(c).view.abandoned_locks()
            return error.rank, time.monotonic_ns(), [(lock.rank, lock.line) for lock in abandoned]
        return None

    found = outcomes(4, work)
    line = work.__code__.co_firstlineno + 2
    for outcome in found[1:]:
        assert outcome.error is None, outcome
        rank, ended, abandoned = outcome.value
        assert (rank, abandoned) == (0, [(0, line)])
        assert ended - found[0].death_ns < 1e9


@pytest.mark.fault("F39")
def test_a_dead_holder_in_a_cell_that_goes_on(outcomes: Any) -> None:
    """The next rank gets the lock with a warning that names the dead one; the ranks behind get none."""

    def work(c: Communicator) -> Any:
        context_of(c).cell.go_on = True
        if c.rank == 0:
            with dist.lock("x"):
                wait_until(lambda: waits(c, 1) and waits(c, 2))
                os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: bool(context_of(c).view.read_locks(0)))
        found = []
        for _ in range(3):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                with dist.lock("x") as lock:
                    found.append((lock.abandoned, [(str(w.message), w.filename) for w in seen]))
        return found

    outcome = outcomes(3, work)
    assert [outcome[1].error, outcome[2].error] == [None, None], outcome
    got = [entry for rank in (1, 2) for entry in outcome[rank].value if entry != ((), [])]
    line = work.__code__.co_firstlineno + 3
    ((abandoned, ((text, filename),)),) = got
    assert abandoned == (0,)
    assert f"'x' was held by rank 0, which took it on line {line}, and died" in text
    assert filename == __file__


def test_a_dead_rank_that_only_waited_abandons_nothing(outcomes: Any) -> None:
    """Its place in the queue is skipped, and no rank is warned."""

    def work(c: Communicator) -> Any:
        context_of(c).cell.go_on = True
        if c.rank == 2:
            wait_until(lambda: waits(c, 1))
            os.kill(c.recv(src=1, tag=1), signal.SIGKILL)
            with dist.lock("x") as lock:
                return lock.abandoned
        if c.rank == 0:
            with dist.lock("x"):
                wait_until(lambda: waits(c, 1))
                wait_until(lambda: bool(context_of(c).words[context_of(c).view.word_death(1)]))
                wait_until(lambda: waits(c, 2))
            return ()
        wait_until(lambda: bool(context_of(c).view.read_locks(0)))
        c.send(os.getpid(), 2, tag=1)
        dist.lock("x").acquire()
        return None

    found = outcomes(3, work)
    assert found[1].signal == signal.SIGKILL
    assert [found[r].value for r in (0, 2)] == [(), ()], found


def test_a_warning_made_an_error_releases_the_lock(outcomes: Any) -> None:
    """With such a filter the next holder raises instead, and does not hold it."""

    def work(c: Communicator) -> Any:
        context_of(c).cell.go_on = True
        if c.rank == 0:
            dist.lock("x").acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        wait_until(lambda: bool(context_of(c).words[context_of(c).view.word_death(0)]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning, match="half changed"):
                dist.lock("x").acquire()
            return dist.lock("x").acquire()

    found = outcomes(2, work)
    assert (found[1].error, found[1].value) == (None, True), found


@pytest.mark.fault("F21")
def test_interrupted_while_it_waits(outcomes: Any) -> None:
    """KeyboardInterrupt there; it leaves the queue, and the holder's next operation raises."""

    def work(c: Communicator) -> Any:
        if c.rank == 0:
            with dist.lock("x"):
                wait_until(lambda: bool(context_of(c).words[context_of(c).view.word_failed(1)]))
                assert not context_of(c).view.read_locks(1)
            c.barrier()
        wait_until(lambda: bool(context_of(c).view.read_locks(0)))
        dist.lock("x").acquire()
        return None

    def meanwhile(running: Running) -> bool:
        record = running.view.read_slot(1)
        if record.operation is not Operation.lock or record.state is not State.WAITING:
            return False
        os.kill(running.pids[1], signal.SIGINT)
        return True

    found = outcomes(2, work, meanwhile=meanwhile)
    assert isinstance(found[1].error, KeyboardInterrupt), found
    assert isinstance(found[0].error, PeerFailedError), found


@pytest.mark.fault("F21")
def test_an_exception_inside_releases_it(outcomes: Any) -> None:
    """With the cell going on the next rank gets the lock, without a warning: its holder could repair."""

    def work(c: Communicator) -> Any:
        context_of(c).cell.go_on = True
        if c.rank == 0:
            with dist.lock("x"):
                wait_until(lambda: waits(c, 1))
                raise ValueError("mine")
        wait_until(lambda: bool(context_of(c).view.read_locks(0)))
        with dist.lock("x") as lock:
            return lock.abandoned

    found = outcomes(2, work)
    assert isinstance(found[0].error, ValueError)
    assert (found[1].error, found[1].value) == (None, ()), found


def test_a_failure_inside_does_not_end_the_wait_of_a_cell_that_goes_on(ranks: Any) -> None:
    """The failed holder has recorded its failure, and still holds the lock for a while."""

    def work(c: Communicator) -> Any:
        context_of(c).cell.go_on = True
        if c.rank == 0:
            with dist.lock("x"):
                wait_until(lambda: waits(c, 1))
                with pytest.raises(CollectiveTimeoutError):
                    c.barrier(timeout=0.1)
                time.sleep(0.3)  # several slices of the other's wait
            return True
        wait_until(lambda: bool(context_of(c).view.read_locks(0)))
        with dist.lock("x"):
            return bool(context_of(c).words[context_of(c).view.word_failed(0)])

    assert ranks(2, work) == [True, True]


@pytest.mark.parametrize("how", ["release", "exit", "acquire"])
def test_a_forked_child_neither_holds_nor_releases(ranks: Any, how: str) -> None:
    """A lock is the rank's: its child leaves the block without a trace, and cannot take one."""

    def work(c: Communicator) -> None:
        with dist.lock("x") as lock:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    if how == "acquire":
                        try:
                            dist.lock("y").acquire()
                        except ForkedRankError:
                            code = 0
                    elif how == "release":
                        lock.release()
                        code = 0
                    else:
                        lock.__exit__(None, None, None)
                        code = 0
                finally:
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
            assert status == 0
            assert [entry.held for entry in context_of(c).view.read_locks(0)] == [True]
        assert not context_of(c).view.read_locks(0)

    ranks(1, work)


def test_what_is_held_at_the_end_is_released_and_reported(ranks: Any) -> None:
    """Before the cell waits for other ranks, of which one may wait for that lock."""

    def work(c: Communicator) -> Any:
        if c.rank == 0:
            dist.lock("x").acquire()
            begun = c.all_reduce(1, async_op=True)
            wait_until(lambda: waits(c, 1))
            del begun
            c.finish_cell()
            return c.unreleased
        wait_until(lambda: bool(context_of(c).view.read_locks(0)))
        with dist.lock("x"):
            return c.all_reduce(1, async_op=True).result()

    line = work.__code__.co_firstlineno + 2
    reported, total = ranks(2, work)
    assert reported == [
        f"the lock 'x' since line {line} was not released, and is now, at the end of the cell; "
        "`with dist.lock('x'):` releases it by itself"
    ]
    assert total == 2


@pytest.mark.slow
@pytest.mark.fault("F39")
@pytest.mark.time_limit(120)
def test_holders_killed_at_random_moments(outcomes: Any) -> None:
    """The others go on counting, whoever dies wherever: one holder at a time, and no wait without an end."""
    rng = np.random.default_rng(5)
    for _ in range(15):
        shared = numbers()
        moment, victim = float(rng.uniform(0.0, 0.05)), int(rng.integers(3))

        def work(c: Communicator, shared: Any = shared) -> int:
            context_of(c).cell.go_on = True
            warnings.simplefilter("ignore")
            end = time.monotonic() + 0.15
            while True:
                with dist.lock("x"):
                    shared[0] = c.rank
                    shared[1 + c.rank] += 1
                    assert shared[0] == c.rank
                if time.monotonic() > end:
                    return int(shared[1 + c.rank])

        def meanwhile(running: Running, moment: float = moment, victim: int = victim) -> bool:
            if time.monotonic_ns() - running.started_ns < moment * 1e9:
                return False
            os.kill(running.pids[victim], signal.SIGKILL)
            return True

        for outcome in outcomes(3, work, meanwhile=meanwhile):
            assert outcome.error is None, outcome
            assert outcome.signal == signal.SIGKILL or outcome.value > 0
            assert outcome.signal is None or outcome.rank == victim


def test_abandoned_locks_move_into_the_next_epoch() -> None:
    """What no rank has learned is kept, also over two epochs; what one has learned is not."""
    from nbparallel.wire import control, control_layout
    from nbparallel.wire.control_layout import ABANDONED_ENTRIES, AbandonedLock, keep_locks

    def segment() -> ControlView:
        fd = control.create(3, 1)
        try:
            return ControlView(fd)
        finally:
            os.close(fd)

    with segment() as first, segment() as second:
        for rank in (0, 1):
            w = first.word_locks(rank)
            first.words[w], first.words[w + 1], first.words[w + 2] = 1, 77 + rank, 2
            first.words[w + 3] = 5 << 2 | 1
        assert first.abandoned_locks() == []
        first.write_death(0, signal=9)
        first.write_death(1, signal=9)
        kept = first.abandoned_locks()
        assert [(lock.name, lock.rank, lock.line) for lock in kept] == [(77, 0, 5), (78, 1, 5)]
        keep_locks(second.words, kept)
        again = second.abandoned_locks()
        assert [(lock.name, lock.rank, lock.line) for lock in again] == [(77, 0, 5), (78, 1, 5)]
        w = second.word_locks(2)
        second.words[w], second.words[w + 1], second.words[w + 3] = 1, 77, again[0].number << 2 | 2
        assert second.abandoned_locks() == again[1:]
        keep_locks(second.words, [AbandonedLock(n, 0, 0, 0) for n in range(1, 200)])
        assert second.words[control_layout.ABANDONED] == ABANDONED_ENTRIES
        assert [lock.name for lock in second.abandoned_locks()] == list(range(200 - ABANDONED_ENTRIES, 200))
