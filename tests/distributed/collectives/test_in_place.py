"""Large private arrays that other ranks read where they lie: values, ways, and what turns it off."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.collectives import in_place
from nbparallel.distributed.runtime import peer_memory
from nbparallel.errors import CollectiveMismatchError, NbParallelError
from nbparallel.wire.control_layout import READ_IN_PLACE_OFF
from tests.harness.ranks import context_of

pytestmark = pytest.mark.usefixtures("small_steps")
SIZE = 20_011
"""Elements: more than a slot holds, and no multiple of a slice, a block or a piece."""


def count_reads(c: Communicator) -> list[int]:
    """Return a list to which every read of another rank's memory adds that rank."""
    seen: list[int] = []
    memory = context_of(c).peers.memory
    read = memory.read

    def count(blocks: Any) -> Any:
        seen.extend(rank for rank, _, _ in blocks)
        return read(blocks)

    memory.read = count  # type: ignore[method-assign]
    return seen


def content(rank: int, size: int = SIZE) -> np.ndarray[Any, Any]:
    """Return an array of which no two ranks have the same, and sums depend on the order."""
    return np.random.default_rng(rank).standard_normal(size).astype("f4")


def total(n: int, size: int = SIZE) -> np.ndarray[Any, Any]:
    """Return the sum in rank order."""
    found = content(0, size)
    for rank in range(1, n):
        found = found + content(rank, size)
    return found


def calls(c: Communicator) -> dict[str, Callable[[], object]]:
    """Return a call of each operation; `test_in_place_suite` compares what comes."""
    me, n, root = c.rank, c.world_size, c.world_size - 1
    x, out, mine = content(me), [np.empty(SIZE, "f4") for _ in range(n)], me == root
    several = [content(i) for i in range(n)]
    return {
        "all_reduce": lambda: c.all_reduce(x.copy()),
        "reduce": lambda: c.reduce(x.copy(), root),
        "reduce_scatter": lambda: c.reduce_scatter(np.array_split(x, n)[me].copy(), np.array_split(x, n)),
        "all_gather": lambda: c.all_gather(out, x),
        "all_gather_new": lambda: c.all_gather(x),
        "gather": lambda: c.gather(x, out if mine else None, dst=root),
        "scatter": lambda: c.scatter(out[0], several if mine else None, src=root),
        "all_to_all": lambda: c.all_to_all(out, several),
        "broadcast": lambda: c.broadcast(x if mine else out[0], src=root),
        "average_gradients": lambda: c.average_gradients([x.copy(), x[:7].copy()]),
    }


@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_operation_reads_in_place(ranks: Any, n: int) -> None:
    """Each has read others' memory."""

    def work(c: Communicator) -> dict[str, int]:
        seen, found = count_reads(c), {}
        for name, call in calls(c).items():
            for _ in range(3):  # a movement's first call finds out who has buffers, and who can be read
                before = len(seen)
                call()
            found[name] = len(seen) - before
        return found

    found = ranks(n, work, seconds=60)
    copied = {"reduce"} | ({"all_gather_new"} if n == 2 else set())  # one reader, which keeps the copy
    for name in found[0]:
        reading = [rank for rank in range(n) if found[rank][name]]
        root = {"gather": [n - 1], "scatter": [*range(n - 1)], "broadcast": [*range(n - 1)]}
        assert reading == ([] if name in copied else root.get(name, [*range(n)])), (name, found)


