"""Short arrays take a quick way between two ranks; whatever is not usual takes the other one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.point_to_point.endpoints import Receiver, Sender
from nbparallel.errors import CollectiveMismatchError
from nbparallel.testing.waiting import wait_until
from tests.harness.ranks import parts_of


def count(monkeypatch: Any, name: str) -> list[bool]:
    """Return a list to which every call of a method of the quick way adds whether it did it."""
    done: list[bool] = []
    side = Sender if name == "send_short" else Receiver
    method = getattr(side, name)

    def counted(self: Any, *arguments: Any) -> bool:
        done.append(method(self, *arguments))
        return done[-1]

    monkeypatch.setattr(side, name, counted)
    return done


def test_sizes_around_the_ring(ranks: Any, monkeypatch: Any) -> None:
    """Records of odd sizes, many times the ring's length: in order, whole, and nearly all the quick way."""

    def work(c: Communicator) -> Any:
        sent, received = count(monkeypatch, "send_short"), count(monkeypatch, "recv_short")
        for i in range(600):
            x = np.full((i * 37) % 500, i % 251, "u1")
            if c.rank == 0:
                c.send(x, 1)
            else:
                buffer = np.zeros_like(x)
                assert c.recv(buffer, src=0) == 0
                assert (buffer == x).all()
            if i % 8 == 7:
                c.barrier()  # a ring that is full of what nobody took yet goes the other way as well
        return sum(sent), sum(received)

    (sent, _), (_, received) = ranks(2, work)
    assert 500 < sent < 600  # what wraps around the end goes the other way
    assert received > 0


def arrived(c: Communicator) -> None:
    """Meet; then rank 1 waits, outside any operation, until something of rank 0 lies in the ring."""
    c.barrier()
    if c.rank == 1:
        wait_until(parts_of(c).receiver.rings[0].has_message)


def test_the_first_in_the_ring_is_another_ones(ranks: Any) -> None:
    """Of another tag or dtype, or meant for a receive that was posted, or later than what was put aside."""

    def work(c: Communicator) -> None:
        x = np.arange(3.0)
        buffer, posted = np.zeros(3), np.zeros(3)

        def get(tag: int = 0) -> float:
            c.recv(buffer, src=0, tag=tag)
            return float(buffer[0])

        for begin in ("tags", "put aside", "dtype", "posted"):
            if c.rank == 0:
                c.barrier()
                for i, tag in enumerate((1, 0, 1) if begin in ("tags", "put aside") else (0, 0)):
                    c.send(x + i, 1, tag=tag)
                continue
            receive = c.irecv(posted, src=0) if begin == "posted" else None
            arrived(c)
            if begin == "tags":
                assert [get(0), get(1), get(1)] == [1, 0, 2]
            elif begin == "put aside":
                assert c.recv(src=0)[0] == 1  # the first lies aside now, the third in the ring
                assert [get(1), get(1)] == [0, 2]
            elif begin == "dtype":
                wrong = np.zeros(3, "i8")
                with pytest.raises(CollectiveMismatchError, match="nothing was written"):
                    c.recv(wrong, src=0)
                assert not wrong.any()
                assert [get(), get()] == [0, 1]
            elif receive is not None:
                assert get() == 1
                receive.wait()
                assert posted[0] == 0
        c.barrier()

    ranks(2, work)
