"""Who is woken by a message."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.runtime.waiting import rank_bit
from tests.harness.ranks import context_of

MESSAGES = 25
EARLY_SECONDS = 0.04
"""A sleep that nobody ends takes 0.05 s."""


def _watch(c: Communicator) -> list[bool]:
    """Return a list that grows by one entry for each sleep: whether something ended it before its time."""
    waiter, early = context_of(c).waiter, []

    def sleep(*args: Any, sleep: Callable[..., None] = waiter.futex_wait) -> None:
        began = time.monotonic()
        sleep(*args)
        early.append(time.monotonic() - began < EARLY_SECONDS)

    waiter.futex_wait = sleep  # type: ignore[method-assign]
    return early


@pytest.mark.alone
def test_a_message_wakes_its_receiver_only(ranks: Callable[..., list[Any]]) -> None:
    """Ranks that sleep for the same sender stay asleep, but for the one that gets something."""

    def function(c: Communicator) -> int:
        if c.rank == 2:
            early = _watch(c)
            assert c.recv(src=0) == "at last"
            return early.count(True)
        if c.rank == 1:
            for number in range(MESSAGES):
                assert c.recv(src=0) == number
                c.send(number, 0)
            return 0
        for number in range(MESSAGES):
            time.sleep(0.004)  # both sleep by now
            c.send(number, 1)
            assert c.recv(src=1) == number
        c.send("at last", 2)
        return 0

    early = ranks(3, function)[2]
    assert early < MESSAGES // 2, f"rank 2 was woken {early} times for {MESSAGES} messages to rank 1"


@pytest.mark.alone
def test_who_sleeps_is_woken_by_its_message(ranks: Callable[..., list[Any]]) -> None:
    """For one rank or for anybody: no wait lasts until a slice of the sleep has ended by itself."""

    def function(c: Communicator) -> list[bool]:
        early = _watch(c)
        if c.rank == 0:
            for number in range(MESSAGES):
                assert c.recv() == number
                time.sleep(0.004)  # rank 1 sleeps by now
                c.send(number, 1)
        elif c.rank == 1:
            for number in range(MESSAGES):
                time.sleep(0.004)
                c.send(number, 0)
                assert c.recv(src=0) == number
        return early

    for early in ranks(2, function):
        assert early.count(False) < MESSAGES // 2


def test_every_32nd_rank_shares_a_bit() -> None:
    """The word of the system call has 32 bits, and no sleeper has none."""
    assert len({rank_bit(rank) for rank in range(32)}) == 32
    assert rank_bit(33) == rank_bit(1) > 0
    assert max(map(rank_bit, range(256))) < 1 << 32
