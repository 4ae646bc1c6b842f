"""How long memory lives: as long as anybody looks at it, and no longer."""

import gc
import os
import threading
from pathlib import Path

import pytest

from nbparallel.errors import SegmentLostError


def ours():
    """Count mappings and descriptors of segments in this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:nbp-")
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return maps, sum("memfd:nbp-" in os.readlink(link) for link in links if link.is_symlink())


@pytest.fixture
def before():
    """Return what was there before the test."""
    gc.collect()
    return ours()


def test_a_view_keeps_the_memory(store, before):
    """The array that was made may go; any view of a view keeps the memory, the last one frees it."""
    array = store.zeros((100, 100))
    array[7, 7] = 7
    view = memoryview(array[5:][2])
    del array
    store.drain()
    assert view[7] == 7
    assert ours()[0] == before[0] + 1
    del view
    store.drain()
    store.trim()
    assert ours() == before


def test_memory_is_reused_under_a_new_id(store):
    """A freed segment of about the size serves the next array, which no old handle finds."""
    array = store.zeros(1000)
    array[:] = 1
    handle, address = store.handle(array), array.ctypes.data
    del array
    again = store.zeros(1010)
    assert again.ctypes.data == address
    assert not again.any()
    assert store.handle(again).segment != handle.segment
    with pytest.raises(SegmentLostError):
        store.attach(handle)
    other = store.zeros(100_000)
    assert other.ctypes.data != address


def test_others_keep_the_memory_from_being_reused(exchange):
    """A segment that a rank still looks at is not reused when its maker has let it go."""
    k, r = exchange.store(0), exchange.store(1)
    array = k.zeros(1000)
    array[:] = 1
    handle = k.handle(array)
    there = r.attach(handle)
    address = array.ctypes.data
    del array
    k.drain()
    other = k.zeros(1000)
    other[:] = 2
    assert other.ctypes.data != address
    assert there[0] == 1
    back = k.attach(r.handle(there))
    assert back.ctypes.data == address
    assert back[0] == 1
    del back
    k.drain()
    del there
    r.drain()
    assert k.zeros(1000).ctypes.data == address
    with pytest.raises(SegmentLostError):
        r.attach(handle)


def test_arrays_outlive_the_session(exchange, before):
    """After a session has ended its arrays are readable, and the notebook's own still shareable."""
    k, r = exchange.store(0), exchange.store(1)
    mine, theirs = k.zeros(10), r.zeros(10)
    k.handle(mine)
    held = k.attach(r.handle(theirs))
    exchange.close()
    assert k.is_shared(mine)
    assert not k.is_shared(held)
    assert held[0] == 0
    copy = k.share(held)
    assert copy is not held
    del mine, held, copy
    k.drain()
    assert not [record for record in k.segments() if record.phase == "released"]


def test_memory_that_a_dying_session_knew_is_not_reused(exchange):
    """A rank that is being killed may write once more: what it could reach is not used again."""
    k = exchange.store(0)
    array = k.zeros(1000)
    k.handle(array)
    k.disconnect(exchange.broker(0))
    del array
    k.drain()
    assert k.segments() == ()


@pytest.mark.parametrize("strategy", [None, "file_descriptor"], ids=["alone", "packed"])
def test_many_threads_at_once(store, before, strategy):
    """Threads that make, view, drop and share lose nothing and mix nothing up."""
    errors = []

    def work(number):
        try:
            for turn in range(150):
                array = store.empty(500 + turn % 3, "i8", strategy=strategy)
                array[:] = number
                view = store.attach(store.handle(array[::-1]))
                del array
                assert (view == number).all()
        except BaseException as error:  # noqa: BLE001  # the test asserts that there is none
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert errors == []
    store.drain()
    store.trim()
    assert ours() == before
    assert store.segments() == ()
