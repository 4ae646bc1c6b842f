"""broadcast and barrier."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.collectives import direct, exchange
from nbparallel.distributed.point_to_point.packing import Packer
from nbparallel.errors import ReadOnlyArrayError
from tests.harness.ranks import context_of


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("n", [1, 2, 4])
def test_broadcast_makes_new_values(ranks: Any, n: int) -> None:
    """None on the others: arrays of any size, numbers and objects arrive as new values."""

    def work(c: Communicator) -> None:
        for root in range(n):
            for value in (1, "x" * 200_000, {"a": [1, 2.5, None]}, np.float32(2), 10**30, None, b"", (1, 2)):
                got = c.broadcast(value if c.rank == root else None, src=root)
                assert got == value
                assert type(got) is type(value)
            for size in (0, 5, 30_000, 400_000):
                x = np.arange(size, dtype="f4").reshape(-1, 5)
                got = c.broadcast(np.asfortranarray(x) if c.rank == root else None, src=root)
                assert (got == x).all()
                assert got.flags.writeable
                if c.rank != root:
                    got[...] = c.rank
                shared = c.broadcast(context_of(c).store.share(x) if c.rank == root else None, src=root)
                assert (shared == x).all()
            assert c.broadcast(float(c.rank), src=root) == root

    ranks(n, work)


def test_broadcast_of_what_is_shared_read_only(ranks: Any) -> None:
    """The root's own memory that this rank may only read is returned, short or long; other memory is not."""

    def work(c: Communicator) -> None:
        store = context_of(c).store
        for side in (2, 300):
            x = store.share(np.arange(side**2).reshape(side, side))
            handle = c.broadcast(store.handle(x, writable=False) if c.rank == 0 else None)
            same = x if c.rank == 0 else store.attach(handle, writable=False)
            assert c.broadcast(same) is same
            if c.rank == 0:
                assert c.broadcast(same) is same
            else:
                with pytest.raises(ReadOnlyArrayError, match=r"pass `x.copy.*`, which is filled"):
                    c.broadcast(same.T)
            assert (same.ravel() == np.arange(side**2)).all()
            c.barrier()

    ranks(2, work)


def test_a_write_right_after_a_broadcast_of_the_same_memory(ranks: Any) -> None:
    """No slower rank writes over it, and a turned view of the source's memory is refused."""

    def work(c: Communicator) -> None:
        store = context_of(c).store
        x = store.share(np.arange(9.0).reshape(3, 3)) if c.rank == 0 else None
        handle = c.broadcast(store.handle(x, writable=True) if x is not None else None)
        x = store.attach(handle, writable=True) if x is None else x
        if c.rank == 2:
            unpack, Packer.fill = Packer.fill, lambda *a: (time.sleep(0.2), unpack(*a))  # type: ignore
        c.barrier()
        for writer in (0, 1):
            assert c.broadcast(x) is x
            if c.rank == writer:
                x[writer, 0] = 10
            c.barrier()
            assert x[writer, 0] == 10
        if c.rank == 1:
            with pytest.raises(ValueError, match="ranks 0 and 1 passed overlapping memory"):
                c.broadcast(x.T)
        else:
            assert c.broadcast(x) is x
        c.barrier()
        assert x[0, 1] == 1

    ranks(3, work)


def test_broadcast_of_the_same_shared_array(ranks: Any) -> None:
    """The root's own memory on another rank is a no-op; part of it is an error on every rank."""

    def work(c: Communicator) -> None:
        store = context_of(c).store
        for size in (10, 300_000):
            x = store.empty(size)
            handle = c.broadcast(store.handle(x, writable=True) if c.rank == 0 else None)
            if c.rank == 0:
                x[...] = 7
            same = x if c.rank == 0 else store.attach(handle, writable=True)
            assert c.broadcast(same) is same
            assert (same == 7).all()
            part = same[: size // 2] if c.rank == 0 else same[1 : size // 2 + 1]
            with pytest.raises(ValueError, match="overlapping"):
                c.broadcast(part)
            c.barrier()

    ranks(3, work)


def test_large_shared_arrays_are_copied_by_all(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every member copies a slice to all others; the root's own memory and private arrays are no trouble."""
    calls: list[int] = []

    def count(context: Any, protocol: Any, source: Any, targets: Any) -> None:
        calls.append(len(targets))
        direct.direct_broadcast(context, protocol, source, targets)

    monkeypatch.setattr(exchange, "direct_broadcast", count)

    def work(c: Communicator) -> list[int]:
        store = context_of(c).store
        for size in (100_000, 100_001, 700_003):
            x = store.empty(size, "i2")
            data = (np.arange(size) % 9973).astype("i2")
            handle = c.broadcast(store.handle(x, writable=True) if c.rank == 1 else None, src=1)
            same = store.attach(handle, writable=True) if c.rank == 0 else x  # of ranks 0 and 1
            x[...] = -1
            c.barrier()
            if c.rank == 1:
                x[...] = data
            c.broadcast(same, src=1)
            assert (same == data).all()
            c.barrier()
            mixed = x if c.rank == 1 else store.zeros(size, "i2") if c.rank == 2 else np.zeros(size, "i2")
            c.broadcast(mixed, src=1)
            assert (mixed == data).all()
        return calls

    assert ranks(3, work) == [[1, 1, 1]] * 3


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("n", [1, 2, 4])
def test_barrier_waits_for_the_last(ranks: Any, n: int) -> None:
    """Nobody leaves a barrier before everybody has entered it."""

    def work(c: Communicator) -> list[tuple[int, int]]:
        times = []
        for late in range(n):
            if c.rank == late:
                time.sleep(0.05)
            entered = time.monotonic_ns()
            c.barrier()
            times.append((entered, time.monotonic_ns()))
        for _ in range(200):
            c.barrier()
        return times

    found = ranks(n, work)
    for round_ in zip(*found, strict=True):
        assert min(left for _, left in round_) >= max(entered for entered, _ in round_)
