# ruff: noqa: D102
"""A KeyboardInterrupt at any line loses no hold, no memory and no descriptor."""

import gc
import linecache
import os
import sys

import pytest

from nbparallel.sharing import store
from tests.harness.stores import store_usage

FOLDER = os.path.dirname(store.__file__)
"""All code of sharing may be interrupted."""
EXCEPT = {"adopt", "close", "__del__"}
"""A descriptor on its way from one function to the next has no owner for an instant; `SegmentSource.close`
has two lines between which only the tracer can interrupt; what a finalizer raises is swallowed by Python."""


class Interrupter:
    """Raises KeyboardInterrupt when the `at`-th line of the store's code is about to run."""

    def __init__(self, at):
        self.left = at
        self.place = ""

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        code = frame.f_code
        caller = frame.f_back.f_code.co_name if frame.f_back else ""
        if not code.co_filename.startswith(FOLDER + os.sep) or {code.co_name, caller} & EXCEPT:
            return None
        # A `with` is traced again on its way out, where no real interrupt can fall: its lock would stay
        # locked.
        source = linecache.getline(code.co_filename, frame.f_lineno)
        if event == "line" and not source.lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.place = f"{os.path.relpath(code.co_filename, FOLDER)}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.trace


def make(k, r):
    """Make, drop, and make again from the pool."""
    array = k.zeros(100)
    k.handle(array)
    del array
    k.drain()
    k.zeros(100)


def send(k, r):
    """Send both ways and drop."""
    array = k.zeros(100)
    arrived = r.attach(k.handle(array))
    k.attach(r.handle(arrived))
    del array, arrived
    k.drain()
    r.drain()
    k.drain()


def come_home(k, r):
    """Let go of an own array, and get it back from a rank."""
    array = k.zeros(100)
    arrived = r.attach(k.handle(array))
    private = r.attach(k.handle(array), private=True)
    del array
    k.drain()
    again = k.attach(r.handle(arrived))
    del arrived, private, again
    r.drain()
    k.drain()


def pack(k, r):
    """Make small arrays that share a region, drop some, let one come home."""
    arrays = [k.zeros(100, strategy="file_descriptor") for _ in range(3)]
    arrived = r.attach(k.handle(arrays[1]))
    del arrays[:2]
    arrays.append(k.zeros(50, strategy="file_descriptor"))
    again = k.attach(r.handle(arrived))
    del arrays, arrived
    k.drain()
    del again
    r.drain()
    k.drain()


def come_again(k, r):
    """Send the same array and its successor in the same memory, which stays mapped there."""
    array = k.zeros(100)
    r.attach(k.handle(array))
    r.drain()
    r.attach(k.handle(array))
    del array
    r.drain()
    k.drain()
    array = k.zeros(100)
    r.attach(k.handle(array))
    del array
    r.drain()
    k.drain()


@pytest.mark.matrix(cover=(), size=2)
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("scenario", [make, send, come_home, pack, come_again])
def test_an_interrupt_at_every_line(fresh_exchange, sampled, scenario):
    """Wherever it falls: once the arrays are gone, so is everything that was there for them."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    folders = set()
    for at in sampled(range(1, 5000), one_in=7):
        exchange = fresh_exchange()
        k, r = exchange.store(0), exchange.store(1)
        interrupted = False
        try:
            with Interrupter(at) as interrupter:
                scenario(k, r)
        except KeyboardInterrupt:
            interrupted = True
        folders.add(os.path.dirname(interrupter.place))
        kept = k.zeros(50)
        assert r.attach(k.handle(kept)).shape == (50,), f"unusable after {interrupter.place}"
        del kept
        for _ in range(3):
            r.drain()
            k.drain()
        left = [record for record in (*k.segments(), *r.segments()) if record.phase != "pooled"]
        assert left == [], f"left after {interrupter.place}"
        assert exchange.server.ledger.entries == {}, (
            f"the supervisor keeps something after {interrupter.place}"
        )
        k.trim()
        r.drain()
        mapped = store_usage(r).kept
        r.trim()
        k.drain()
        known = exchange.server.ledger.memories.known
        assert (mapped, known) == (0, {}), f"memory stays mapped after {interrupter.place}"
        exchange.close()
        if interrupted:
            gc.collect(1)  # a traceback may have held what the interrupt left half made
        assert len(os.listdir("/proc/self/fd")) == before, f"descriptors after {interrupter.place}"
        if not interrupted:
            assert at > 100
            assert folders == {"", "lifecycle", "memory", "strategies"}
            return
    pytest.fail("the scenario never ran to its end")
