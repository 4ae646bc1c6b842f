"""Locks between ranks: one holder at a time, in the order of calls, released and used as they should be."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import pytest

import nbparallel.distributed as dist
from nbparallel.distributed import Communicator
from nbparallel.errors import ForkedRankError
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.control_layout import LOCKS
from tests.distributed.slots.lock_states import numbers, waits
from tests.harness.ranks import context_of


def increment(shared: Any, times: int) -> None:
    """Count up in steps that another rank could come between."""
    for _ in range(times):
        with dist.lock("counter"):
            value = shared[0]
            shared[1] += 1
            shared[0] = value + 1


@pytest.mark.slow
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
        assert context_of(c).words[context_of(c).view.word(c.rank, LOCKS)] == 0

    ranks(2, work)


@pytest.mark.parametrize("how", ["release", "exit", "acquire"])
def test_a_forked_child_neither_holds_nor_releases(ranks: Any, how: str) -> None:
    """A lock is the rank's: its child leaves the block without a trace, and cannot take one."""

    def work(c: Communicator) -> None:
        with dist.lock("x") as lock:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                calls: dict[str, Any] = {"release": lock.release, "acquire": dist.lock("y").acquire}
                refused = False
                try:
                    calls.get(how, lambda: lock.__exit__(None, None, None))()
                except ForkedRankError:
                    refused = True
                finally:
                    os._exit(refused != (how == "acquire"))
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
