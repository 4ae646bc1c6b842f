"""send and recv."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator, strict_sync
from nbparallel.errors import CollectiveMismatchError, CollectiveTimeoutError, DeadlockError, PeerFailedError
from tests.harness.ranks import context_of


def test_value_semantics(ranks: Any) -> None:
    """What the sender does afterwards does not reach the receiver, at any size, shared or not."""

    def work(c: Communicator) -> None:
        for size in (10, 5000, 300_000):
            for shared in (False, True):
                x = np.ones(size)
                if shared:
                    x = context_of(c).store.share(x)
                if c.rank == 0:
                    c.send(x, 1)
                    x[...] = 2
                    c.send([x[:1].copy(), 5], 1)
                    c.barrier()
                else:
                    c.barrier()
                    got = c.recv(src=0)
                    assert (got == 1).all()
                    got[...] = 3
                    assert c.recv(src=0)[0][0] == 2
                c.barrier()
                assert (x == (2 if c.rank == 0 else 1)).all()

    ranks(2, work)


def test_views_and_shared_arrays_inside_objects(ranks: Any) -> None:
    """view=True shows the sender's memory read-only; a shared array inside an object is the same memory."""

    def work(c: Communicator) -> None:
        x = context_of(c).store.share(np.ones(200_000))
        if c.rank == 0:
            c.send(x[::2], 1, view=True)
            c.send({"inside": x}, 1)
            c.barrier()
            x[0] = 5
            c.barrier()
            with pytest.raises(ValueError, match="private"):
                c.send(np.ones(3), 1, view=True)
            with pytest.raises(TypeError, match="view=True"):
                c.send([1], 1, view=True)
            c.barrier()
        else:
            got, other = c.recv(src=0), c.recv(src=0)["inside"]
            assert not got.flags.writeable
            with pytest.raises(ValueError, match="WRITEABLE"):
                got.flags.writeable = True
            c.barrier()
            c.barrier()
            assert got[0] == 5
            assert other[0] == 5
            c.barrier()

    ranks(2, work)


def test_tags_and_order(ranks: Any) -> None:
    """Messages of one tag arrive in order; another tag may be received first; numpy ints are fine."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            for i in range(100):
                c.send(i, np.int64(1), tag=np.int32(i % 3))
            c.send("last", 1, tag=9)
        else:
            assert c.recv(src=0, tag=9) == "last"
            for tag in (2, 0, 1):
                assert [c.recv(src=0, tag=tag) for _ in range(tag, 100, 3)] == list(range(tag, 100, 3))

    ranks(2, work)


def test_any_source(ranks: Any) -> None:
    """A recv without src takes from everybody, in each one's order, and nobody starves."""

    def work(c: Communicator) -> None:
        if c.rank:
            for i in range(50):
                c.send((c.rank, i), 0)
            return
        seen: dict[int, list[int]] = {1: [], 2: [], 3: []}
        buffer = np.zeros(1)
        for _ in range(150):
            source, i = c.recv()
            seen[source].append(i)
        assert all(values == list(range(50)) for values in seen.values())
        c.send(np.ones(1), 0)
        assert c.recv(buffer) == 0

    ranks(4, work)


def test_many_small_messages_do_not_block_each_other(ranks: Any) -> None:
    """Ranks that all send first, far more than a ring holds, are no deadlock: whoever waits makes room."""

    def work(c: Communicator) -> None:
        n = c.world_size
        for i in range(3000):
            c.send(np.full(20, i), (c.rank + 1) % n)
        for i in range(3000):
            assert c.recv(src=(c.rank - 1) % n)[0] == i
        for _ in range(20):
            c.send(np.ones(4000), c.rank)
        assert sum(c.recv(src=c.rank).sum() for _ in range(20)) == 80_000

    ranks(3, work)


@pytest.mark.fault("F37")
def test_a_message_that_does_not_fit(ranks: Any) -> None:
    """dtype, shape and kind are compared before a byte is written; the message can still be received."""

    def work(c: Communicator) -> None:
        for size in (8, 100_000):
            if c.rank == 0:
                c.send(np.ones(size, "f4"), 1)
                c.send("text", 1)
                continue
            for shape, dtype in ((size, "f8"), (size - 1, "f4"), ((size, 1), "f4"), (size * 2, "f4")):
                buffer = np.full(shape, 7, dtype)
                before = buffer.tobytes()
                with pytest.raises(CollectiveMismatchError, match=r"(?s)rank 0 sent does not.*float32.*recv"):
                    c.recv(buffer, src=0)
                assert buffer.tobytes() == before
            fits = np.zeros(size, "f4")
            assert c.recv(fits, src=0) == 0
            assert (fits == 1).all()
            with pytest.raises(CollectiveMismatchError, match="pickled object"):
                c.recv(fits, src=0)
            assert c.recv(src=0) == "text"

    ranks(2, work)


def test_buffered_messages_survive_the_cell(ranks: Any) -> None:
    """What was sent in one cell can be received in the next, and from a rank that is not in it."""

    def work(c: Communicator) -> None:
        file = work.__code__.co_filename
        if c.rank == 0:
            c.send(np.arange(100_000), 1)
            c.send("small", 1, tag=4)
        c.barrier()
        c.end_cell(None)
        if c.rank == 1:
            c.begin_cell(2, (1,), file)
            assert c.recv(src=0, tag=4) == "small"
            assert c.recv()[-1] == 99_999
            with pytest.raises(DeadlockError, match="rank 0 is not in this cell"):
                c.recv(src=0)

    ranks(2, work)


@pytest.mark.slow
def test_time_outs(ranks: Any) -> None:
    """A time-out raises who did not arrive, and a recv may be tried again."""

    def work(c: Communicator) -> None:
        if c.rank == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"recv on line \d+.*rank 1 did not arrive"):
                c.recv(src=1, timeout=0.5)
            c.send("go on", 1)
            assert c.recv(src=1) == "well"
            with pytest.raises(CollectiveTimeoutError, match=r"barrier on line \d+.*rank 1 did not arrive"):
                c.barrier(timeout=0.05)
            with pytest.raises(CollectiveTimeoutError, match="until the next cell"):
                c.barrier()
        else:
            assert c.recv(src=0) == "go on"
            c.send("well", 0)
            with pytest.raises(PeerFailedError, match="timed out"):
                c.recv(src=0)

    ranks(2, work)


def test_strict_sync(ranks: Any) -> None:
    """Strict sends wait for their receiver; a head-to-head exchange is then shown to be a deadlock."""

    def work(c: Communicator) -> str:
        strict_sync(True)
        if c.rank == 0:
            c.send(1, 1)
            assert c.recv(src=1) == 2
        else:
            assert c.recv(src=0) == 1
            c.send(2, 0)
        try:
            c.send(3, 1 - c.rank)
        except DeadlockError as error:
            return str(error)
        return ""

    for text in ranks(2, work):
        assert "rank 0 waits in send(dst=1) for rank 1" in text
        assert "rank 1 waits in send(dst=0) for rank 0" in text
