"""Arrays of every dtype and layout, from one store through a handle into another."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from nbparallel.errors import (
    NotAnArrayError,
    ObjectArrayError,
    ReadOnlyArrayError,
    SegmentLostError,
)
from nbparallel.sharing import is_shared, share, zeros
from tests.harness.tiers import examples

byte_bounds = getattr(np.lib, "array_utils", np).byte_bounds  # numpy 1.26 has it elsewhere

DTYPES = hnp.scalar_dtypes() | hnp.array_dtypes(
    st.sampled_from([np.dtype("<i2"), np.dtype(">f8"), np.dtype("M8[s]"), np.dtype("S3")]),
    allow_subarrays=True,
)


@st.composite
def views(draw):
    """Any view of any array: transposed, sliced, reversed, stepped, broadcast."""
    dtype = draw(DTYPES)
    array = np.zeros(draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)), dtype)
    content = draw(st.binary(min_size=array.nbytes, max_size=array.nbytes))
    if array.nbytes:
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(content, np.uint8)
    if array.ndim:
        array = array.transpose(draw(st.permutations(range(array.ndim))))
        indices = draw(hnp.basic_indices(array.shape, allow_newaxis=True, allow_ellipsis=True))
        sliced = array[indices]
        array = sliced if isinstance(sliced, np.ndarray) else array
    if draw(st.booleans()):
        array = np.broadcast_to(array, (draw(st.integers(0, 3)), *array.shape))
    return array


def same(left, right):
    """Return whether two arrays have equal bytes, shape and dtype; NaN and padding included."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if not left.size or not left.itemsize:
        return True
    raw = np.dtype((np.void, left.itemsize))
    as_bytes = [
        np.ascontiguousarray(as_strided(a, writeable=False)).reshape(-1).view(raw).tobytes()
        for a in (left, right)
    ]
    return as_bytes[0] == as_bytes[1]


