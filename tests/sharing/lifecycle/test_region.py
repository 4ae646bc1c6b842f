"""Small arrays lie in regions: their rooms come and go, and nobody's bytes are ever another's."""

import gc

import numpy as np
import pytest

from nbparallel.errors import SharedMemoryFullError
from nbparallel.sharing import Store
from nbparallel.sharing.lifecycle import segment_table
from nbparallel.sharing.lifecycle.segment import JOIN_SHARE
from nbparallel.sharing.lifecycle.segment_table import FIRST_NBYTES
from nbparallel.sharing.memory.memory_limits import MemoryGuard
from nbparallel.sharing.strategies.memfd import FileDescriptorStrategy
from nbparallel.testing.strategies import temporary_registry

STRATEGIES = ["file_descriptor", "file_system", "file_region", "mmap"]


def own(store):
    """Return the living segments of a store."""
    return [record for record in store.segments() if record.own and record.phase != "pooled"]


@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_does_not_grow(strategy):
    """Arrays that are made and dropped use the same bytes again while others live."""
    store = Store()
    keep = store.zeros(100, strategy=strategy)
    addresses = set()
    for turn in range(20_000):
        array = store.empty(100 + turn % 3 * 50, strategy=strategy)
        addresses.add(array.ctypes.data)
        del array
    assert len(own(store)) == 1
    assert len(addresses) <= FIRST_NBYTES // 500 // JOIN_SHARE
    assert not keep.any()
    del keep
    store.close()


def test_what_was_shown_is_not_used_again(exchange):
    """Another process may still look at an array that its maker has dropped."""
    store, other = exchange.store(0), exchange.store(1)
    keep = store.zeros(100, strategy="file_descriptor")
    array = store.zeros(100, strategy="file_descriptor")
    array[:] = 7
    handle, address = store.handle(array), array.ctypes.data
    there = other.attach(handle)
    del array
    others = [store.empty(100, strategy="file_descriptor") for _ in range(1000)]
    for one in others:
        one[:] = 0
    assert there.tolist() == [7] * 100
    back = store.attach(other.handle(there))
    assert back.ctypes.data == address
    del back, keep, others, there


@pytest.mark.slow
def test_ten_arrays_cost_a_megabyte():
    """The first region is small, the next ones hold as much as all before, up to 16 MiB."""
    store = Store()
    arrays = [store.zeros(10, strategy="file_descriptor") for _ in range(10)]
    assert [record.nbytes for record in own(store)] == [FIRST_NBYTES]
    arrays += [store.zeros(100, strategy="file_descriptor") for _ in range(70_000)]
    sizes = [record.nbytes >> 20 for record in own(store)]
    assert sizes[-1] == max(sizes) == 16
    assert len(sizes) <= 9
    assert sum(sizes) << 20 < 2 * 70_000 * 832
    del arrays
    store.close()


def test_where_little_is_left_a_region_is_small():
    """An array that fits is not refused because a region does not."""
    left = 500 << 10

    class Tight(MemoryGuard):
        def require(self, nbytes):
            if nbytes > left:
                raise SharedMemoryFullError(f"a shared array needs {nbytes}")

    with temporary_registry(FileDescriptorStrategy(Tight())):
        store = Store()
        array = store.zeros(100_000, "u1", strategy="file_descriptor")
        assert own(store)[0].nbytes <= left
        left = 10
        with pytest.raises(SharedMemoryFullError):
            store.zeros(200_000, "u1", strategy="file_descriptor")
        assert store.is_shared(store.zeros(100, strategy="file_descriptor"))
        del array
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [False, True])
def test_what_stays_keeps_no_end_of_what_went(exchange, monkeypatch, sent):
    """One array that stays in every thousand, and was sent, does not keep all others' memory for ever."""
    monkeypatch.setattr(segment_table, "MOST_WASTED_NBYTES", 4 << 20)
    store, other = exchange.store(0), exchange.store(1)
    kept, there, most = [], [], 0
    for turn in range(60):
        arrays = [store.zeros(500, strategy="file_descriptor") for _ in range(100)]
        if sent:
            there.append([other.attach(store.handle(x)) for x in arrays][50])
        kept.append(arrays[50])
        kept[-1][:] = turn
        del arrays
        other.drain()
        store.drain()
        most = max(most, sum(record.nbytes for record in own(store)))
    assert most <= 4 * (4 << 20)
    assert all((x == turn).all() for turn, x in enumerate(kept))
    assert all((x == turn).all() for turn, x in enumerate(there))
    del kept, there
    other.drain()
    store.drain()
    assert own(store) == []


def test_the_collector_may_come_anywhere(store):
    """What it ends and makes in the middle of our work takes nobody's room."""
    wrong = []

    class Odd:
        def __init__(self, value):
            self.me, self.value = self, value
            self.array = store.empty(value % 7 * 300 + 1, "u1", strategy="file_descriptor")
            self.array[:] = value % 251

        def __del__(self):
            if (self.array != self.value % 251).any():
                wrong.append(self.value)
            store.share(np.full(100, 255, "u1"), strategy="file_descriptor")[:] = 254

    kept = []
    before = gc.get_threshold()
    gc.set_threshold(5, 1, 1)
    try:
        for turn in range(1500):
            Odd(turn)
            kept.append((store.empty(turn % 5 * 200 + 1, "u1", strategy="file_descriptor"), turn % 249))
            kept[-1][0][:] = turn % 249
            if turn % 3:
                del kept[turn % len(kept)]
    finally:
        gc.set_threshold(*before)
    assert all((array == value).all() for array, value in kept)
    kept.clear()
    gc.collect()
    store.drain()
    assert wrong == []
    assert own(store) == []