@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.parametrize("how", ["environment", "notebook", "one rank", "refused"])
def test_turned_off(ranks: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """With it off, on one rank too, or refused by the system, results are the same and nothing is read."""
    if how == "environment":
        monkeypatch.setenv(peer_memory.OFF, "0")

    def work(c: Communicator) -> int:
        memory = context_of(c).peers.memory
        if how == "notebook":
            context_of(c).words[READ_IN_PLACE_OFF] = 1
        elif how == "one rank" and c.rank == 1:
            memory.enabled = False
        elif how == "refused" and c.rank == 1:
            peer_memory.read_memory = lambda *_: errno.EPERM
        seen = count_reads(c)
        for call in calls(c).values():
            call()
            call()
        assert c.all_reduce(content(c.rank)).tobytes() == total(3).tobytes()
        return len(seen)

    found = ranks(3, work, seconds=60)
    if "rank" in how or how == "refused":  # movements between the others need nothing of rank 1
        assert found[1] == 0
    else:
        assert found == [0, 0, 0]


def test_a_difference_is_found_before_anything_is_written(ranks: Any) -> None:
    """Another size on one rank: the same error everywhere, and all arrays are as they were."""

    def work(c: Communicator) -> None:
        c.all_reduce(content(c.rank))
        x = content(c.rank, SIZE + c.rank // 2)
        before = x.copy()
        with pytest.raises(CollectiveMismatchError):
            c.all_reduce(x)
        assert x.tobytes() == before.tobytes()

    ranks(3, work)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_nobody_leaves_before_all_have_read(ranks: Any, operation: str) -> None:
    """A rank that changes its array as soon as it gets it back changes nothing for a late reader."""

    def work(c: Communicator) -> None:
        call = {"all_reduce": lambda x: c.all_reduce(x), "all_gather": lambda x: c.all_gather(out, x)}
        out = [np.empty(SIZE, "f4") for _ in range(3)]
        memory = context_of(c).peers.memory
        read = memory.read

        def late(blocks: Any) -> Any:
            if c.rank == 2:
                __import__("time").sleep(0.002)
            return read(blocks)

        memory.read = late  # type: ignore[method-assign]
        for _ in range(4):
            x = content(c.rank)
            call[operation](x)
            if operation == "all_reduce":
                assert x.tobytes() == total(3).tobytes()
            x[...] = np.nan
            if operation == "all_gather":
                assert [a.tobytes() for a in out] == [content(i).tobytes() for i in range(3)]

    ranks(3, work)


def test_memory_that_cannot_be_read_is_copied(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's memory cannot be read by its own process either: it is not offered."""

    def work(c: Communicator) -> int:
        c.all_reduce(content(c.rank))
        memory = context_of(c).peers.memory
        if c.rank == 0:
            real = peer_memory.read_memory
            peer_memory.read_memory = lambda pid, *a: errno.EFAULT if pid == os.getpid() else real(pid, *a)
        seen = count_reads(c)
        x = np.frombuffer(bytearray(4 * SIZE), "f4")  # numpy's own memory is never a driver's
        x[...] = content(c.rank)
        assert bool(memory.address(x)) == (c.rank != 0)
        c.all_reduce(x)
        assert x.tobytes() == total(3).tobytes()
        return len(seen)

    assert ranks(3, work) == [0, 0, 0]


def test_a_refusal_in_the_middle(ranks: Any) -> None:
    """An error that names the rank and what to do; its rank offers and reads nothing from then on."""

    def work(c: Communicator) -> str:
        x = content(c.rank)
        c.all_reduce(x)
        memory = context_of(c).peers.memory
        if c.rank == 1:
            read, left = memory.read, iter([None, None])

            def refuse(blocks: Any) -> Any:
                failed = errno.EPERM, blocks[0]
                return next(left, failed) or read(blocks)

            memory.read = refuse  # type: ignore[method-assign]
        with pytest.raises((PermissionError, NbParallelError)) as caught:
            c.all_reduce(x)
        assert peer_memory.refused == (c.rank == 1)
        return f"{type(caught.value).__name__}: {caught.value}"

    zero, one, two = ranks(3, work)
    assert one.startswith("PermissionError")
    assert "could not go on reading an array of rank" in one
    assert "read_in_place = False" in one
    for other in (zero, two):
        assert other.startswith("PeerFailedError: rank 1 failed: PermissionError")


def test_groups_agree_for_themselves(ranks: Any) -> None:
    """A group of some ranks reads in place, whatever the world has done."""

    def work(c: Communicator) -> int:
        group, seen = c.new_group([0, 2]), count_reads(c)
        if c.rank != 1:
            x = content(c.rank)
            c.all_reduce(x, group=group)
            assert x.tobytes() == (content(0) + content(2)).tobytes()
        return len(seen)

    found = ranks(3, work)
    assert found[1] == 0
    assert all((found[0], found[2]))


def test_small_arrays_are_not_read(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the threshold nothing is read."""
    for constant in [name for name in vars(in_place) if name.startswith("LEAST_")]:
        monkeypatch.setattr(in_place, constant, SIZE * 4 + 1)

    def work(c: Communicator) -> int:
        seen = count_reads(c)
        for call in calls(c).values():
            call()
            call()
        return len(seen)

    assert ranks(2, work) == [0, 0]
