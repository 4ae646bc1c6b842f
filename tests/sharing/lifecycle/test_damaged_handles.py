"""F47: whatever a handle says, nothing crashes and nothing outside its segment is ever mapped."""

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from nbparallel.errors import InvalidHandleError, NbParallelError, ReadOnlyArrayError, SegmentLostError
from nbparallel.sharing.memory.array_layout import check_handle
from nbparallel.wire.name_updates import ArrayHandle
from tests.harness.tiers import examples

byte_bounds = getattr(np.lib, "array_utils", np).byte_bounds  # numpy 1.26 has it elsewhere

NUMBERS = [0, 1, -1, 7, 8, 4095, 4096, 4097, 1 << 12, 1 << 31, 1 << 32, 1 << 40, (1 << 40) + 1, 1 << 62]
NUMBERS += [(1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), -(1 << 63) - 1, 1 << 200]
ODD = [None, "8", b"8", 8.0, float("nan"), True, (), [], (8,), [8], {}, object(), np.int64(8), np.zeros(1)]
DTYPES = [
    "<f8",
    "<i4",
    "|u1",
    ">c16",
    "<M8[ns]",
    "|V0",
    "<U0",
    "|S1000000000",
    "<U999999999",
    "O",
    "|O",
    "f8",
]
DTYPES += ["i4,O", "", "<" * 1000, "<f8\0", [("a", "<f8")], [("a", "O")], [("", "|V3"), ("b", "<f8")]]
DTYPES += [{"names": ["a"], "formats": ["<f8"], "offsets": [1 << 30], "itemsize": 1 << 30}]
FIELDS = ArrayHandle._fields


def damaged(random_, handle):
    """Return a copy of `handle` with one to three fields changed."""
    changes = {}
    for name in random_.sample(FIELDS, random_.choice([1, 1, 1, 2, 3])):
        value = getattr(handle, name)
        pick = random_.random()
        if pick < 0.15:
            changes[name] = random_.choice(ODD)
        elif name == "dtype":
            changes[name] = random_.choice(DTYPES)
        elif name == "strategy":
            changes[name] = random_.choice(["file_system", "mmap", "copy", "none_such", "../x", ""])
        elif name in ("shape", "strides"):
            sizes = list(value)
            for _ in range(random_.randint(1, 2)):
                at = random_.randrange(len(sizes) + 1)
                number = random_.choice(NUMBERS + ODD[:6])
                if at == len(sizes) or pick < 0.3:
                    sizes.insert(at, number)
                elif pick < 0.4:
                    del sizes[at]
                elif pick < 0.7 and type(sizes[at]) is int:
                    sizes[at] ^= 1 << random_.randrange(64)
                else:
                    sizes[at] = number
            changes[name] = tuple(sizes)
        elif name == "writable":
            changes[name] = random_.choice([True, False, 2, None])
        elif pick < 0.6:
            changes[name] = value ^ 1 << random_.randrange(64)
        else:
            changes[name] = random_.choice(NUMBERS)
    return handle._replace(**changes)


