"""Programs with a race, each in one sentence that a student can act on, and programs without one."""

from __future__ import annotations

import numpy as np
import pytest

from nbparallel.distributed.races.access_log import POSSIBLE, READ, WRITE, Acquire, Publish
from nbparallel.distributed.races.report import compare
from tests.distributed.races.comparison.recorded import Recorded


def sentences(cell: Recorded) -> list[str]:
    """Return the races."""
    return [str(race) for race in compare(cell.logs()).races]


# -- with a race ---------------------------------------------------------------------------------------------


def test_counter() -> None:
    """All ranks add to one element."""
    cell = Recorded(4, counter=np.zeros(1))
    for rank in cell:
        rank.add(cell.arrays["counter"], 1)
    assert sentences(cell) == [
        "`counter[0]`: ranks 0-3 each read and wrote it on line 1, and nothing orders them. "
        '→ `with dist.lock("counter"):` around it, or add up your own and `all_reduce`'
    ]


def test_halo_without_a_barrier() -> None:
    """A rank reads its neighbour's edge while the neighbour writes it."""
    cell = Recorded(2, grid=np.zeros(16))
    grid = cell.arrays["grid"]
    cell[0].write(grid[0:8], 5)
    cell[1].read(grid[7:8], 3)
    assert sentences(cell) == [
        "`grid[7]`: rank 0 wrote `grid[0:8]` on line 5, rank 1 read it on line 3, "
        "and nothing orders the two. → `barrier()` between them"
    ]


def test_halo_of_four_ranks() -> None:
    """It is one race, whichever edges are concerned."""
    cell = Recorded(4, grid=np.zeros((32, 6)))
    grid = cell.arrays["grid"]
    for rank in cell:
        low, high = 8 * rank.rank, 8 * rank.rank + 8
        rank.read(grid[max(low - 1, 0) : high + 1], 3)
        rank.write(grid[low:high], 5)
    (race,) = compare(cell.logs()).races
    assert str(race) == (
        "`grid[7, :]`: rank 0 wrote `grid[0:8, :]` on line 5, rank 1 read `grid[7:17, :]` on line 3, "
        "and nothing orders the two. Likewise `grid[8, :]` (ranks 0 and 1), `grid[15, :]` (ranks 1 and 2) "
        "and 3 more places. → `barrier()` between them"
    )
    assert (race.array, race.indices, race.lines, race.cells) == ("grid", "grid[7, :]", (5, 3), ("", ""))
    assert (race.ranks, race.kinds) == (((0, 1, 2, 3), (0, 1, 2, 3)), ("wrote", "read"))
    assert (race.certain, race.harmless) == (True, False)


def test_read_before_the_barrier() -> None:
    """The result is read before all have written their part; what is read after it is in order."""
    cell = Recorded(3, total=np.zeros(30))
    total = cell.arrays["total"]
    for rank in cell:
        rank.write(total[10 * rank.rank :][:10], 4)
    cell[0].read(total, 5)
    cell.barrier()
    cell[1].read(total, 7)
    assert sentences(cell) == [
        "`total[10:20]`: rank 1 wrote it on line 4, rank 0 read `total` on line 5, "
        "and nothing orders the two. Likewise `total[20:30]` (ranks 0 and 2). → `barrier()` between them"
    ]


def test_overlapping_slices() -> None:
    """Parts that are one element too long."""
    cell = Recorded(4, a=np.zeros(20))
    for rank in cell:
        rank.write(cell.arrays["a"][5 * rank.rank :][:6], 2)
    assert sentences(cell) == [
        "`a[5]`: ranks 0 and 1 each wrote it on line 2, and nothing orders them. "
        "Likewise `a[10]` (ranks 1 and 2) and `a[15]` (ranks 2 and 3). "
        "→ have each rank write its own part: `dist.local_slice`"
    ]


