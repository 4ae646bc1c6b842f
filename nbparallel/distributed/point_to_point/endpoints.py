"""The two sides of point-to-point messages.

Messages from one rank to another arrive in the order they were sent, for each tag.  A receive of one tag puts
the messages aside that it passes (`UnexpectedMessages`); so does every rank that waits for anything, which is
why a send only blocks while its receiver computes, or after it has left the cell.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from nbparallel.distributed.operators import shown_dtype
from nbparallel.distributed.point_to_point.matching import (
    Late,
    MatchRequest,
    Receive,
    UnexpectedMessages,
)
from nbparallel.distributed.point_to_point.packing import (
    ADOPTED,
    ARRAY,
    AWAY,
    INTRODUCTION,
    STREAMED,
    Envelope,
    Packer,
    Payload,
    RingReader,
    RingWriter,
    brings_tensor,
)
from nbparallel.distributed.point_to_point.streaming import (
    Call,
    StreamIn,
    StreamOut,
    flat_octets,
    wait_for_receiver,
)
from nbparallel.distributed.runtime.call_site import receive_text
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, Cache, as_plain_array
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.distributed.slots.mismatch import table
from nbparallel.distributed.work import Work
from nbparallel.errors import CollectiveMismatchError, CollectiveTimeoutError, NbParallelError
from nbparallel.sharing.tensors import tensor_of
from nbparallel.transfer import pickling
from nbparallel.wire.control import ControlView, Operation
from nbparallel.wire.control_layout import RECORD

# The sending side of point-to-point messages: it writes values to the rings of their receivers.

INLINE = 32 << 10
"""Bytes of a value that travel inside a ring; larger ones get shared memory of their own.  ``python -m
benchmarks.operations.tuning``: the best, and more would be half of a ring; half of it takes a seventh
longer."""


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

    def __init__(self, context: RankContext, take_in: Callable[[int], None]) -> None:
        self._context, self._take_in = context, take_in
        near, waiter = context.place.ranks, context.waiter
        # `mail` announces what is put into rings to ranks of other hosts
        self.rings = [
            RingWriter(context.view, waiter if r in near else context.mail, context.rank, r)
            for r in range(context.world_size)
        ]
        self._held: list[deque[tuple[int, object]]] = [deque() for _ in range(context.world_size)]
        """For each receiver: message numbers, and what must live until that message was received."""
        self._streams = [StreamOut(context, r) for r in range(context.world_size)]
        self._packer = Packer(context, inline_nbytes(context.view))
        self._heads: Cache[tuple[np.dtype[Any], tuple[int, ...], int, int], bytes] = Cache()
        """Records of arrays without their content, by dtype, shape, tag and line; empty: not short."""
        self.strict = False

    def send_short(self, x: AnyArray, dst: int, tag: int) -> bool:
        """Send a short array by the shortest path; False: nothing was done, call `send`.

        `send` and `recv` of a short array take eight microseconds of Python, most of which is calling and
        storing; so the ordinary case of both is written out in one method each.
        """
        # fault: return False
        line = self._context.call_site.line()
        head = self._heads.get((x.dtype, x.shape, tag, line))
        if head is None:
            head = self._make_head(x, tag, line)
        if not head or self.strict or self._held[dst]:
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
        # fault: enter
        if not ring.has_room(len(record)):
            self._wait_for_room(dst, len(record), Call(line, tag, deadline_ns))
        number = ring.number + 1
        if payload.keepalive is not None:
            self._held[dst].append((number, payload.keepalive))
        # fault: wrote_header
        # fault: half_payload
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
        # fault: wrote_flag
        context.operations += 1
        context.nbytes += payload.nbytes
        if self.strict:
            self._wait_until_received(dst, Call(line, tag, deadline_ns, number))
        # fault: leave

    def sent(self, work: Work, dst: int) -> Callable[[int | None, bool], None]:
        """Return how to wait until the message that was sent last was received."""
        ring, number = self.rings[dst], self.rings[dst].number

        def push(deadline_ns: int | None, wait: bool) -> None:
            if wait and ring.newest_taken() < number:
                self._wait_until_received(dst, Call(work.line, 0, deadline_ns, number))
            if ring.newest_taken() >= number:
                work.finish()

        return push

    def introduce(self, dst: int, group: int, packed: bytes, deadline_ns: int | None) -> None:
        """Send a member of a group the handle of its slot area."""
        record = Payload(INTRODUCTION, b"", packed).record(-1, 0, group)
        self._wait_for_room(dst, len(record), Call(self._context.call_site.line(), 0, deadline_ns))
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

    def _wait_for_room(self, dst: int, nbytes: int, call: Call) -> None:
        ring = self.rings[dst]
        if ring.has_room(nbytes):
            return
        if dst == self._context.rank:  # no other rank makes room
            self._take_in(dst)
        else:
            satisfied = partial(ring.has_room, nbytes)
            wait_for_receiver(self._context, satisfied, dst, call, " for room", "what was sent before")

    def _wait_until_received(self, dst: int, call: Call) -> None:
        """Wait as a synchronous send does: what `strict_sync` is for."""
        ring, context = self.rings[dst], self._context
        if dst == context.rank:
            place = context.call_site.place(call.line)
            raise context.mark_failed(
                context.deadlock(f"rank {dst} sends to itself{place} and waits for itself")
            )
        wait_for_receiver(context, lambda: ring.newest_taken() >= call.number, dst, call, "")

    # -- cells -----------------------------------------------------------------------------------------

    def unreceived(self) -> tuple[int, ...]:
        """Return the ranks that have not received everything that was sent to them."""
        return tuple([rank for rank, ring in enumerate(self.rings) if ring.taken() != ring.number])

    def forget(self, dst: int) -> None:
        """Release what was sent to a rank, which drops it."""
        self._held[dst].clear()

    def close(self) -> None:
        """Release all memory."""
        self._held.clear()
        self._streams.clear()


T = TypeVar("T")
POLL = 0
"""A deadline that has passed."""


class Receiver:
    """The messages that one rank receives."""

    def __init__(self, context: RankContext) -> None:
        self._context, ranks = context, range(context.world_size)
        self.rings = [RingReader(context.view, context.waiter, r, context.rank) for r in ranks]
        self._streams = [StreamIn(context, r) for r in range(context.world_size)]
        self._packer = Packer(context, inline_nbytes(context.view))
        self.unexpected = UnexpectedMessages(context.rank, self.rings)
        self._queues = self.unexpected.queues
        self._posted: list[Receive] = []
        """Posted receives that have not been matched yet, in the order of their calls.

        A message goes to the first of them that it matches, and to a blocking `recv` only if it matches none.
        """
        self._metas: Cache[tuple[np.dtype[Any], tuple[int, ...]], bytes] = Cache()
        """How short arrays are described in records; empty: not short."""
        self._has_spun = False
        """Whether the receive that begins has waited for a short while already."""
        self._awaited: frozenset[int] = frozenset()
        """The ranks that a receive is waiting for, which takes their messages in itself."""

    # -- receiving -------------------------------------------------------------------------------------

    def recv_short(self, buffer: AnyArray, src: int, tag: int) -> bool:
        """Fill `buffer` with the next message of a rank, if that fits; False: nothing was done, call `recv`.

        It waits a short while for the message; see `Sender.send_short`.
        """
        # fault: return False
        if self._queues[src] or self._posted:
            return False
        meta = self._metas.get((buffer.dtype, buffer.shape))
        if meta is None:
            meta = self._metas[buffer.dtype, buffer.shape] = self._packer.short_meta(buffer)
        if not meta:
            return False
        ring = self.rings[src]
        if not ring.arrives():
            self._has_spun = True
            return False
        number = ring.take_contiguous(buffer, ARRAY, meta, tag)
        if not number:
            return False
        unexpected = self.unexpected
        unexpected.newest[src], unexpected.last_source = number, src
        context = self._context
        context.operations += 1
        context.nbytes += buffer.nbytes
        return True

    def recv(
        self,
        buffer: AnyArray | None,
        src: int | None,
        tag: int,
        deadline_ns: int | None,
        group: int = 0,
        sources: Sequence[int] = (),
    ) -> tuple[Any, int]:
        """Return the next value from `src` with this tag (or `buffer`, filled), and its source.

        Parameters
        ----------
        group : int
            The word of the group; 0: the world.
        sources : sequence of int
            The ranks that None stands for, if not all.
        """
        context = self._context
        line = context.call_site.line()
        # fault: enter
        if self._posted and (late := self.advance(deadline_ns)):
            raise late
        message = self.unexpected.find(src, tag, group)
        if message is None:
            request = MatchRequest(context, self.unexpected, self.rings, src, tag, line, deadline_ns, sources)
            message = self._wait_for_message(request, partial(self.unexpected.find, src, tag, group))
        if buffer is not None:
            self._check(buffer, message, line)
        if message.kind == AWAY:
            context.mail.fetch(message, deadline_ns)
        try:
            value = self._content(buffer, message, line, deadline_ns)
        finally:
            self.unexpected.received(message)
        context.operations += 1
        # a large array travels elsewhere, and its handle here
        context.nbytes += value.nbytes if message.kind in (ADOPTED, STREAMED) else len(message.body)
        return value, message.source

    def _content(self, buffer: AnyArray | None, message: Envelope, line: int, deadline_ns: int | None) -> Any:
        """Return the value, or the buffer, filled."""
        kind = message.kind
        if kind in (ADOPTED, STREAMED):
            self._streams[message.source].prefer(buffers=buffer is not None)
        if kind == STREAMED:
            return self._read_stream(buffer, message, line, deadline_ns)
        if kind == AWAY:
            content, form = self._context.mail.take(message), self._packer.form(message)
            if form is None:
                return pickling.loads(content.data, self._context.store)
            content = content.view(form[0]).reshape(form[1])
            if buffer is None:
                return tensor_of(content) if brings_tensor(message) else content
            np.copyto(buffer, content)
            return buffer
        if buffer is None:
            return self._packer.unpack(message)
        self._packer.fill(buffer, message)
        return buffer

    def _read_stream(
        self, buffer: AnyArray | None, message: Envelope, line: int, deadline_ns: int | None
    ) -> Any:
        form = self._packer.form(message)
        assert form is not None, "only arrays are streamed"
        whole = buffer is not None and buffer.flags.c_contiguous
        target = buffer if buffer is not None and whole else np.empty(form[1], form[0])
        context = self._context
        outer, context.open = context.open, context.open or -1  # half a message invalidates the epoch
        self._unload_stream(message, line)
        self._streams[message.source].read(target, message.body, Call(line, message.tag, deadline_ns))
        context.open = outer
        if buffer is None:
            return tensor_of(target) if brings_tensor(message) else target
        if whole:
            return target
        np.copyto(buffer, target)
        return buffer

    def _unload_stream(self, message: Envelope, line: int) -> None:
        """Copy earlier messages out of the stream: with this one their chunks count as taken."""
        for earlier in self._queues[message.source]:
            if earlier.number >= message.number:
                return
            if earlier.kind == STREAMED and (form := self._packer.form(earlier)) is not None:
                content = np.empty(form[1], form[0])
                self._streams[message.source].read(content, earlier.body, Call(line, earlier.tag, None))
                earlier.kind, earlier.body = ARRAY, flat_octets(content).data

    def _wait_for_message(self, request: MatchRequest, find: Callable[[], T | None]) -> T:
        """Wait until `find` returns something, which it does as soon as the right message is there."""
        request.check_source()
        peer = -1 if request.src is None else request.src
        return self.wait_for(request.satisfied, peer, request.peers, request.wait_record, find)

    def wait_for(
        self,
        satisfied: Callable[[], bool],
        peer: int,
        peers: Sequence[int],
        record: Callable[[], WaitRecord],
        find: Callable[[], T | None],
    ) -> T:
        """Wait for messages of `peers`, as `RankContext.wait`, until `find` returns something."""
        context = self._context
        while True:
            wait = record()
            self._awaited = frozenset(peers)
            spun, self._has_spun = self._has_spun, False
            try:
                if spun or not context.waiter.spin_until(satisfied):
                    context.wait(satisfied, peer, wait)
            finally:
                self._awaited = frozenset()
            if self._posted and (late := self.advance(wait.deadline_ns)):
                raise late
            found = find()
            if found is not None:
                return found

    # -- posted receives -------------------------------------------------------------------------------

    def post(self, receive: Receive) -> Work:
        """Begin a receive."""
        self._posted.append(receive)
        self.advance(POLL)
        return receive.work

    def push(self, receive: Receive, deadline_ns: int | None, wait: bool) -> None:
        """Go on with a posted receive; until it is served, if `wait`."""
        late, work = self.advance(deadline_ns if wait else POLL), receive.work
        if work.done or (late and not wait):
            return
        if late:
            raise late
        context = self._context
        sources = receive.sources if receive.src is None else (receive.src,)
        others = [r for r in sources if r != context.rank]
        context.check_peers(others if receive.src is not None else ())
        if wait or (others and all(map(context.gone, others))):  # a poll raises the same error
            request = MatchRequest(
                context, self.unexpected, self.rings, receive.src, receive.tag, context.call_site.line(),
                deadline_ns, receive.sources,
            )  # fmt: skip
            self._wait_for_message(request, lambda: work if work.done else None)

    def advance(self, deadline_ns: int | None, but: Collection[int] = ()) -> Late:
        """Take in what has arrived, and serve posted receives; return why one of them has to wait longer.

        Not while a slot says "waiting".
        """
        for source in range(self._context.world_size):
            if source not in but:
                self.unexpected.take_in(source)
        return self._match(deadline_ns)

    def _match(self, deadline_ns: int | None) -> Late:
        """Complete every posted receive whose message has arrived; return why one of them cannot be yet."""
        unexpected = self.unexpected
        if not unexpected.count:
            return None
        late, passed = None, list[Envelope]()
        try:
            for receive in self._posted:
                message = next((m for m in unexpected if receive.matches(m) and m not in passed), None)
                if message is not None and (early := self._serve(receive, message, deadline_ns)):
                    late = early
                    passed.append(message)
                if unexpected.count == len(passed):
                    break
        finally:
            self._posted = [receive for receive in self._posted if not receive.work.done]
        return late

    def drain(self) -> None:
        """Take in what has arrived, but from ranks that a receive is waiting for."""
        wait = self._context.waiting
        self.advance(wait.deadline_ns if wait else None, self._awaited)

    def _serve(self, receive: Receive, message: Envelope, deadline_ns: int | None) -> Late:
        work, context = receive.work, self._context
        if context.waiting is not None:  # until its next slice: a sender must see no rank stuck that copies
            context.show(None)
        try:
            if receive.buffer is not None:
                self._check(receive.buffer, message, work.line)
            if message.kind == AWAY:
                context.mail.fetch(message, deadline_ns)
        except CollectiveTimeoutError as error:
            return error
        except NbParallelError as error:  # the message can still be received
            work.fail(error)
            return None
        try:
            value = self._content(receive.buffer, message, work.line, None)
            work.finish(value if receive.buffer is None else receive.tensor, message.source)
        except Exception as error:  # whatever a value raises while it is rebuilt
            work.fail(error)
            if message.kind == STREAMED:
                raise  # in the middle of it: nothing more can come through that stream
        finally:
            self.unexpected.received(message)
        context.nbytes += len(message.body)
        return None

    # -- cells -------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """End what was posted in a cell with it."""
        for receive in self._posted:
            receive.work.drop()
        self._posted.clear()

    def settle(self, source: int, position: int, cell: str) -> None:
        """Keep or drop what a rank has sent in the cell that has ended: see `UnexpectedMessages.settle`."""
        self.unexpected.settle(source, position, cell, self._drop)

    def _drop(self, message: Envelope) -> None:
        """Make room in the stream of a message that is dropped."""
        form = self._packer.form(message) if message.kind == STREAMED else None
        if form is None:
            return
        try:
            self._unload_stream(message, 0)
        except NbParallelError:
            return  # its source has died, or there is no descriptor left: the stream stays full
        self._streams[message.source].skip(form[0].itemsize * math.prod(form[1]), message.body)

    def release(self) -> None:
        """Release the senders' windows."""
        for stream in self._streams:
            stream.release()

    def close(self) -> None:
        """Drop all messages."""
        self._queues.clear()
        self._streams.clear()

    # -- introductions of groups -------------------------------------------------------------------------

    def await_introduction(self, src: int, group: int, deadline_ns: int | None) -> bytes:
        """Return the handle of a group's slot area, as soon as its first member has sent it."""
        context, ring = self._context, self.rings[src]
        line = context.call_site.line()

        def explain(finished: list[int]) -> NbParallelError:
            return CollectiveMismatchError(
                f"rank {src} finished the cell without an operation of the group in which "
                f"rank {context.rank} waits for it{context.call_site.place(line)}"
            )

        def find() -> bytes | None:
            self.unexpected.take_in(src)
            return self.unexpected.introductions.get((src, group))

        def wait() -> WaitRecord:
            awaited = lambda: [] if ring.has_message() else [src]  # noqa: E731
            return WaitRecord(Operation.new_group, awaited, explain, line, peer=src, deadline_ns=deadline_ns)

        return find() or self.wait_for(ring.has_message, src, [src], wait, find)

    # -- checking ----------------------------------------------------------------------------------------

    def _check(self, buffer: AnyArray, message: Envelope, line: int) -> None:
        """Raise if the message does not fit the buffer; it can be received again then."""
        form = self._packer.form(message)
        if form is not None and form[0] == buffer.dtype and form[1] == buffer.shape:
            return
        dtype, shape = form or ("a pickled object", "-")
        source, place = message.source, self._context.call_site.name
        sent_on = f"{message.line} of {message.cell}" if message.cell else place(message.line)
        sent = ("send", shown_dtype(dtype), str(shape), "-", "-", sent_on or "?")
        mine = ("recv", shown_dtype(buffer.dtype), str(buffer.shape), "-", "-", place(line) or "?")
        raise CollectiveMismatchError(
            f"what rank {source} sent does not fit the buffer, and nothing was written; in this cell "
            f"`x = {receive_text('recv', source, message.tag)}` still receives it, without a buffer:\n"
            + (
                table({source: sent, self._context.rank: mine})
                if source != self._context.rank
                else f"  sent: {sent[1:3]}, buffer: {mine[1:3]}"
            )
        )
