"""The sending side of point-to-point messages: it writes values to the rings of their receivers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from nbparallel.distributed.point_to_point.packing import ARRAY, INTRODUCTION, STREAMED, Packer, Payload
from nbparallel.distributed.point_to_point.ring import RingPairs
from nbparallel.distributed.point_to_point.streaming import Call, StreamOut
from nbparallel.distributed.runtime import fault_injection
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, as_plain_array
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.distributed.work import Work
from nbparallel.errors import NbParallelError
from nbparallel.wire.control import ControlView, Operation
from nbparallel.wire.control_layout import RECORD

INLINE = 32 << 10
"""Bytes of a value that travel inside a ring; larger ones get shared memory of their own.  ``python -m
benchmarks.operations.tuning``: the best, and more would be half of a ring; half of it takes a seventh
longer."""
MAX_HEADS = 1024


def inline_nbytes(view: ControlView) -> int:
    """Return how many bytes of a value travel inside a ring."""
    return min(INLINE, view.layout.ring_capacity // 2) - RECORD.size


class Sender:
    """The messages that one rank sends.

    Parameters
    ----------
    take_in : callable
        ``take_in(source)`` empties the ring from a rank: sends of this rank to itself need the room.

    Attributes
    ----------
    strict : bool
        Whether every send waits until its message was received.
    """

    def __init__(self, context: RankContext, rings: RingPairs, take_in: Callable[[int], None]) -> None:
        self._context, self.rings, self._take_in = context, rings.writers, take_in
        self._held: list[deque[tuple[int, object]]] = [deque() for _ in range(context.world_size)]
        """For each receiver: message numbers, and what must live until that message was received."""
        self._streams = [StreamOut(context, r) for r in range(context.world_size)]
        self._packer = Packer(context, inline_nbytes(context.view))
        self._heads: dict[tuple[np.dtype[Any], tuple[int, ...], int, int], bytes] = {}
        """Records of arrays without their content, by dtype, shape, tag and line; empty: not short."""
        self.strict = False

    def send_short(self, x: AnyArray, dst: int, tag: int) -> bool:
        """Send a short array by the shortest path; False: nothing was done, call `send`.

        `send` and `recv` of a short array take eight microseconds of Python, most of which is calling and
        storing; so the ordinary case of both is written out in one method each.
        """
        line = self._context.call_site.line()
        head = self._heads.get((x.dtype, x.shape, tag, line))
        if head is None:
            head = self._make_head(x, tag, line)
        if not head or self.strict or self._held[dst] or fault_injection.ARMED:
            return False
        data = x.tobytes()
        if not self.rings[dst].put_contiguous(head + data):
            return False
        context = self._context
        context.operations += 1
        context.nbytes += len(data)
        return True

    def _make_head(self, x: AnyArray, tag: int, line: int) -> bytes:
        meta = self._packer.short_meta(x)
        length = RECORD.size + len(meta) + x.nbytes
        head = RECORD.pack(length, len(meta), ARRAY, tag, line, 0) + meta if meta else b""
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        self._heads[x.dtype, x.shape, tag, line] = head
        return head

    def send(
        self, x: Any, dst: int, tag: int, *, view: bool, deadline_ns: int | None, group: int = 0
    ) -> None:
        """Send `x`; returns when it is buffered or received."""
        context = self._context
        line = context.call_site.line()
        stream = self._streams[dst] if dst != context.rank else None
        if dst in context.place.ranks:
            payload = self._packer.pack(x, view=view, stream=stream)
        else:
            if view:
                context.place.check_reach([dst], "send(view=True)")
            payload = self._packer.pack_away(x)
        record = payload.record(tag, line, group)
        ring = self.rings[dst]
        self._release_received(dst)
        if fault_injection.ARMED:
            fault_injection.hit("enter", context.rank)
        if not ring.has_room(len(record)):
            self._wait_for_room(dst, len(record), tag, line, deadline_ns)
        number = ring.number + 1
        if payload.keepalive is not None:
            self._held[dst].append((number, payload.keepalive))
        if fault_injection.ARMED:
            fault_injection.hit("wrote_header", context.rank)
            fault_injection.hit("half_payload", context.rank)
        if payload.kind == STREAMED:
            outer, context.open = context.open, context.open or -1  # half a message invalidates the epoch
            ring.put(record)
            array = as_plain_array(x)
            assert stream is not None and array is not None, "that is what was packed"  # noqa: PT018
            held = self._held[dst]
            stream.write(array, Call(line, tag, deadline_ns, number), lambda x: held.append((number, x)))
            context.open = outer
        else:
            ring.put(record)
        if fault_injection.ARMED:
            fault_injection.hit("wrote_flag", context.rank)
        context.operations += 1
        context.nbytes += payload.nbytes
        if self.strict:
            self._wait_until_received(dst, number, tag, line, deadline_ns)
        if fault_injection.ARMED:
            fault_injection.hit("leave", context.rank)

    def sent(self, work: Work, dst: int) -> Callable[[int | None, bool], None]:
        """Return how to wait until the message that was sent last was received."""
        ring, number = self.rings[dst], self.rings[dst].number

        def push(deadline_ns: int | None, wait: bool) -> None:
            if wait and ring.newest_taken() < number:
                self._wait_until_received(dst, number, 0, work.line, deadline_ns)
            if ring.newest_taken() >= number:
                work.finish()

        return push

    def introduce(self, dst: int, group: int, packed: bytes, deadline_ns: int | None) -> None:
        """Send a member of a group the handle of its slot area."""
        record = Payload(INTRODUCTION, b"", packed).record(-1, 0, group)
        if not self.rings[dst].has_room(len(record)):
            self._wait_for_room(dst, len(record), 0, self._context.call_site.line(), deadline_ns)
        self.rings[dst].put(record)

    def release(self) -> None:
        """Release memory that receivers have taken over, and the windows of idle streams."""
        for rank, stream in enumerate(self._streams):
            self._release_received(rank)
            stream.release()

    def _release_received(self, dst: int) -> None:
        held = self._held[dst]
        while held and held[0][0] <= self.rings[dst].taken():
            held.popleft()

    def _wait_for_room(self, dst: int, nbytes: int, tag: int, line: int, deadline_ns: int | None) -> None:
        ring, context = self.rings[dst], self._context
        place = context.call_site.place(line)

        def explain(finished: list[int]) -> NbParallelError:
            return context.deadlock(
                f"rank {context.rank} waits in send(dst={dst}){place} for room, and rank {dst} "
                + context.cell.how_gone(dst, "what was sent before")
            )

        if dst == context.rank:  # no other rank makes room
            self._take_in(dst)
            return

        wait = WaitRecord(
            Operation.send, lambda: [] if ring.has_room(nbytes) else [dst], explain, line,
            peer=dst, tag=tag, deadline_ns=deadline_ns,
        )  # fmt: skip
        context.wait(lambda: ring.has_room(nbytes), dst, wait)

    def _wait_until_received(
        self, dst: int, number: int, tag: int, line: int, deadline_ns: int | None
    ) -> None:
        """Wait as a synchronous send does: what `strict_sync` is for."""
        ring, context = self.rings[dst], self._context
        place = context.call_site.place(line)

        def explain(finished: list[int]) -> NbParallelError:
            return context.deadlock(
                f"rank {context.rank} waits in send(dst={dst}){place}, and rank {dst} "
                + context.cell.how_gone(dst, "it")
            )

        if dst == context.rank:
            raise context.mark_failed(
                context.deadlock(f"rank {dst} sends to itself{place} and waits for itself")
            )
        wait = WaitRecord(
            Operation.send, lambda: [] if ring.newest_taken() >= number else [dst], explain, line,
            peer=dst, tag=tag, target=number, deadline_ns=deadline_ns,
        )  # fmt: skip
        context.wait(lambda: ring.newest_taken() >= number, dst, wait)

    # -- cells -----------------------------------------------------------------------------------------

    def unreceived(self) -> tuple[int, ...]:
        """Return the ranks that have not received everything that was sent to them."""
        return tuple([rank for rank, ring in enumerate(self.rings) if ring.taken() != ring.number])

    def forget(self, dst: int) -> None:
        """Release what was sent to a rank, which drops it."""
        self._held[dst].clear()

    def close(self) -> None:
        """Release all memory."""
        for held in self._held:
            held.clear()
        for stream in self._streams:
            stream.close()