@pytest.mark.slow
def test_adding_to_overlapping_slices() -> None:
    """Parts that are too long are probably not what was meant, so a lock comes second."""
    cell = Recorded(2, a=np.zeros(9))
    for rank in cell:
        rank.add(cell.arrays["a"][4 * rank.rank :][:5], 2)
    assert sentences(cell) == [
        "`a[4]`: ranks 0 and 1 each read and wrote it on line 2, and nothing orders them. "
        '→ have each rank write its own part: `dist.local_slice`; or `with dist.lock("a"):` around it'
    ]


def test_transposed_view() -> None:
    """One rank writes rows, another one columns of the same memory."""
    cell = Recorded(2, m=np.zeros((6, 6)))
    cell[0].write(cell.arrays["m"][1], 3)
    cell[1].write(cell.arrays["m"].T[2], 4)
    assert sentences(cell) == [
        "`m[1, 2]`: rank 0 wrote `m[1, :]` on line 3, rank 1 wrote `m[:, 2]` on line 4, "
        "and nothing orders the two. → `barrier()` between them if one is to come first, "
        "else have each rank write its own part: `dist.local_slice`"
    ]


def test_a_barrier_is_missing_after_the_first_value() -> None:
    """Rank 0 writes what all ranks then add to under a lock: what is missing is the barrier between."""
    cell = Recorded(2, n=np.zeros(1))
    cell[0].write(cell.arrays["n"], 2)
    cell[1].add(cell.arrays["n"], 4)
    assert "→ `barrier()` between them if one is to come first" in sentences(cell)[0]


def test_out_of_a_ufunc() -> None:
    """A result goes into an array that another rank reads, and adds to, on the same line."""
    cell = Recorded(2, x=np.zeros(8), y=np.zeros(8))
    x, y = cell.arrays.values()
    cell[0].read(x, 2)
    cell[0].write(y, 2)
    cell[1].read(y, 2)
    assert sentences(cell) == [
        "`y`: rank 0 wrote it and rank 1 read it on line 2, and nothing orders the two. "
        "→ have all ranks read first, then `barrier()`, then write; or write into a second array"
    ]


def test_a_removed_synchronisation_is_found_with_the_others_in_place() -> None:
    """Of three steps with barriers the second lacks one: just that one is reported."""
    cell = Recorded(2, a=np.zeros(4))
    a = cell.arrays["a"]
    for step, line in ((0, 3), (1, 5), (2, 7)):
        cell[0].write(a[0:2], line)
        if step != 1:
            cell.barrier()
        cell[1].read(a[1:3], line + 1)
        cell.barrier()
    assert sentences(cell) == [
        "`a[1]`: rank 0 wrote `a[0:2]` on line 5, rank 1 read `a[1:3]` on line 6, "
        "and nothing orders the two. → `barrier()` between them"
    ]


def test_adding_on_two_lines() -> None:
    """Two branches add to one counter."""
    cell = Recorded(2, n=np.zeros(1))
    for rank in cell:
        rank.add(cell.arrays["n"], 3 + rank.rank)
    assert sentences(cell) == [
        "`n[0]`: rank 0 read and wrote it on line 3, rank 1 read and wrote it on line 4, "
        'and nothing orders the two. → `with dist.lock("n"):` around each of the two'
    ]


def test_each_takes_the_next() -> None:
    """A queue without a lock: a lock around one of the lines alone would let two take the same number."""
    cell = Recorded(2, n=np.zeros(1))
    for rank in cell:
        rank.read(cell.arrays["n"], 3)
        rank.add(cell.arrays["n"], 4)
    assert sentences(cell)[0] == (
        "`n[0]`: ranks 0 and 1 wrote it on line 4, ranks 0 and 1 read it on line 3, and nothing orders them. "
        "→ `barrier()` between them if one is to come first, else "
        '`with dist.lock("n"):` around both together'
    )