@settings(
    deadline=None, max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(views())
def test_any_view_arrives_as_what_it_is(exchange, array):
    """Shape, dtype, strides and every byte come through; both ends are the same memory."""
    sender = exchange.stores.get(0) or exchange.store(0)
    receiver = exchange.stores.get(1) or exchange.store(1)
    shared = sender.share(array)
    assert sender.is_shared(shared)
    assert same(shared, array)
    low, high = byte_bounds(array) if array.size else (0, 0)
    if high - low <= array.nbytes:
        assert shared.strides == array.strides
    arrived = receiver.attach(sender.handle(shared))
    assert same(arrived, array)
    assert arrived.strides == shared.strides
    assert not arrived.flags.writeable
    del shared, arrived
    sender.drain()
    receiver.drain()
    sender.drain()


def test_read_only_stays_read_only(exchange):
    """Neither the flag, nor a base, nor the buffer makes a read-only array writable."""
    k, r = exchange.store(0), exchange.store(1)
    base = k.zeros(10)
    array = r.attach(k.handle(base))
    node = array
    while isinstance(node, np.ndarray):
        with pytest.raises(ValueError, match="WRITEABLE"):
            node.flags.writeable = True
        node = node.base
    assert memoryview(node).readonly
    with pytest.raises(ReadOnlyArrayError):
        r.attach(k.handle(base), writable=True)
    with pytest.raises(ReadOnlyArrayError, match="copy"):
        r.allow_write(array)
    k.allow_write(base)
    r.attach(k.handle(base), writable=True)[0] = 1
    assert base[0] == array[0] == 1


def test_a_ranks_own_arrays_are_writable_for_all(exchange):
    """Only the notebook's arrays are protected."""
    k, r = exchange.store(0), exchange.store(1)
    mine = r.zeros(3)
    assert r.location(mine).for_all
    k.attach(r.handle(mine), writable=True)[:] = 4
    assert mine.tolist() == [4, 4, 4]
    assert not k.location(k.zeros(3)).for_all


def test_what_comes_home_is_the_makers_own(exchange):
    """An array that a rank sends back to its maker is the maker's memory, with the maker's right."""
    k, r = exchange.store(0), exchange.store(1)
    base = k.zeros(10)
    there = r.attach(k.handle(base))
    home = k.attach(r.handle(there[2:5]))
    home[0] = 3
    assert base[2] == 3
    assert there[2] == 3


def test_private_mappings_are_copy_on_write(exchange):
    """What is written to a private mapping stays in its process, and is not shared."""
    k, r = exchange.store(0), exchange.store(1)
    base = k.zeros(1000)
    base[:] = 1
    one, two = (r.attach(k.handle(base), private=True) for _ in range(2))
    one[0] = 2
    assert (base[0], one[0], two[0]) == (1, 2, 1)
    assert not r.is_shared(one)
    home = k.attach(k.handle(base), private=True)
    home[0] = 3
    assert base[0] == 1
    segment = k.location(base).segment
    assert exchange.server.ledger.entries[segment].holders == {0, 1}
    del base, home
    k.drain()
    assert exchange.server.ledger.entries[segment].holders == {1}
    del one, two
    r.drain()
    k.drain()
    assert exchange.server.ledger.entries == {}


def test_empty_arrays_at_every_edge(exchange):
    """An array without elements is found by what it views, although its address may be another's."""
    k, r = exchange.store(0), exchange.store(1)
    arrays = [k.zeros(512) for _ in range(20)]
    for array in arrays:
        for view in (array[:0], array[512:], array[::-1][:0], array.reshape(8, 64)[:, 64:]):
            assert k.location(view).segment == k.location(array).segment
            arrived = r.attach(k.handle(view))
            assert (arrived.shape, arrived.strides) == (view.shape, view.strides)
    assert not k.is_shared(np.empty(0))
    nothing = k.zeros((3, 0))
    assert k.is_shared(nothing)
    assert r.attach(k.handle(nothing)).shape == (3, 0)


def test_layout_of_a_copy(store):
    """Dense layouts stay as they are; gaps are dropped and the order of axes stays."""
    cube = np.arange(24).reshape(2, 3, 4)
    for array in (cube.T, np.asfortranarray(cube), cube[::-1], cube[:, ::-1, :].transpose(1, 2, 0)):
        assert store.share(array).strides == array.strides
    windows = sliding_window_view(np.arange(1000.0), 100)
    shared = store.share(windows)
    assert shared.strides == windows.strides
    assert store.location(shared).stop == 8000
    gaps = np.zeros((100, 100))[::10, ::10]
    assert store.share(gaps).strides == (80, 8)
    assert store.share(gaps.T).strides == (8, 80)


def test_share_returns_what_is_shared_already():
    """`share` copies once, never again, and a view of a shared array is shared."""
    array = np.arange(10)
    shared = share(array)
    assert shared is not array
    assert share(shared) is shared
    view = shared[2:]
    assert share(view) is view
    array[0] = 99
    assert shared[0] == 0


def test_share_takes_lists_and_refuses_subclasses():
    """What numpy converts without loss is converted, what would lose something is refused."""
    assert share([1, 2, 3]).tolist() == [1, 2, 3]
    with pytest.raises(NotAnArrayError, match="not dict"):
        share({"a": 1})
    with pytest.raises(NotAnArrayError, match="MaskedArray"):
        share(np.ma.masked_array([1, 2], [True, False]))
    with pytest.raises(ObjectArrayError, match="objects"):
        share(np.array([object()]))
    with pytest.raises(ObjectArrayError):
        zeros(3, dtype=object)


def test_share_gives_a_writable_array():
    """A read-only view of shared memory that belongs to us becomes a writable one; flags of others stay."""
    frozen = np.broadcast_to(np.arange(3), (2, 3))
    shared = share(frozen)
    assert shared.flags.writeable
    view = shared[0]
    view.flags.writeable = False
    again = share(view)
    assert again.flags.writeable
    assert not view.flags.writeable
    assert is_shared(again)


@pytest.mark.parametrize("shape", [(), 5, (2, 3), [2, 3], (0,), np.int64(4)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_makers_do_as_numpy(shape, order):
    """`zeros` and its kin give numpy's shape, dtype and strides."""
    for dtype in ("f4", "S", "U3", "M8[s]"):
        ours, numpys = zeros(shape, dtype, order), np.zeros(shape, dtype, order)
        assert (ours.shape, ours.dtype, ours.tolist()) == (numpys.shape, numpys.dtype, numpys.tolist())
        assert ours.flags.f_contiguous == numpys.flags.f_contiguous


def test_makers_refuse_nonsense():
    """Negative sizes, unknown orders and impossible sizes are errors of their own kind."""
    with pytest.raises(ValueError, match="negative"):
        zeros(-1)
    with pytest.raises(ValueError, match="order"):
        zeros(1, order="K")
    with pytest.raises(MemoryError):
        zeros(1 << 50)
    with pytest.raises((MemoryError, ValueError)):
        zeros((1 << 40, 1 << 40))


def test_without_a_session_handles_work_at_home(store):
    """A process that is in no session can still make and attach handles of its own."""
    array = store.zeros((3, 3))
    assert np.shares_memory(store.attach(store.handle(array.T)), array)
    foreign = store.handle(array)._replace(segment=1 << 40 | 1, memory=0)
    with pytest.raises(SegmentLostError):
        store.attach(foreign)


def test_two_sessions_in_one_kernel(exchange, second_exchange):
    """An array that came from one session can be sent into another: the same memory under another id."""
    kernel, other = exchange.store(0), second_exchange
    rank_of_a, rank_of_b = exchange.store(1), other.store(1)
    a, b = kernel_brokers = (exchange.broker(0), other.adopt(kernel))
    assert len(kernel_brokers) == 2
    with pytest.raises(ValueError, match="broker="):
        kernel.handle(kernel.zeros(1))
    made = rank_of_a.zeros(10)
    here = kernel.attach(rank_of_a.handle(made), writable=True, broker=a)
    there = rank_of_b.attach(kernel.handle(here[2:], broker=b), writable=True)
    there[0] = 5
    assert made[2] == 5
    back = kernel.attach(rank_of_b.handle(there), broker=b)
    assert back[0] == 5
    exchange.kill(1)
    kernel.disconnect(a)
    assert kernel.is_shared(here), "the other session still knows it"
    assert kernel.handle(here, broker=b) is not None
    kernel.disconnect(b)
    assert not kernel.is_shared(here)
    assert here[2] == 5
