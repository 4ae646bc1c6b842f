"""Large private arrays that other ranks read where they lie: values, ways, and what turns it off."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nbparallel.distributed import Communicator
from nbparallel.distributed.collectives import direct, in_place
from nbparallel.distributed.collectives.in_place import InPlaceReading
from nbparallel.distributed.runtime import peer_memory
from nbparallel.distributed.runtime.peer_memory import ReadError, ReadFailure
from nbparallel.errors import CollectiveMismatchError, NbParallelError
from nbparallel.wire.control_layout import READ_IN_PLACE_OFF
from tests.harness.ranks import context_of

SIZE = 20_011
"""Elements: more than a slot holds, and no multiple of a slice, a block or a piece."""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in place what does not fit into a slot, in small steps; ranks are forked and inherit that."""
    for constant in [name for name in vars(in_place) if name.startswith("LEAST_")]:
        monkeypatch.setattr(in_place, constant, 0)
    monkeypatch.setattr(in_place, "BLOCK", 9_000)
    monkeypatch.setattr(in_place, "PIECE", 15_000)
    monkeypatch.setattr(direct, "PIECE", 64 << 10)


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


def calls(c: Communicator) -> dict[str, Callable[[], None]]:
    """Return a call of each operation, which compares what came, and that inputs are what they were."""
    me, n, root = c.rank, c.world_size, c.world_size - 1
    want, x, out = total(n), content(me), [np.empty(SIZE, "f4") for _ in range(n)]
    parts = np.array_split(want, n)

    def check(found: Any, expected: Any) -> None:
        assert found.tobytes() == expected.tobytes()
        assert x.tobytes() == content(me).tobytes(), "an input was written"

    def all_reduce() -> None:
        mine = x.copy()
        assert c.all_reduce(mine) is mine
        check(mine, want)

    def reduce() -> None:
        mine = x.copy()
        c.reduce(mine, root)
        check(mine, want if me == root else x)

    def reduce_scatter() -> None:
        mine = np.empty_like(parts[me])
        c.reduce_scatter(mine, np.array_split(x, n))
        check(mine, parts[me])

    def lists(found: list[Any]) -> None:
        for rank in range(n):
            check(found[rank], content(rank))

    def all_gather() -> None:
        lists(c.all_gather(out, x))

    def all_gather_new() -> None:
        lists(c.all_gather(x))

    def gather() -> None:
        c.gather(x, out if me == root else None, dst=root)
        if me == root:
            lists(out)

    def scatter() -> None:
        c.scatter(out[0], [content(i) for i in range(n)] if me == root else None, src=root)
        check(out[0], x)

    def all_to_all() -> None:
        c.all_to_all(out, [content(me + i) for i in range(n)])
        for i, found in enumerate(out):
            check(found, content(i + me))

    def broadcast() -> None:
        c.broadcast(x if me == root else out[0], src=root)
        check(x if me == root else out[0], content(root))

    def average_gradients() -> None:
        mine = [x.copy(), x[:7].copy()]
        c.average_gradients(mine)
        check(mine[0], want / np.float32(n))

    found = (
        all_reduce, reduce, reduce_scatter, all_gather, all_gather_new, gather, scatter, all_to_all,
        broadcast, average_gradients,
    )  # fmt: skip
    return {f.__name__: f for f in found}


@pytest.mark.matrix(cover=(), size=1)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_operation_reads_in_place(ranks: Any, n: int) -> None:
    """Bits are those of the sum in rank order, inputs stay, and each operation has read others' memory."""

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
    refusal = ReadError(ReadFailure.REFUSED, 1)

    def work(c: Communicator) -> int:
        memory = context_of(c).peers.memory
        if how == "notebook":
            context_of(c).words[READ_IN_PLACE_OFF] = 1
        elif how == "one rank" and c.rank == 1:
            memory.enabled = False
        elif how == "refused" and c.rank == 1:
            peer_memory.read_memory = lambda *_: refusal
        seen = count_reads(c)
        for call in calls(c).values():
            call()
            call()
        return len(seen)

    found = ranks(3, work, seconds=60)
    if "rank" in how or how == "refused":  # movements between the others need nothing of rank 1
        assert found[1] == 0
    else:
        assert found == [0, 0, 0]


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


def test_mixed_arrays_are_staged(ranks: Any) -> None:
    """One shared array among private ones, and one that is not contiguous: the result is the same."""

    def work(c: Communicator) -> int:
        seen = count_reads(c)
        shared = context_of(c).store.empty(SIZE, "f4")
        strided = np.empty((SIZE, 2), "f4")[:, 0]
        for other in (shared, strided):
            x = other if c.rank == 1 else np.empty(SIZE, "f4")
            x[...] = content(c.rank)
            c.all_reduce(x)
            assert x.tobytes() == total(c.world_size).tobytes()
            if other is shared:
                assert not seen
        return len(seen)

    assert all(ranks(3, work)), "a contiguous copy of the array that is not is read in place"


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
            unreadable = ReadError(ReadFailure.UNREADABLE, 14)
            peer_memory.read_memory = lambda pid, *a: unreadable if pid == os.getpid() else real(pid, *a)
        seen = count_reads(c)
        owner = np.empty((1, SIZE), "f4")
        x = owner[0]
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
                failed = ReadError(ReadFailure.REFUSED, 1), blocks[0]
                return next(left, failed) or read(blocks)

            memory.read = refuse  # type: ignore[method-assign]
        with pytest.raises((PermissionError, NbParallelError)) as caught:
            c.all_reduce(x)
        assert (peer_memory.refusal is not None) == (c.rank == 1)
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


def test_the_first_reduction_meets_once_more_and_no_later_one() -> None:
    """What the members have agreed about is remembered: see `InPlaceReading.agreed`."""
    met: list[str] = []

    class Protocol:
        """Counts meetings."""

        ranks, peers, index = (0, 1), (1,), 0

        def synchronize(self) -> None:
            """Count."""
            met.append("met")

    class Memory:
        """Agrees."""

        def verify(self, rank: int) -> bool:
            """Agree."""
            return True

        def all_read(self, ranks: Any) -> bool:
            """Agree."""
            return True

    context: Any = type("Context", (), {"peers": type("Peers", (), {"memory": Memory()})})
    protocol: Any = Protocol()
    reading = InPlaceReading(context, protocol)
    assert [reading.agreed() for _ in range(3)] == [True] * 3
    assert met == ["met"]


def test_blocks_begin_in_the_middle_of_a_page(ranks: Any) -> None:
    """Where a block begins a few bytes behind its source, as seen from their pages, copies are slow."""

    def places(c: Communicator) -> set[int]:
        x, memory = content(c.rank), context_of(c).peers.memory
        begin, read = x.__array_interface__["data"][0], memory.read
        seen: set[int] = set()

        def note(blocks: Any) -> Any:
            for _, _, into in blocks:
                place = into.__array_interface__["data"][0]
                if not begin <= place < begin + x.nbytes:
                    seen.add(place % mmap.PAGESIZE)
            return read(blocks)

        memory.read = note  # type: ignore[method-assign]
        c.all_reduce(x)
        return seen

    assert ranks(3, places) == [{direct.MARGIN}] * 3
