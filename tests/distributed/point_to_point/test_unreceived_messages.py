"""What an operation leaves behind when it does not end as it should: nothing that misleads the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.testing.strategies import wait_until
from nbparallel.wire.control_layout import LEFT
from nbparallel.wire.inspection import MessageReport, SentMessage
from nbparallel.wire.messages import MessageSettlement
from tests.harness.ranks import context_of


@pytest.mark.fault("F35")
@pytest.mark.parametrize("kept", [(), (0,)])
def test_messages_of_an_ended_cell(ranks: Callable[..., list[Any]], kept: tuple[int, ...]) -> None:
    """They are dropped up to a position of the ring, or stay, queued or not; what was sent since is there."""

    def work(c: Communicator) -> Any:
        def end_cell(number: int) -> Any:
            c.finish_cell()
            c.end_cell(None)
            report = c.messages
            # as the kernel does: a cell begins when the last one has ended everywhere
            wait_until(lambda: words[context_of(c).view.word(1 - c.rank, LEFT)] >= number - 1)
            c.begin_cell(number, (0, 1), work.__code__.co_filename)
            return report

        line = work.__code__.co_firstlineno + 14
        words, tail = context_of(c).words, context_of(c).view.layout.tail_word(0, 1)
        if c.rank == 0:
            for tag in (5, 5, 7):
                c.send(np.zeros(3), 1, tag=tag)
            c.send("taken", 1)
        else:
            assert c.recv(src=0) == "taken"
        c.barrier()
        report = end_cell(2)
        alike = [SentMessage(0, 1, tag, line, False) for tag in (5, 7)]
        queued = tuple(zip(alike, (2, 1), strict=True))
        assert report == (MessageReport((), queued, ()) if c.rank else MessageReport((1,), (), ()))
        if c.rank == 0:
            c.recv(src=1)
            c.send("sent in the next cell", 1, tag=7)
        else:
            end = words[tail]
            c.send("go on", 0)
            wait_until(lambda: words[tail] != end)  # in no operation, which would take in what has come
            ended = ((0, end),)
            c.settle(MessageSettlement("In[1]", () if kept else ended, ended if kept else (), (), "; see"))
            if kept:
                assert c.recv(np.ones(3), src=0, tag=7) == 0
                assert c.recv(src=0, tag=5).tolist() == [0, 0, 0]
            assert c.recv(src=0, tag=7) == "sent in the next cell"
        c.barrier()
        report = end_cell(3)
        if kept:
            of_cell = [SentMessage(0, 1, tag, line, False, "In[1]") for tag in (5, 7)]
            left, late = ((of_cell[0], 1),), ((of_cell[1], 1), (of_cell[0], 1))
            assert report == (MessageReport((), left, late) if c.rank else MessageReport((1,), (), ()))
        else:
            assert report is None
        return end_cell(4) is None

    assert ranks(2, work) == [not kept] * 2


@pytest.mark.fault("F35")
def test_memory_of_messages_that_will_be_dropped(ranks: Callable[..., list[Any]]) -> None:
    """Their sender releases it when it is notified, whether or not the receiver has dropped them yet."""

    def work(c: Communicator) -> Any:
        def live() -> int:
            segments = context_of(c).store.segments(fetched=False)
            return sum(s.nbytes for s in segments if s.own and s.phase == "live")

        if c.rank == 0:
            c.send(np.ones(500_000), 1)
            before = live()
            c.settle(MessageSettlement("In[1]", (), (), (1,), ""))
            return before >= 4_000_000, live()
        return None

    assert ranks(2, work)[0] == (True, 0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [3, 3000])
def test_floating_point_errors_end_no_operation(ranks: Callable[..., list[Any]], count: int) -> None:
    """`numpy.seterr` on one rank changes nothing: all get the same result, and go on."""

    def work(c: Communicator) -> Any:
        x = np.full(count, 1e308)
        if c.rank == 0:
            np.seterr(all="raise")
        c.all_reduce(x)
        y = np.ones(count)
        c.all_reduce(y)
        return bool(np.isinf(x).all()), float(y[0])

    assert ranks(3, work) == [(True, 3.0)] * 3
