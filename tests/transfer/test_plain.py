"""Plain values take the short way, and arrive as by the long one."""

import numpy as np
import pytest

from nbparallel.errors import UnpicklableError
from nbparallel.transfer import pickling
from nbparallel.transfer.pickling import dumps, loads
from tests.transfer.standin import StandinStore

PLAIN = [
    0, -3, 1 << 63, True, None, 2.5, float("inf"), -0.0, 1 + 2j, "", "ä\ud800", "x" * 4096, b"\x00y",
    np.float64(1.5), np.float32(-0.0), np.int8(-7), np.uint64(1 << 63), np.bool_(True), np.complex64(1j),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__} {str(value)[:9]!r}")
def test_plain_values_arrive_without_our_pickler(value, monkeypatch):
    """Neither side needs a pickler of ours; type and bits are the same."""
    store = StandinStore()
    monkeypatch.setattr(pickling, "serialise", None)
    monkeypatch.setattr(pickling, "unpickle", None)
    pickled = dumps(value, store, broker=None)
    assert (pickled.segments, pickled.keep, pickled.copied_nbytes) == ((), (), len(pickled.data))
    for data in (pickled.data, memoryview(pickled.data)):
        found = loads(data, store)
        assert type(found) is type(value)
        assert repr(found) == repr(value)


class Text(str):
    """A subclass, which may have a state of its own."""


@pytest.mark.parametrize("value", ["x" * 4097, 1 << 64, Text("x"), [1], np.zeros(1), np.datetime64("2026")])
def test_other_values_go_the_long_way(value, monkeypatch):
    """What is long, or no plain number or text, needs the pickler that knows about shared arrays."""
    with monkeypatch.context() as patch:
        patch.setattr(pickling, "serialise", None)
        with pytest.raises(TypeError):
            dumps(value, StandinStore())
    assert np.array_equal(loads(dumps(value, StandinStore()).data, StandinStore()), value)


def test_a_damaged_plain_value_raises():
    """As any other message that cannot be rebuilt."""
    data = dumps(1.5, StandinStore()).data
    with pytest.raises(UnpicklableError):
        loads(data[:-3], StandinStore())
