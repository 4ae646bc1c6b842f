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
from nbparallel.distributed.point_to_point.packing import RingWriter
from nbparallel.wire.control import GENERATIONS, SLOT_HEADER
from nbparallel.wire.control_layout import RECORD
from tests.harness.ranks import context_of, parts_of

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
    area = parts_of(c).collectives.protocol.area
    for i in area.others:
        area.words[area.arrive[i]] = area.words[area.done[i]] = FAR


def mirror(c: Communicator, call: Callable[[], object]) -> None:
    """Let the others' slots of all generations hold what this rank writes there when it calls."""
    protocol, waiter = parts_of(c).collectives.protocol, context_of(c).waiter
    announce, area = waiter.announce, protocol.area
    nbytes = SLOT_HEADER + area.payload_nbytes

    def copy(*arguments: Any) -> None:
        mine, *others = (area.slots[i][protocol.generation] for i in (area.index, *area.others))
        for start in others:
            area.octets[start : start + nbytes] = area.octets[mine : mine + nbytes]
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
    protocol, waiter = parts_of(c).collectives.protocol, context_of(c).waiter
    area = protocol.area
    first, second, *more = (
        np.ndarray(x.shape, x.dtype, area.buffer, slots[0] + SLOT_HEADER) for slots in area.slots
    )
    found = {"whole": least(lambda: c.all_reduce(x), 2000), "call": least(lambda: None, 2000)}

    def numpy_calls() -> None:
        first[...] = x
        np.add(first, second, out=x)
        for view in more:
            np.add(x, view, out=x)

    found["numpy"] = least(numpy_calls, 2000) - found["call"]
    found["fence"] = least(waiter.fence, 2000) - found["call"]
    words, at = area.words, area.arrive[area.index]

    def look_and_write() -> None:
        for _ in area.others:
            words[at], words[at], words[at]
        words[at] = words[at] = words[at] = words[at] = 0

    found["words"] = least(look_and_write, 2000) - found["call"]
    found["line"] = least(context_of(c).call_site.line, 2000) - found["call"]
    return found


def parts_of_ping_pong(c: Communicator) -> Seconds:
    """Return what a send and a recv of 8 bytes take, and their parts."""
    x, peer = np.zeros(1), 1
    view, waiter = context_of(c).view, context_of(c).waiter
    words, octets, layout = view.words, view.octets, view.layout
    tail, head = layout.tail_word(c.rank, peer), layout.head_word(c.rank, peer)
    start, before = layout.ring_byte(c.rank, peer), words[tail]
    assert parts_of(c).sender.send_short(x, peer, 0), "a short array takes the shortest path"
    record = bytes(octets[start + before : start + before + RECORD.unpack_from(octets, start + before)[0]])
    meta = record[RECORD.size : len(record) - x.nbytes]
    out = parts_of(c).sender.rings[peer]
    count = out.capacity // (len(record) + 64) - 2

    def taken() -> None:
        words[head] = out.position

    theirs = RingWriter(view, waiter, peer, c.rank)
    theirs_head, into = layout.head_word(peer, c.rank), layout.ring_byte(peer, c.rank)

    def fill() -> None:
        words[theirs_head] = theirs.position
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

    def numpy_calls() -> None:
        x.tobytes()
        x[...] = np.ndarray(x.shape, x.dtype, octets, into + RECORD.size + len(meta))

    def bytes_moved() -> None:
        octets[into : into + len(record)] = record
        RECORD.unpack_from(octets, into)
        bool(octets[into + RECORD.size : into + RECORD.size + len(meta)] != meta)

    found["numpy"] = least(numpy_calls, 2000) - call
    found["words"] = least(bytes_moved, 2000) - call
    found["fence"] = 2 * (least(waiter.fence, 2000) - call)
    found["line"] = least(context_of(c).call_site.line, 2000) - call
    words[tail] = words[head] = 0  # the other rank has taken nothing, and looks when it ends
    return found