def test_the_largest_of_all() -> None:
    """All ranks compare, and some write what was larger: a barrier would let a smaller one win."""
    cell = Recorded(3, n=np.zeros(1))
    for rank in cell:
        rank.read(cell.arrays["n"], 2)
        if rank.rank:
            rank.write(cell.arrays["n"], 3)
    assert sentences(cell)[0].endswith('else `with dist.lock("n"):` around both together')


def test_a_whole_array_is_no_counter() -> None:
    """A lock alone would let every rank do the same work once more: `M[:] = M.T`."""
    cell = Recorded(2, m=np.zeros((2, 2)))
    for rank in cell:
        rank.add(cell.arrays["m"], 1)
    assert sentences(cell) == [
        "`m`: ranks 0 and 1 each read and wrote it on line 1, and nothing orders them. → "
        "if it is to be done once, each rank its own part (`dist.local_slice`), or a second array; "
        'if all are to add to it, `with dist.lock("m"):` around it, or `all_reduce`'
    ]
    cell = Recorded(2, m=np.zeros((2, 2)))
    for rank in cell:
        rank.add(cell.arrays["m"], 1 + rank.rank)
    advice = (
        '`barrier()` between them if one is to come first, else `with dist.lock("m"):` around each of the two'
    )
    assert sentences(cell)[0].endswith(advice)


def test_a_polled_flag_orders_nothing() -> None:
    """A rank that waits until it reads a value is reported: only operations order."""
    cell = Recorded(2, flag=np.zeros(1), data=np.zeros(3))
    flag, data = cell.arrays.values()
    cell[0].write(data, 2)
    cell[0].write(flag, 3, 1)
    cell[1].read(flag, 5)
    cell[1].read(data, 6)
    assert [race.split(":")[0] for race in sentences(cell)] == ["`flag[0]`", "`data`"]


def test_the_lock_of_another_name() -> None:
    """Turns of two locks are in no order."""
    cell = Recorded(2, n=np.zeros(1))
    for rank in cell:
        rank.acquire_lock(10 * rank.rank, str(rank.rank))
        rank.add(cell.arrays["n"], 3)
        rank.release_lock(str(rank.rank))
    assert len(sentences(cell)) == 1


def test_only_the_root_of_a_broadcast_is_before() -> None:
    """The others are not in order among themselves, nor before the root."""
    cell = Recorded(3, a=np.zeros(3), b=np.zeros(3))
    a, b = cell.arrays.values()
    cell[0].write(a, 1)
    cell[1].write(b, 2)
    cell[0].events.append(Publish(("collective", 1, 0)))
    for rank in cell.ranks[1:]:
        rank.events.append(Acquire((("collective", 1, 0),)))
    cell[1].read(a, 5)
    cell[2].read(b, 6)
    cell[0].read(b, 7)
    assert [(race.array, race.lines, race.ranks) for race in compare(cell.logs()).races] == [
        ("b", (2, 7), ((1,), (0,))),
        ("b", (2, 6), ((1,), (2,))),
    ]


def test_the_fast_producer() -> None:
    """A rank that sends and goes on overwrites what the receiver may still read."""
    cell = Recorded(2, buffer=np.zeros(4))
    for _ in range(5):
        cell[0].write(cell.arrays["buffer"], 3)
        cell.send(0, 1)
        cell[1].read(cell.arrays["buffer"], 7)
    assert sentences(cell) == [
        "`buffer`: rank 0 wrote it on line 3, rank 1 read it on line 7, and nothing orders the two. "
        "→ `barrier()` between them"
    ]


# -- without a race ------------------------------------------------------------------------------------------


def _own_rows(cell: Recorded) -> None:
    for rank in cell:
        rank.add(cell.arrays["m"][2 * rank.rank :][:2], 3)


def _barriers(cell: Recorded) -> None:
    for _ in range(3):
        for rank in cell:
            rank.write(cell.arrays["m"][2 * rank.rank :][:2], 3)
        cell.barrier()
        for rank in cell:
            rank.read(cell.arrays["m"], 5)
        cell.barrier()


