"""How much memory a process keeps for its next arrays: a share of what is left, and what just comes back."""

import numpy as np
import pytest

from nbparallel.sharing import Store
from nbparallel.sharing.lifecycle import allocator, memory_pool
from nbparallel.sharing.lifecycle.memory_pool import PoolBudget
from tests.harness.stores import store_usage
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


def test_on_a_machine_with_plenty_a_gibibyte_is_kept():
    """But no more, however much there is."""
    keep = PoolBudget(read=reader(MACHINE))
    assert keep.allows(GIB)
    assert not keep.allows(GIB + 1)


def test_in_a_container_its_limit_counts_not_the_machines_memory():
    """Of 512 MiB, of which 128 MiB are taken, an eighth of the rest: 48 MiB."""
    keep = PoolBudget(read=reader(container(512 * MIB, 128 * MIB)))
    assert keep.allows(48 * MIB)
    assert not keep.allows(48 * MIB + 1)


def test_what_is_kept_already_is_not_missing():
    """A process's own pool would be left if it were given back, so it does not drive itself out."""
    keep = PoolBudget(read=reader(container(512 * MIB, 128 * MIB + 48 * MIB)))
    assert not keep.allows(48 * MIB)
    assert keep.allows(48 * MIB, 48 * MIB)


def test_many_processes_together_leave_something():
    """Each gets a share of what the others have left: thirty full pools are not all of the container."""
    limit, used = 2 * GIB, 0
    for _ in range(30):
        keep = PoolBudget(read=reader(container(limit, used)))
        used += max(size for size in range(0, limit, MIB) if keep.allows(size))
    assert used < limit


def test_little_is_kept_without_a_look():
    """What small arrays leave costs no reading of limits; larger ones read them once a second."""
    reads, read = [], reader(MACHINE)
    keep = PoolBudget(read=lambda path: reads.append(path) or read(path))
    assert keep.allows(memory_pool.LEAST_NBYTES)
    assert not reads
    for _ in range(100):
        keep.allows(2 * memory_pool.LEAST_NBYTES)
    assert reads.count("/proc/meminfo") == 1


def test_one_that_is_too_large_does_not_drive_out_the_others():
    """A block that may not be kept is given back alone, whether it is one's own or another's."""
    store = Store(pool_nbytes=MIB)
    small, large = store.empty(MIB // 2, "u1"), store.empty(2 * MIB, "u1")
    del small, large
    store.drain()
    assert [record.nbytes for record in store.segments()] == [MIB // 2]
    store.close()


def test_a_mapping_that_is_too_large_does_not_drive_out_the_others(exchange):
    """The same where another process's memory is kept mapped."""
    k, r = exchange.store(0), exchange.store(1, pool_nbytes=MIB)
    small, large = k.empty(MIB // 2, "u1"), k.empty(2 * MIB, "u1")
    for array in (small, large):
        r.attach(k.handle(array))
        r.drain()
    assert store_usage(r).kept_nbytes == MIB // 2


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
    monkeypatch.setattr(allocator, "WORTH_SECONDS", 1.0)  # however slow the machine is
    k, r, looks = late
    array = k.empty(allocator.WORTH_NBYTES, np.uint8)
    address = array.ctypes.data
    r.attach(k.handle(array))
    r.drain()
    del array
    looks.clear()
    again = k.empty(allocator.WORTH_NBYTES, np.uint8)
    assert again.ctypes.data == address
    assert len(looks) == 5


def test_a_small_array_does_not_wait(late):
    """Making it anew takes no longer than waiting."""
    k, r, looks = late
    array = k.empty(MIB, np.uint8)
    r.attach(k.handle(array))
    r.drain()
    del array
    looks.clear()
    k.empty(MIB, np.uint8)
    assert len(looks) == 1


@pytest.mark.parametrize(("times", "kept"), [(2, GIB), (1, MIB)], ids=["too large", "not to be kept"])
def test_nobody_waits_for_memory_that_does_not_help(late, monkeypatch, times, kept):
    """It does not fit, or is more than the process may keep, so that it goes back to the system."""
    monkeypatch.setattr(allocator, "WORTH_SECONDS", 1.0)
    k, r, looks = late
    k.pool.budget.fixed = kept
    array = k.empty(times * allocator.WORTH_NBYTES, np.uint8)
    r.attach(k.handle(array))
    r.drain()
    del array
    looks.clear()
    k.empty(allocator.WORTH_NBYTES, np.uint8)
    assert len(looks) == 1


def test_a_wait_for_memory_that_somebody_holds_is_bounded(exchange):
    """It is given up after a fiftieth of what making the memory takes."""
    k, r = exchange.store(0, pool_nbytes=GIB), exchange.store(1)
    array = k.empty(allocator.WORTH_NBYTES, np.uint8)
    address = array.ctypes.data
    there = r.attach(k.handle(array))
    del array
    again = k.empty(allocator.WORTH_NBYTES, np.uint8)
    assert again.ctypes.data != address
    assert there.size == again.size
