"""Objects on their way: which memory they bring, what is copied, and that no byte is lost."""

import mmap
import os
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from nbparallel.errors import ProtocolError
from nbparallel.transfer.pickle_format import checksum_buffer
from nbparallel.transfer.pickling import LARGE, dumps, loads
from tests.transfer.standin import StandinStore


def in_child(action):
    """Run `action` in a forked child; fail if it raises there."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  whatever it is, the parent has to hear of it
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_shared_arrays_inside_objects_travel_as_handles(store):
    """A shared array, and a view of it, inside any object is the same memory for the receiver."""
    x = store.empty((1000, 1000))
    x[:] = 0
    pickled = dumps({"deep": [(x, x[2:4, ::2])], "same": x}, store)
    assert len(pickled.data) < 2000
    got = loads(pickled.data, store)
    x[2, 4] = 7
    whole, view = got["deep"][0]
    assert whole[2, 4] == view[0, 2] == 7
    assert got["same"] is whole
    assert pickled.segments == (1,)
    assert pickled.keep[0] is x


def test_shared_array_arrives_with_its_rights(store):
    """An array is writable for the receiver only if it was shared for writing and its flag allows it."""
    x = store.empty((4,))
    assert not loads(dumps([x], store).data, store)[0].flags.writeable
    store.open.add(1)
    assert loads(dumps([x], store).data, store)[0].flags.writeable
    x.flags.writeable = False
    assert not loads(dumps([x], store).data, store)[0].flags.writeable


def test_large_buffers_lie_once_in_a_segment(store):
    """Two receivers of a large buffer map the same segment, and a write of one is not seen by anybody."""
    x = np.arange(100_000.0)
    pickled = dumps({"x": x, "y": np.ones(5)}, store)
    assert len(pickled.data) < 2000
    assert len(pickled.segments) == 1
    first, second = loads(pickled.data, store), loads(pickled.data, store)
    first["x"][0] = 99
    first["y"][0] = 99
    assert second["x"][0] == 0
    np.testing.assert_array_equal(loads(pickled.data, store)["x"], x)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # numpy's threads, from 3.12 on
def test_private_mapping_through_a_second_process(store):
    """What a receiver in another process writes to its large buffer stays there."""
    pickled = dumps(np.zeros(LARGE), store)

    def receive():
        mine = loads(pickled.data, store)
        mine[:] = 5
        assert mine.sum() == 5 * LARGE
        base = mine
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base.obj if isinstance(base, memoryview) else base, np.ndarray | mmap.mmap)

    in_child(receive)
    assert loads(pickled.data, store).sum() == 0


@pytest.mark.parametrize(
    "x",
    [
        np.ones((600, 600))[:, ::2],
        np.asfortranarray(np.arange(1e5).reshape(100, 1000)),
        np.arange(1e5)[::-1],
        np.zeros(50_000, dtype=[("a", "<i4"), ("b", "<f8")]),
    ],
    ids=["gaps", "fortran", "reversed", "structured"],
)
def test_any_layout_goes_out_of_band(store, x):
    """A large array of any layout does not swell the stream."""
    pickled = dumps(x, store)
    assert len(pickled.data) < 2000
    np.testing.assert_array_equal(loads(pickled.data, store), x)


def test_read_only_buffers_stay_read_only(store):
    """A large read-only array arrives read-only, a writable one writable."""
    x = np.arange(1e5)
    assert loads(dumps(x, store).data, store).flags.writeable
    x.flags.writeable = False
    assert not loads(dumps(x, store).data, store).flags.writeable


def test_large_stream_lies_in_the_segment(store):
    """A large object without buffers (a long list) is written once too, not sent to each rank."""
    numbers = list(range(200_000))
    pickled = dumps(numbers, store)
    assert len(pickled.data) < 200
    assert loads(pickled.data, store) == numbers


def test_cycles_travel(store):
    """An object that contains itself arrives as one that contains itself."""
    ring = [1]
    ring.append(ring)
    got = loads(dumps(ring, store).data, store)
    assert got[1] is got


@given(st.binary(max_size=200))
def test_damaged_messages_are_refused(data):
    """Bytes that are no message are an error of ours, never a crash."""
    store = StandinStore()
    with pytest.raises(ProtocolError):
        loads(data, store)


@given(st.integers(0, 300_000 - 1), st.integers(1, 255))
def test_checksum_sees_every_byte(position, change):
    """Changing any one byte of a large buffer changes its checksum."""
    data = bytearray(300_000)
    before = checksum_buffer(memoryview(data))
    data[position] ^= change
    assert checksum_buffer(memoryview(data)) != before


def test_checksum_sees_a_swap():
    """The order of the words counts."""
    x = np.arange(100_000)
    before = checksum_buffer(memoryview(x).cast("B"))
    x[[1, 9]] = x[[9, 1]]
    assert checksum_buffer(memoryview(x).cast("B")) != before


@pytest.mark.slow
@given(
    st.recursive(st.integers() | st.text() | st.binary(), lambda inner: st.lists(inner) | st.tuples(inner))
)
def test_plain_values_round_trip(value):
    """Any nest of plain values arrives equal."""
    assert loads(dumps(value, StandinStore()).data, StandinStore()) == value
