"""How much memory a process keeps for its next arrays: a share of what is left, and what just comes back."""

import numpy as np
import pytest

from nbparallel.sharing import Store
from nbparallel.sharing.lifecycle import segment_table
from nbparallel.sharing.lifecycle.exported_segments import PoolBudget
from tests.sharing.memory.test_out_of_memory import MIB, V2, reader

GIB = 1 << 30
MACHINE = {"/proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\nSwapFree: 0 kB\n"}
"""64 GiB, half of it taken."""


def container(limit, used):
    """Return the files of a container on a large machine."""
    files = {**V2, **MACHINE}
    memory = "/sys/fs/cgroup/user/memory."
    files[memory + "max"], files[memory + "current"] = f"{limit}\n", f"{used}\n"
    files[memory + "stat"] = "inactive_file 0\nactive_file 0\n"
    return files


@pytest.mark.parametrize(
    ("files", "pooled", "most"),
    [
        (MACHINE, 0, GIB),
        (container(512 * MIB, 128 * MIB), 0, 48 * MIB),
        (container(512 * MIB, (128 + 48) * MIB), 48 * MIB, 48 * MIB),
    ],
    ids=["a machine with plenty", "a container's limit counts", "what is kept already is not missing"],
)
def test_an_eighth_of_what_is_left_is_kept(files, pooled, most):
    """And no more than a gibibyte; a process's own pool is free memory, so it does not drive itself out."""
    keep = PoolBudget(read=reader(files))
    assert keep.allows(most, pooled)
    assert not keep.allows(most + 1, pooled)


def test_many_processes_together_leave_something():
    """Each gets a share of what the others have left: thirty full pools are not all of the container."""
    limit, used = 2 * GIB, 0
    for _ in range(30):
        keep = PoolBudget(read=reader(container(limit, used)))
        used += max(size for size in range(0, limit, MIB) if keep.allows(size))
    assert used < limit


def test_one_that_is_too_large_does_not_drive_out_the_others():
    """A block that may not be kept is given back alone, whether it is one's own or another's."""
    store = Store(pool_nbytes=MIB)
    small, large = store.empty(MIB // 2, "u1"), store.empty(2 * MIB, "u1")
    del small, large
    store.drain()
    assert [record.nbytes for record in store.segments()] == [MIB // 2]
    store.close()


@pytest.fixture
def late(exchange, monkeypatch):
    """Return a maker, a reader, and how often the maker has listened; it hears only the fifth time."""
    k, r = exchange.store(0, pool_nbytes=GIB), exchange.store(1)
    broker, looks = exchange.broker(0), []
    hear = broker.notices
    monkeypatch.setattr(broker, "notices", lambda: looks.append(1) or (hear() if len(looks) >= 5 else []))
    return k, r, looks


def test_a_large_array_waits_a_moment_for_memory_that_comes_back(late, monkeypatch):
    """What ranks have just let go of is used again, and not made anew beside it."""
    monkeypatch.setattr(segment_table, "WORTH_SECONDS", 1.0)  # however slow the machine is
    k, r, looks = late
    array = k.empty(segment_table.WORTH_NBYTES, np.uint8)
    address = array.ctypes.data
    r.attach(k.handle(array))
    r.drain()
    del array
    looks.clear()
    again = k.empty(segment_table.WORTH_NBYTES, np.uint8)
    assert again.ctypes.data == address
    assert len(looks) == 5


def test_a_wait_for_memory_that_somebody_holds_is_bounded(exchange):
    """It is given up after a fiftieth of what making the memory takes."""
    k, r = exchange.store(0, pool_nbytes=GIB), exchange.store(1)
    array = k.empty(segment_table.WORTH_NBYTES, np.uint8)
    address = array.ctypes.data
    there = r.attach(k.handle(array))
    del array
    again = k.empty(segment_table.WORTH_NBYTES, np.uint8)
    assert again.ctypes.data != address
    assert there.size == again.size
