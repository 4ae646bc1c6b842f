"""Mappings that stay for the next array in the same memory: who has them, and how long."""

import pytest

from nbparallel.errors import InvalidHandleError, ReadOnlyArrayError, SegmentLostError
from nbparallel.sharing.lifecycle import imported_segments
from nbparallel.sharing.memory import memory_limits
from nbparallel.wire.frames import Kind
from tests.harness.stores import store_usage
from tests.sharing.lifecycle.test_segment_lifetime import ours


@pytest.fixture
def pair(exchange):
    """Make a notebook and a rank."""
    return exchange.store(0), exchange.store(1)


def asked(exchange, client=1):
    """Return what a client has said since the last call: FETCH and HOLD only."""
    said = [kind for who, kind in exchange.said if who == client and kind in (Kind.FETCH, Kind.HOLD)]
    exchange.said.clear()
    return said


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
    before = ours()[0]
    address = array.ctypes.data
    del array
    k.drain()
    array = k.zeros(1000)
    again = k.handle(array)
    assert array.ctypes.data == address
    assert again.memory not in (0, handle.memory)
    r.drain()
    assert ours()[0] == before - 1
    with pytest.raises(ReadOnlyArrayError):
        r.attach(again, writable=True)
    asked(exchange)
    assert not r.attach(again).flags.writeable
    assert asked(exchange) == [Kind.FETCH]


def test_it_is_bounded(exchange):
    """A few mappings, and not too many bytes; the oldest goes first."""
    k, r = exchange.store(0), exchange.store(1, pool_nbytes=1 << 20)
    arrays = [k.zeros(1000) for _ in range(imported_segments.MAX_MAPPINGS + 3)]
    for array in arrays:
        r.attach(k.handle(array))
    r.drain()
    assert store_usage(r).kept <= imported_segments.MAX_MAPPINGS
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
    """Where hardly any mapping is left, what is kept does not count."""
    k, r = pair
    first, second = k.zeros(1000), k.zeros(1000)
    r.attach(k.handle(first))
    r.drain()
    assert store_usage(r).kept == 1
    monkeypatch.setattr(memory_limits, "most_mappings", lambda: 1)
    assert r.attach(k.handle(second)).shape == (1000,)


@pytest.mark.parametrize("memory", [-1, 1 << 63, "m", None, 7, (1 << 40) + 1, True])
def test_a_damaged_memory_id(exchange, pair, memory):
    """It is refused as every other field: no memory of that id could have become this segment."""
    k, r = pair
    handle = k.handle(k.zeros(1000))
    with pytest.raises(InvalidHandleError):
        r.attach(handle._replace(memory=memory))


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
