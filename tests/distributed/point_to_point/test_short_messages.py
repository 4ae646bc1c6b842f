"""Short arrays take a quick way between two ranks; whatever is not usual takes the other one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.point_to_point.packing import SHORT
from nbparallel.distributed.point_to_point.receiver import Receiver
from nbparallel.distributed.point_to_point.sender import Sender
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


def test_up_to_what_a_ring_takes(ranks: Any, monkeypatch: Any) -> None:
    """Two of the longest fill a ring: the sender waits for room, and what was sent stays as it was."""

    def work(c: Communicator) -> int:
        sent = count(monkeypatch, "send_short")
        sizes = [(i * 2741) % SHORT for i in range(150)] + [SHORT - 1, SHORT, SHORT + 1] * 10
        for i, size in enumerate(sizes):
            x = (np.arange(size) + i).astype("u1")
            if c.rank == 0:
                y = x.copy()
                c.send(y, 1)
                y[...] = 0
            else:
                buffer = np.zeros_like(x)
                assert c.recv(buffer, src=0) == 0
                assert (buffer == x).all()
        return sum(sent)

    assert ranks(2, work)[0] > 20


def test_every_form(ranks: Any) -> None:
    """Scalars, empty, strided, swapped and structured arrays, to oneself and to another rank."""
    arrays = [
        np.array(3.5), np.zeros((0, 3)), np.arange(12.0).reshape(3, 4)[:, ::2], np.arange(5, dtype=">i4"),
        np.ones(3, "i4,f8"), np.array(["a", "bc"]), np.arange(4).astype("M8[s]"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
    ]  # fmt: skip

    def work(c: Communicator) -> None:
        for x in arrays:
            for dst in (c.rank, 1 - c.rank):
                c.send(x, dst)
                buffer = np.zeros((*x.shape, 2), x.dtype)[..., 0]
                assert c.recv(buffer, src=dst) == dst
                assert buffer.tobytes() == x.tobytes()

    ranks(2, work)


def test_what_comes_first_is_kept(ranks: Any) -> None:
    """Other tags, forms, kinds and posted receives before it: each message still goes where it belongs."""

    def work(c: Communicator) -> None:
        x = np.arange(3.0)
        if c.rank == 0:
            c.send("text", 1)
            c.send(x + 1, 1, tag=1)
            c.send(x + 2, 1)
            c.send(x + 3, 1, tag=2)
            c.send(x + 4, 1)
            c.send(x + 5, 1)
            c.send([7], 1)
        else:
            buffer, posted = np.zeros(3), np.zeros(3)
            c.recv(buffer, src=0, tag=1)
            assert (buffer == x + 1).all()
            assert c.recv(src=0) == "text"
            with pytest.raises(CollectiveMismatchError, match="nothing was written"):
                c.recv(np.zeros(4), src=0)
            work = c.irecv(posted, src=0)
            c.recv(buffer, src=0)
            assert (buffer == x + 4).all()
            work.wait()
            assert (posted == x + 2).all()
            c.recv(buffer, src=0)
            assert (buffer == x + 5).all()
            with pytest.raises(CollectiveMismatchError, match="pickled object"):
                c.recv(buffer, src=0)
            assert c.recv(src=0) == [7]
            c.recv(buffer, src=0, tag=2)
            assert (buffer == x + 3).all()
        c.barrier()

    ranks(2, work)


def test_a_full_ring(ranks: Any) -> None:
    """More than the ring holds, before anything is taken: nothing is overwritten."""

    def work(c: Communicator) -> int:
        count = 3 * parts_of(c).sender.rings[1 - c.rank].capacity // 300
        if c.rank == 1:
            time.sleep(0.1)  # the ring is full by now, and rank 0 waits for room
        for i in range(count):
            x = np.full(200 + i % 7, i % 251, "u1")
            if c.rank == 0:
                c.send(x, 1)
            else:
                buffer = np.zeros_like(x)
                c.recv(buffer, src=0)
                assert (buffer == x).all(), i
        return count

    assert min(ranks(2, work)) > 100


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
