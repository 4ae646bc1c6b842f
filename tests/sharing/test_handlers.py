# ruff: noqa: D102
"""A signal handler, or a user's ``__del__``, may share arrays at any line of the store's work."""

import gc
import os
import sys

import pytest

from tests.sharing.test_interrupts import FOLDER, Interrupter, come_again, pack, send

TURNS = 7
"""Every so many lines a handler comes in one run: each run at other lines, all together at all of them."""


class Visitor(Interrupter):
    """Calls `handler` when every `every`-th line of the store's code is about to run, from the `first` on."""

    def __init__(self, first, every, handler):
        super().__init__(first)
        self.every, self.handler, self.visits = every, handler, 0

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(FOLDER + os.sep):
            return None
        if event == "line":
            self.left -= 1
            if self.left <= 0:
                self.left, self.visits = self.every, self.visits + 1
                sys.settrace(None)
                self.handler()
                sys.settrace(self.trace)
        return self.trace


def choose(k, r):
    """Have memory of several sizes in the pool, and take what fits."""
    arrays = [k.empty(size, "u1") for size in (9000, 100, 40_000)]
    del arrays
    k.drain()
    for size in (40_000, 9000, 100, 9000):
        k.empty(size, "u1")[:] = 3
    k.trim()


@pytest.mark.matrix(cover=())
@pytest.mark.time_limit(60)
@pytest.mark.parametrize("scenario", [choose, send, pack, come_again])
def test_a_handler_may_share_at_any_line(fresh_exchange, scenario):
    """What it makes, sends and drops takes nobody's memory, and nothing stays."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for first in range(1, TURNS + 1):
        exchange = fresh_exchange()
        k, r = exchange.store(0), exchange.store(1)
        seen = []

        def handler(k=k, r=r, seen=seen):
            number = visitor.visits % 251
            large, small = k.empty(9000, "u1"), k.empty(100, "u1", strategy="file_descriptor")
            large[:] = small[:] = number
            seen.append((r.attach(k.handle(large))[10:20], small[10:20], number))
            del large, small
            if number % 3 and len(seen) > 1:
                del seen[-2]
            k.drain()
            r.drain()

        with Visitor(first, TURNS, handler) as visitor:
            scenario(k, r)
        assert visitor.visits > 10
        assert all((one == number).all() and (other == number).all() for one, other, number in seen)
        seen.clear()
        for _ in range(3):
            r.drain()
            k.drain()
        left = [record for record in (*k.segments(), *r.segments()) if record.phase != "pooled"]
        assert left == []
        assert exchange.server.ledger.entries == {}
        r.trim()
        k.trim()
        exchange.close()
        assert len(os.listdir("/proc/self/fd")) == before
