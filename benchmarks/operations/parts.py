"""One small operation cut into its parts, each timed on one rank alone, as if the others were always on time.

Rank 0 writes into the control segment what the others would: that they have arrived and called the same, or
that a message lies there.  Then an operation never waits, and what it takes is its own work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from nbparallel.distributed import Communicator
from nbparallel.distributed.point_to_point.ring import RECORD, RingWriter
from nbparallel.testing.ranks import context_of
from nbparallel.wire.control import GENERATIONS, SLOT_HEADER

FAR = 1 << 60
ROUNDS = 60
Seconds = dict[str, float]


def least(call: Callable[[], object], times: int, ready: Callable[[], object] = lambda: None) -> float:
    """Return the processor seconds of one call: the least of many batches, each behind a `ready`."""
    best = 1e9
    for _ in range(ROUNDS):
        ready()
        began = time.process_time()
        for _ in range(times):
            call()
        best = min(best, (time.process_time() - began) / times)
    return best


def pretend(c: Communicator) -> None:
    """Let all others have arrived at every meeting to come, and be done with it."""
    protocol = c._world.protocol
    for _, arrive, _ in protocol._peers[0]:
        protocol._words[arrive] = FAR
    for _, done in protocol._readers:
        protocol._words[done] = FAR


def mirror(c: Communicator, call: Callable[[], object]) -> None:
    """Let the others' slots of all generations hold what this rank writes there when it calls."""
    protocol, waiter = c._world.protocol, c._world.protocol._waiter
    announce = waiter.announce
    octets, nbytes = protocol._octets, SLOT_HEADER + protocol.payload_nbytes

    def copy(*arguments: Any) -> None:
        mine = protocol._mine[protocol.generation] * 8
        for _, _, slot in protocol._peers[protocol.generation]:
            start = slot * 8
            octets[start : start + nbytes] = bytes(octets[mine : mine + nbytes])
        announce(*arguments)

    waiter.announce = copy  # type: ignore[method-assign]
    for _ in range(2 * GENERATIONS):
        call()
    del waiter.announce


def parts_of_all_reduce(c: Communicator) -> Seconds:
    """Return what an all_reduce of 8 bytes and its parts take."""
    pretend(c)
    x = np.zeros(1)
    mirror(c, lambda: c.all_reduce(x))
    reduction, protocol = c._world.all_reduce, c._world.protocol
    plan = reduction._plans["sum", x.dtype, x.shape]
    views = plan.views[0]
    assert views is not None, "all slots were used"
    found = {"whole": least(lambda: c.all_reduce(x), 2000), "call": least(lambda: None, 2000)}
    others = len(views) - 1

    def numpy_calls() -> None:
        views[0][...] = x
        plan.ufunc(views[0], views[1], out=x)
        for view in views[2:]:
            plan.ufunc(x, view, out=x)

    found["numpy"] = least(numpy_calls, 2000) - found["call"]
    found["fence"] = least(protocol._waiter.fence, 2000) - found["call"]
    words, at = protocol._words, protocol._arrive

    def look_and_write() -> None:
        for _ in range(others):
            words[at], words[at], words[at]
        words[at] = words[at] = words[at] = words[at] = 0

    found["words"] = least(look_and_write, 2000) - found["call"]
    found["line"] = least(context_of(c).call_site.line, 2000) - found["call"]
    return found


def parts_of_ping_pong(c: Communicator) -> Seconds:
    """Return what a send and a recv of 8 bytes take, and their parts."""
    x, peer = np.zeros(1), 1
    sender = c._sender
    out, into = sender.rings[peer], c._receiver.rings[peer]
    assert sender.send_short(x, peer, 0), "a short array takes the shortest path"
    record = sender._make_head(x, 0, 0) + x.tobytes()
    count = out.capacity // (len(record) + 64) - 2
    words = out._words

    def taken() -> None:
        words[out._head] = out.position

    theirs = RingWriter(c._view, context_of(c).waiter, peer, c.rank)

    def fill() -> None:
        words[theirs._head] = theirs.position
        for _ in range(count):
            if not theirs.put_contiguous(record):
                theirs.put(record)  # around the ring's end

    call = least(lambda: None, 2000)
    found = {
        "call": call,
        "send": least(lambda: c.send(x, peer), count, taken),
        "recv": least(lambda: c.recv(x, src=peer), count, fill),
    }
    found["whole"] = found["send"] + found["recv"]
    octets, start = into._octets, into._start
    meta = sender._packer.meta(x)

    def numpy_calls() -> None:
        x.tobytes()
        x[...] = np.ndarray(x.shape, x.dtype, octets, start + RECORD.size + len(meta))

    def bytes_moved() -> None:
        octets[start : start + len(record)] = record
        RECORD.unpack_from(octets, start)
        bool(octets[start + RECORD.size : start + RECORD.size + len(meta)] != meta)

    found["numpy"] = least(numpy_calls, 2000) - call
    found["words"] = least(bytes_moved, 2000) - call
    found["fence"] = 2 * (least(context_of(c).waiter.fence, 2000) - call)
    found["line"] = least(context_of(c).call_site.line, 2000) - call
    words[out._tail] = words[out._head] = 0  # the other rank has taken nothing, and looks when it ends
    return found
