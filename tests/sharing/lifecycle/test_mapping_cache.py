"""Mappings that stay for the next array in the same memory: who has them, and how long."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from nbparallel.errors import InvalidHandleError, ReadOnlyArrayError, SegmentLostError
from nbparallel.sharing.lifecycle import fetched_segments, memory_pool
from nbparallel.sharing.memory import memory_limits
from nbparallel.wire.frames import Kind
from tests.harness.stores import store_usage


@pytest.fixture
def pair(exchange):
    """Make a notebook and a rank."""
    return exchange.store(0), exchange.store(1)


def asked(exchange, client=1):
    """Return what a client has said since the last call: FETCH and HOLD only."""
    said = [kind for who, kind in exchange.said if who == client and kind in (Kind.FETCH, Kind.HOLD)]
    exchange.said.clear()
    return said


def mapped():
    """Count mappings and descriptors of segments in this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:nbp-")
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return maps, sum("memfd:nbp-" in os.readlink(link) for link in links if link.is_symlink())


def test_the_same_array_comes_again(exchange, pair):
    """It is fetched once: afterwards its mapping is still there, and the hold is taken without a question."""
    k, r = pair
    array = k.zeros(1000)
    handle = k.handle(array)
    there = r.attach(handle)
    address = there.ctypes.data
    del there
    r.drain()
    assert exchange.server.ledger.entries[handle.segment].holders == {0}, "the hold ended with the last array"
    assert asked(exchange) == [Kind.FETCH]
    for turn in range(3):
        array[0] = turn
        there = r.attach(handle)
        assert exchange.server.ledger.entries[handle.segment].holders == {0, 1}
        assert (there[0], there.ctypes.data) == (turn, address)
        assert r.is_shared(there)
        assert not there.flags.writeable
        del there
        r.drain()
    assert asked(exchange) == [Kind.HOLD] * 3


def test_the_next_array_in_the_same_memory(exchange, pair):
    """What the owner's pool gives out again is known there as another segment, in a mapping that is there."""
    k, r = pair
    seen = set()
    for turn in range(5):
        array = k.zeros(1000)
        array[:] = turn
        handle = k.handle(array)
        there = r.attach(handle)
        assert there[-1] == turn
        seen.add((handle.segment, there.ctypes.data))
        del array
        k.drain()
        assert there[-1] == turn, "it is not used again while somebody looks at it"
        del there
        r.drain()
        k.drain()
    assert len(seen) == 5
    assert len({address for _, address in seen}) == 1
    assert asked(exchange) == [Kind.FETCH] + [Kind.HOLD] * 4


def test_a_region_is_fetched_once(exchange, pair):
    """Small arrays that come and go one by one cost one question together."""
    k, r = pair
    arrays = [k.empty(10, "i8", strategy="file_descriptor") for _ in range(5)]
    for number, array in enumerate(arrays):
        array[:] = number
        assert r.attach(k.handle(array))[0] == number
        r.drain()
    assert asked(exchange) == [Kind.FETCH] + [Kind.HOLD] * 4


def test_an_old_handle_never_finds_new_content(exchange, pair):
    """The end of a use is told to who keeps the memory mapped."""
    k, r = pair
    array = k.zeros(1000)
    old = k.handle(array)
    r.attach(old)
    r.drain()
    del array
    k.drain()
    other = k.zeros(1000)
    assert k.handle(other).memory == old.memory
    with pytest.raises(SegmentLostError):
        r.attach(old)
    assert r.attach(k.handle(other)).shape == (1000,)


def test_rights_are_kept_apart(exchange, pair):
    """A mapping for writing serves nobody who may only read, nor the other way round."""
    k, r = pair
    array = k.zeros(1000, for_all=True)
    handle = k.handle(array)
    r.attach(handle, writable=True)[0] = 1
    r.drain()
    there = r.attach(handle)
    assert asked(exchange) == [Kind.FETCH] * 2
    assert not there.flags.writeable
    with pytest.raises(ValueError, match="WRITEABLE"):
        there.flags.writeable = True
    r.attach(handle, writable=True)[1] = 2
    assert array[:2].tolist() == [1, 2]
    assert asked(exchange) == []
    del there
    r.drain()
    assert exchange.server.ledger.entries[handle.segment].holders == {0}
    assert r.attach(handle, writable=True).flags.writeable
    assert asked(exchange) == [Kind.HOLD]


