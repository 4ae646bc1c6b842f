# ruff: noqa: D102
"""A KeyboardInterrupt at any line loses no hold, no memory and no descriptor."""

import gc
import os
import sys

import pytest

from nbparallel.sharing import holdings, store

FILES = {holdings.__file__, store.__file__}


class Interrupter:
    """Raises KeyboardInterrupt when the `at`-th line of the store's code is about to run."""

    def __init__(self, at):
        self.left = at

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
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


@pytest.mark.time_limit(60)
@pytest.mark.parametrize("scenario", [make, send, come_home])
def test_an_interrupt_at_every_line(fresh_exchange, scenario):
    """Wherever it falls: once the arrays are gone, so is everything that was there for them."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for at in range(1, 2000):
        exchange = fresh_exchange()
        k, r = exchange.store(0), exchange.store(1)
        interrupted = False
        try:
            with Interrupter(at):
                scenario(k, r)
        except KeyboardInterrupt:
            interrupted = True
        kept = k.zeros(50)
        assert r.attach(k.handle(kept)).shape == (50,), f"unusable after line {at}"
        del kept
        for _ in range(3):
            r.drain()
            k.drain()
        left = [record for record in (*k.segments(), *r.segments()) if record.phase != "pooled"]
        assert left == [], f"left after line {at}"
        assert exchange.desk.segments == (), f"the supervisor keeps something after line {at}"
        k.trim()
        r.trim()
        exchange.close()
        if interrupted:
            gc.collect(1)  # a traceback may have held what the interrupt left half made
        assert len(os.listdir("/proc/self/fd")) == before, f"descriptors after line {at}"
        if not interrupted:
            assert at > 100
            return
    pytest.fail("the scenario never ran to its end")