def _groups(cell: Recorded) -> None:
    for pair in ((0, 1), (2, 3)):
        cell[pair[0]].write(cell.arrays["m"][2 * pair[0]], 3)
        cell.barrier(*pair)
        cell[pair[1]].add(cell.arrays["m"][2 * pair[0]], 5)


def _send_and_receive(cell: Recorded) -> None:
    for source, target in ((0, 1), (1, 2), (2, 3)):
        cell[source].add(cell.arrays["m"], 3)
        cell.send(source, target)
    cell[3].add(cell.arrays["m"], 5)


def _lock(cell: Recorded) -> None:
    for turn in range(20):
        rank = cell[3 * turn % 4]
        rank.acquire_lock(100 * turn)
        rank.add(cell.arrays["m"][0, :1], 3)
        rank.release_lock()


def _disjoint_strides(cell: Recorded) -> None:
    m = cell.arrays["m"]
    for rank in cell:
        rank.write(m[:, rank.rank :: 4], 3)
        rank.write(m.reshape(-1)[rank.rank :: 4], 4)
        rank.add(m.T[rank.rank :: 4], 5)


def _reads_only(cell: Recorded) -> None:
    for rank in cell:
        rank.read(cell.arrays["m"], 3)


@pytest.mark.parametrize(
    "program", [_own_rows, _barriers, _groups, _send_and_receive, _lock, _disjoint_strides, _reads_only]
)
def test_no_race(program: object) -> None:
    """Programs whose operations order what they share, or that share nothing."""
    cell = Recorded(4, m=np.zeros((8, 8)))
    program(cell)  # type: ignore[operator]
    report = compare(cell.logs())
    assert report.races == ()
    count = sum(len(rank.accesses) for rank in cell)
    assert str(report) == f"no race among {count} accesses"


# -- softer ones ---------------------------------------------------------------------------------------------


def test_the_same_number_by_all() -> None:
    """All ranks store the same value on one line, in each step another one."""
    cell = Recorded(4, done=np.zeros(1))
    for step in range(3):
        for rank in cell:
            rank.write(cell.arrays["done"], 4, step)
        cell.barrier()
    report = compare(cell.logs())
    assert str(report).splitlines() == [
        "1 harmless race",
        "`done[0]`: ranks 0-3 each stored the same number on line 4. → harmless, one rank is enough",
    ]


def test_a_number_that_differs() -> None:
    """One rank that stores another number makes it a race, also if it stored the same one before."""
    cell = Recorded(3, done=np.zeros(1))
    for rank in cell:
        rank.write(cell.arrays["done"], 4, rank.rank == 2)
    assert "each wrote it on line 4" in sentences(cell)[0]
    cell = Recorded(2, done=np.zeros(1))
    cell[0].write(cell.arrays["done"], 4, 1)
    cell[0].events.append(Publish(("nothing",)))
    cell[0].write(cell.arrays["done"], 4, 2)
    cell[1].events.append(Publish(("nothing either",)))  # so that it is looked at later
    cell[1].write(cell.arrays["done"], 4, 2)
    assert "each wrote it on line 4" in sentences(cell)[0]


def test_a_possible_race() -> None:
    """Memory that went to a C library may have been written: the door is named."""
    cell = Recorded(2, w=np.zeros(8))
    cell[0].write(cell.arrays["w"][:4], 2)
    for kind in (READ | POSSIBLE, WRITE | POSSIBLE):
        cell[1].touch(cell.arrays["w"], kind, 3, door="torch.from_numpy")
    report = compare(cell.logs())
    assert str(report).splitlines() == [
        "1 possible race",
        "`w[0:4]`: rank 0 wrote it on line 2, rank 1 may have read and written `w` on line 3 "
        "(passed to `torch.from_numpy`, which may write), and nothing orders the two. "
        "→ `barrier()` between them if one is to come first, else have each rank write its own part: "
        "`dist.local_slice`; "
        "if what it was passed to only reads, pass a copy",
    ]
    assert not report.races[0].certain