def test_memory_that_others_could_write_to_does_not_become_read_only(exchange, pair):
    """The notebook uses it again under another memory id, and the mapping for writing goes."""
    k, r = pair
    array = k.zeros(1000, for_all=True)
    handle = k.handle(array)
    r.attach(handle, writable=True)
    r.drain()
    before = mapped()[0]
    address = array.ctypes.data
    del array
    k.drain()
    array = k.zeros(1000)
    again = k.handle(array)
    assert array.ctypes.data == address
    assert again.memory not in (0, handle.memory)
    r.drain()
    assert mapped()[0] == before - 1
    with pytest.raises(ReadOnlyArrayError):
        r.attach(again, writable=True)
    asked(exchange)
    assert not r.attach(again).flags.writeable
    assert asked(exchange) == [Kind.FETCH]


def test_rights_that_grow(exchange, pair):
    """A kept mapping for reading stays one when the notebook lets ranks write."""
    k, r = pair
    array = k.zeros(1000)
    r.attach(k.handle(array))
    r.drain()
    k.allow_write(array)
    r.attach(k.handle(array), writable=True)[0] = 1
    there = r.attach(k.handle(array))
    assert not there.flags.writeable
    assert there[0] == 1
    assert asked(exchange) == [Kind.FETCH, Kind.FETCH, Kind.HOLD]


def test_the_owner_gives_memory_back(exchange, pair):
    """Then nobody keeps it mapped, as soon as he looks."""
    k, r = pair
    gc.collect()
    before = mapped()
    array = k.zeros(1000)
    r.attach(k.handle(array))
    r.drain()
    del array
    k.drain()
    assert mapped()[0] == before[0] + 2
    k.trim()
    r.drain()
    assert mapped() == before
    assert exchange.server.ledger.memories.known == {}


def test_a_dead_owners_memory_is_unmapped(exchange, pair):
    """Its memory goes with it, though others kept it mapped."""
    k, r = pair
    array = r.zeros(1000)
    k.attach(r.handle(array))
    k.drain()
    assert store_usage(k).kept == 1
    dead = exchange.kill(1)
    k.drain()
    assert store_usage(k).kept == 0
    del array
    dead.close()


@pytest.mark.parametrize("how", ["trim", "disconnect", "close", "end"])
def test_it_goes_with_everything_else(exchange, pair, how):
    """Whoever gives back what he can, or leaves the session, keeps nothing mapped."""
    k, r = pair
    r.attach(k.handle(k.zeros(1000)))
    r.drain()
    assert store_usage(r).kept == 1
    if how == "disconnect":
        r.disconnect(exchange.broker(1))
    elif how == "end":
        exchange.close()
    else:
        getattr(r, how)()
    assert store_usage(r).kept == 0


def test_it_goes_after_a_while(exchange, pair, monkeypatch):
    """What no array has needed for long is unmapped by who tends the store, who is told when."""
    k, r = pair
    monkeypatch.setattr(memory_pool, "KEEP_SECONDS", 0.05)
    heard = []
    r.pool.on_first.append(lambda: heard.append(1))
    array = k.zeros(1000)
    r.attach(k.handle(array))
    seconds = r.tend()
    assert heard == [1]
    assert 0 < seconds <= 0.05
    monkeypatch.setattr(memory_pool, "KEEP_SECONDS", 0.0)
    assert r.tend() is None
    assert store_usage(r).kept == 0


def test_it_is_bounded(exchange):
    """A few mappings, and not too many bytes; the oldest goes first."""
    k, r = exchange.store(0), exchange.store(1, pool_nbytes=1 << 20)
    arrays = [k.zeros(1000) for _ in range(fetched_segments.MAX_MAPPINGS + 3)]
    for array in arrays:
        r.attach(k.handle(array))
    r.drain()
    assert store_usage(r).kept <= fetched_segments.MAX_MAPPINGS
    asked(exchange)
    r.attach(k.handle(arrays[-1]))
    r.drain()
    assert asked(exchange) == [Kind.HOLD]
    r.attach(k.handle(arrays[0]))
    r.drain()
    assert asked(exchange) == [Kind.FETCH]
    larger = [k.zeros(50_000) for _ in range(4)]
    for array in larger:
        r.attach(k.handle(array))
    r.drain()
    assert store_usage(r).kept_nbytes <= 1 << 20
    r.attach(k.handle(k.zeros(200_000)))
    r.drain()
    assert store_usage(r).kept_nbytes <= 1 << 20


def test_it_is_not_what_an_array_is_refused_for(exchange, pair, monkeypatch):
    """Where no mapping is left, what is kept goes first."""
    k, r = pair
    first, second = k.zeros(1000), k.zeros(1000)
    r.attach(k.handle(first))
    r.drain()
    most = store_usage(r).mapped
    monkeypatch.setattr(memory_limits, "most_mappings", lambda: most)
    assert r.attach(k.handle(second)).shape == (1000,)
    assert store_usage(r).kept == 0


