"""A signal handler of the user's that raises, at every instruction of a lock, leaves none behind."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

import pytest

import nbparallel.distributed as dist
from nbparallel.distributed import Communicator
from nbparallel.distributed.api import locks
from nbparallel.distributed.runtime import failures, rank_context, waiting
from nbparallel.distributed.slots import lock_table
from nbparallel.errors import CollectiveTimeoutError
from tests.faults.interrupts.instruction_signals import InstructionSignals
from tests.harness.ranks import context_of

FILES = {module.__file__ for module in (failures, lock_table, locks, rank_context, waiting)}


class HandlerError(Exception):
    """What the handler raises."""


def _raise(*_: object) -> None:
    raise HandlerError("a handler of the user's")


def instruction_signals(*at: int) -> InstructionSignals:
    """Return what sends SIGUSR2 to this thread at given instructions of the lock's files."""
    return InstructionSignals(FILES, signal.SIGUSR2, *at)


def take(lock: Any) -> None:
    """Take a lock and release it."""
    with lock:
        pass


def runs(c: Communicator, function: Callable[[], object], *at: int) -> int:
    """Run `function` with signals; return how many instructions there were, and check the locks."""
    sent = instruction_signals(*at)
    with contextlib.suppress(HandlerError):
        sent.run(function)
    context = context_of(c)
    assert not context.view.read_locks(c.rank), f"held after a signal at instructions {at}"
    assert c.all_reduce(1) == c.world_size
    with dist.lock("x"):
        pass
    return sent.count


@pytest.mark.time_limit(120)
def test_a_handler_that_raises_at_any_instruction(ranks: Any) -> None:
    """The lock is free afterwards, and the next operation works."""

    def work(c: Communicator) -> None:
        signal.signal(signal.SIGUSR2, _raise)

        def block() -> None:
            take(dist.lock("x"))

        count = runs(c, block)
        assert count > 100
        for number in range(1, count + 1):
            runs(c, block, number)

    ranks(1, work, seconds=60)


def runs_failing(c: Communicator, function: Callable[[], object], *at: int) -> int:
    """As `runs`, of a lock that this rank cannot get."""
    sent = instruction_signals(*at)
    with contextlib.suppress(HandlerError):
        sent.run(function)
    assert not context_of(c).view.read_locks(c.rank), f"in the queue after a signal at instructions {at}"
    with pytest.raises(CollectiveTimeoutError):
        take(dist.lock("x", timeout=0))
    return sent.count


@pytest.mark.slow
@pytest.mark.time_limit(120)
def test_a_handler_that_raises_while_an_operation_fails(ranks: Any) -> None:
    """At most the operation is not tried again in this cell: none is "inside an operation already"."""

    def work(c: Communicator) -> None:
        if c.rank:
            with dist.lock("x"):
                c.send(0, 0)
                c.recv(src=0)
            return
        c.recv(src=1)
        signal.signal(signal.SIGUSR2, _raise)

        def block() -> None:
            with pytest.raises(CollectiveTimeoutError):
                take(dist.lock("x", timeout=0))

        count = runs_failing(c, block)
        assert count > 100
        for number in range(1, count + 1):
            runs_failing(c, block, number)
        c.send(0, 1)

    ranks(2, work, seconds=60, usable_cpus=1)  # with more it would spin, and never the same