def inside(array, store, nbytes):
    """Assert that every byte of `array` lies in a mapping of ours, by numpy's own arithmetic."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    assert root.nbytes == nbytes
    low, high = byte_bounds(array)
    if array.size:
        start = root.ctypes.data
        assert start <= low <= high <= start + root.nbytes


@pytest.mark.slow
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("seed", range(4))
def test_damaged_handles_never_map_outside(exchange, seed):
    """Ten thousand damaged handles: each raises one of ours, or is an array inside its segment."""
    random_ = random.Random(seed)
    k, r = exchange.store(0), exchange.store(1)
    sources = [
        k.zeros(1000),
        k.zeros((10, 20), ">i2")[::-1, ::3].T,
        k.zeros((), "M8[s]"),
        k.zeros(5, [("a", "i4"), ("b", "f8", (2,))]),
    ]
    handles = [k.handle(source) for source in sources]
    refused = 0
    for _ in range(10_000):
        handle = damaged(random_, random_.choice(handles))
        store = random_.choice([k, r])
        try:
            array = store.attach(handle, private=random_.random() < 0.1)
        except (InvalidHandleError, SegmentLostError, ReadOnlyArrayError):
            refused += 1
        else:
            inside(array, store, handle.segment_nbytes)
            if array.size and array.nbytes < 1 << 16:
                array.tobytes()
            del array
    assert refused > 5000


@settings(
    deadline=None, max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    offset=st.integers(-64, 8300),
    shape=st.lists(st.integers(0, 40), max_size=4),
    strides=st.lists(st.integers(-3000, 3000), max_size=4),
    dtype=st.sampled_from(["|u1", "<f8", "<c16", "|V0"]),
)
def test_the_check_is_exact(exchange, offset, shape, strides, dtype):
    """A handle is refused if, and only if, some element would lie outside the segment."""
    k = exchange.stores.get(0) or exchange.store(0)
    base = k.zeros(8192, "u1")
    itemsize = np.dtype(dtype).itemsize
    length = min(len(shape), len(strides))
    handle = k.handle(base)._replace(
        offset=offset,
        shape=tuple(shape[:length]),
        strides=tuple(strides[:length]),
        dtype=dtype,
    )
    corners = [offset]
    for count, stride in zip(handle.shape, handle.strides, strict=True):
        corners = [corner + index * stride for corner in corners for index in {0, count - 1}]
    if 0 in handle.shape:
        good = 0 <= offset <= 8192
    else:
        good = min(corners) >= 0 and max(corners) + itemsize <= 8192 and offset >= 0
    if good:
        inside(k.attach(handle), k, 8192)
    else:
        with pytest.raises(InvalidHandleError):
            k.attach(handle)


@pytest.mark.parametrize("field", FIELDS)
def test_what_cannot_be_shown_is_refused_as_well(store, field):
    """Python writes no integer of thousands of digits, and no thousand brackets within each other."""
    handle, nested = store.handle(store.zeros(3)), ()
    for _ in range(5000):
        nested = (nested,)
    for value in (1 << 20_000, nested, [1 << 20_000], [("a", 1 << 20_000)]):
        with pytest.raises(InvalidHandleError) as caught:
            check_handle(handle._replace(**{field: value}))
        assert len(str(caught.value)) < 300


def test_what_equals_a_good_handle_need_not_be_one(store):
    """What was checked once is remembered, but 1 is neither True nor 1.0, and nothing damaged is hashed."""

    class Trap:
        def __hash__(self):
            raise AssertionError("a damaged field was hashed")

    handle = store.handle(store.zeros(1))
    check_handle(handle)
    for field, value in (("shape", (True,)), ("shape", (1.0,)), ("strides", (8.0,)), ("offset", False)):
        assert getattr(handle, field) == value
        with pytest.raises(InvalidHandleError, match="damaged"):
            check_handle(handle._replace(**{field: value}))
    for field in FIELDS:
        for value in (Trap(), (Trap(),)):
            with pytest.raises(InvalidHandleError):
                check_handle(handle._replace(**{field: value}))


def test_not_even_a_handle(store):
    """Anything that is no handle is refused."""
    for thing in (None, 3, "handle", {}, store.zeros(2)):
        with pytest.raises(InvalidHandleError):
            store.attach(thing)
    array = store.zeros(2)
    # inside its segment, but of too many elements
    with pytest.raises(InvalidHandleError, match="numpy refuses"):
        store.attach(store.handle(array)._replace(shape=(1 << 62, 4), strides=(0, 0)))


def test_a_hold_is_given_back_after_a_refusal(exchange):
    """A handle that lies about the size leaves no hold behind at the supervisor."""
    k, r = exchange.store(0), exchange.store(1)
    base = k.zeros(3)
    handle = k.handle(base)
    with pytest.raises(NbParallelError):
        r.attach(handle._replace(segment_nbytes=handle.segment_nbytes * 2))
    r.drain()
    assert exchange.server.ledger.entries[handle.segment].holders == {0}
