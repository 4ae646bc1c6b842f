"""send: a value into the ring of its receiver, as soon as there is room."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from nbparallel.distributed.point_to_point.packing import STREAMED, Packer
from nbparallel.distributed.point_to_point.ring import RECORD, RingWriter
from nbparallel.distributed.point_to_point.streaming import Call, StreamOut
from nbparallel.distributed.runtime import fault_injection
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import as_plain_array
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.distributed.work import Work
from nbparallel.errors import DeadlockError, NbParallelError
from nbparallel.wire.control import Operation

INLINE = 32 << 10
"""Bytes of a value that travel inside a ring; larger ones get shared memory of their own.  ``python -m
benchmarks.operations.tuning``: the best, and more would be half of a ring; half of it takes a seventh
longer."""


class Sender:
    """The messages that one rank sends."""

    def __init__(self, context: RankContext) -> None:
        view, waiter, rank = context.view, context.waiter, context.rank
        self._context = context
        self._out = [RingWriter(view, waiter, rank, r) for r in range(context.world_size)]
        self._held: list[deque[tuple[int, object]]] = [deque() for _ in range(context.world_size)]
        self._streams_out = [StreamOut(context, r) for r in range(context.world_size)]
        inline = min(INLINE, view.layout.ring_capacity // 2) - RECORD.size
        self._packer = Packer(context.store, context.attach, context.memory.look, inline)
        self.strict = False

    def _drain_from(self, source: int) -> None:
        """Take in what has arrived from a rank: sends of this rank to itself need the room."""
        raise NotImplementedError

    def send(
        self, x: Any, dst: int, tag: int, *, view: bool, deadline_ns: int | None, group: int = 0
    ) -> None:
        """Send `x`; returns when the receiver has it or it is buffered."""
        context = self._context
        line = context.call_site.line()
        stream = self._streams_out[dst] if dst != context.rank else None
        payload = self._packer.pack(x, view=view, stream=stream)
        record = payload.record(tag, line, group)
        ring = self._out[dst]
        self.release(dst)
        if fault_injection.ARMED:
            fault_injection.hit("enter", context.rank)
        if not ring.has_room(len(record)):
            self._wait_for_room(dst, len(record), tag, line, deadline_ns)
        number = ring.number + 1
        if payload.keep is not None:
            self._held[dst].append((number, payload.keep))
        if fault_injection.ARMED:
            fault_injection.hit("wrote_header", context.rank)
            fault_injection.hit("half_payload", context.rank)
        if payload.kind == STREAMED:
            outer, context.open = context.open, context.open or -1  # half a message voids the epoch
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
            self._wait_until_taken(dst, number, tag, line, deadline_ns)
        if fault_injection.ARMED:
            fault_injection.hit("leave", context.rank)

    def sent(self, work: Work, dst: int) -> Callable[[int | None, bool], None]:
        """Return how to wait until the message that was sent last was taken."""
        ring, number = self._out[dst], self._out[dst].number

        def push(deadline_ns: int | None, wait: bool) -> None:
            if wait and ring.newest_taken() < number:
                self._wait_until_taken(dst, number, 0, work.line, deadline_ns)
            if ring.newest_taken() >= number:
                work.finish()

        return push

    def release(self, dst: int | None = None) -> None:
        """Let go of what receivers have taken over."""
        for rank in range(self._context.world_size) if dst is None else (dst,):
            held = self._held[rank]
            while held and held[0][0] <= self._out[rank].taken():
                held.popleft()
            if dst is None:
                self._streams_out[rank].release()

    def _wait_for_room(self, dst: int, nbytes: int, tag: int, line: int, deadline_ns: int | None) -> None:
        ring, context = self._out[dst], self._context

        def explain(finished: list[int]) -> NbParallelError:
            return DeadlockError(
                f"deadlock: rank {context.rank} waits in send(dst={dst}) on line {line} for room, and rank "
                f"{dst} finished the cell without receiving what was sent before"
            )

        if dst == context.rank:  # nobody else makes room
            self._drain_from(dst)
            return

        wait = WaitRecord(
            Operation.send, lambda: [] if ring.has_room(nbytes) else [dst], explain, line,
            peer=dst, tag=tag, deadline_ns=deadline_ns,
        )  # fmt: skip
        context.wait(lambda: ring.has_room(nbytes), dst, wait)

    def _wait_until_taken(self, dst: int, number: int, tag: int, line: int, deadline_ns: int | None) -> None:
        """Rendezvous: what `strict_sync` is for."""
        ring, context = self._out[dst], self._context

        def explain(finished: list[int]) -> NbParallelError:
            return DeadlockError(
                f"deadlock: rank {context.rank} waits in send(dst={dst}) on line {line}, and rank {dst} "
                "finished the cell without receiving it"
            )

        if dst == context.rank:
            raise context.doom(
                DeadlockError(f"deadlock: rank {dst} sends to itself on line {line} and waits for itself")
            )
        wait = WaitRecord(
            Operation.send, lambda: [] if ring.newest_taken() >= number else [dst], explain, line,
            peer=dst, tag=tag, target=number, deadline_ns=deadline_ns,
        )  # fmt: skip
        context.wait(lambda: ring.newest_taken() >= number, dst, wait)