@pytest.mark.parametrize("strategy", ["file_system", "mmap"])
def test_memory_with_a_name_is_kept_while_its_array_lives(exchange, pair, strategy):
    """The same array may be sent again; no other one will lie there, and the name goes with the last hold."""
    k, r = pair
    array = k.zeros(100_000, strategy=strategy)
    (name,) = exchange.server.ledger.names
    r.attach(k.handle(array))
    r.drain()
    asked(exchange)
    again = r.attach(k.handle(array))
    assert asked(exchange) == [Kind.HOLD]
    array[7] = 7
    del array
    k.drain()
    assert again[7] == 7
    assert tuple(exchange.server.ledger.names) == (name,)
    del again
    r.drain()
    k.drain()
    assert exchange.server.ledger.names == {}
    assert not Path(name).exists()
    r.drain()
    assert store_usage(r).kept == 0


def test_a_private_copy_is_not_kept(exchange, pair):
    """Its pages are its own."""
    k, r = pair
    array = k.zeros(1000)
    r.attach(k.handle(array), private=True)[0] = 1
    r.drain()
    assert store_usage(r).kept == 0
    assert r.attach(k.handle(array))[0] == 0


def test_two_sessions_are_kept_apart(exchange, second_exchange):
    """A rank's memory that the notebook keeps mapped goes with that rank's session."""
    k, r = exchange.store(0), exchange.store(1)
    broker = second_exchange.adopt(k)
    other = second_exchange.store(1)
    mine, yours = r.zeros(1000), other.zeros(1000)
    k.attach(r.handle(mine), broker=exchange.broker(0))
    k.attach(other.handle(yours), broker=broker)
    k.drain()
    assert store_usage(k).kept == 2
    yours[:] = 5
    k.disconnect(exchange.broker(0))
    assert store_usage(k).kept == 1
    assert k.attach(other.handle(yours), broker=broker)[0] == 5
    k.disconnect(broker)


def test_an_array_of_one_session_in_another(exchange, second_exchange):
    """What is passed on has an id of the notebook there, and is not used again under it."""
    k, r = exchange.store(0), exchange.store(1)
    broker = second_exchange.adopt(k)
    other = second_exchange.store(1)
    array = r.zeros(1000)
    held = k.attach(r.handle(array), broker=exchange.broker(0))
    handle = k.handle(held, broker=broker)
    assert handle.memory == 0
    assert other.attach(handle).shape == (1000,)
    other.drain()
    assert store_usage(other).kept == 0


@pytest.mark.parametrize("memory", [-1, 1 << 63, "m", None, 7, (1 << 40) + 1, True])
def test_a_damaged_memory_id(exchange, pair, memory):
    """It is refused as every other field: no memory of that id could have become this segment."""
    k, r = pair
    handle = k.handle(k.zeros(1000))
    with pytest.raises(InvalidHandleError):
        r.attach(handle._replace(memory=memory))


def test_a_handle_that_lies_about_size_or_strategy(exchange, pair):
    """Such a handle finds no kept mapping, and is looked at as if there were none."""
    k, r = pair
    array = k.zeros(1000)
    handle = k.handle(array)
    r.attach(handle)
    r.drain()
    with pytest.raises(InvalidHandleError):
        r.attach(handle._replace(segment_nbytes=handle.segment_nbytes * 2))
    r.attach(handle._replace(strategy="file_system"))
    assert asked(exchange) == [Kind.FETCH] * 3
    assert np.array_equal(r.attach(handle), array)


def test_a_handle_that_lies_about_its_memory(exchange, pair):
    """It is refused, or shows another array of the session; later handles are not mixed up by it."""
    k, r = pair
    arrays = [k.zeros(1000) for _ in range(3)]
    for number, array in enumerate(arrays):
        array[:] = number
    handles = [k.handle(array) for array in arrays]
    damaged = handles[2]._replace(memory=handles[1].memory)
    with pytest.raises(SegmentLostError):
        r.attach(damaged)
    r.attach(handles[1])
    assert r.attach(damaged)[0] in (1, 2)
    for number, handle in enumerate(handles):
        assert r.attach(handle)[0] == number
    r.drain()
    assert all(exchange.server.ledger.entries[handle.segment].holders == {0} for handle in handles)


def test_garbage_that_attaches_while_mappings_end(exchange, pair):
    """A user's ``__del__`` may attach what is just being let go of; nothing is lost or held for ever."""
    k, r = pair
    array = k.zeros(1000)
    handle = k.handle(array)

    class Odd:
        def __init__(self):
            self.me = self
            self.array = r.attach(handle)

        def __del__(self):
            r.attach(handle)

    for _ in range(50):
        Odd()
        r.attach(handle)
        r.drain()
    gc.collect()
    r.drain()
    assert exchange.server.ledger.entries[handle.segment].holders == {0}
    assert r.segments() == ()
