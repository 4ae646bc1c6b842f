"""send and recv.

Messages from one rank to another arrive in the order they were sent, for each tag.  A receiver that looks
for one tag keeps what it passes (`_pending`); so does every rank that waits for anything, which is why a send
only blocks while its receiver computes, or after it has left the cell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from nbparallel.distributed.point_to_point.matching import PostedReceives, Receive, UnexpectedMessages
from nbparallel.distributed.point_to_point.packing import ADOPTED, INTRODUCTION, STREAMED, Payload
from nbparallel.distributed.point_to_point.ring import Envelope, RingReader
from nbparallel.distributed.point_to_point.sender import Sender
from nbparallel.distributed.point_to_point.streaming import Call, StreamIn
from nbparallel.distributed.runtime import fault_injection
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.distributed.slots.mismatch import table
from nbparallel.distributed.work import Work
from nbparallel.errors import CollectiveMismatchError, DeadlockError, NbParallelError, rank_list
from nbparallel.wire.control import Operation

T = TypeVar("T")


class Receiver(Sender):
    """The messages of one rank."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        view, waiter, rank = context.view, context.waiter, context.rank
        self._in = [RingReader(view, waiter, r, rank) for r in range(context.world_size)]
        self._streams_in = [StreamIn(context, r) for r in range(context.world_size)]
        self._pending: list[deque[Envelope]] = [deque() for _ in range(context.world_size)]
        self._introductions: dict[tuple[int, int], bytes] = {}
        self._newest = [0] * context.world_size
        self._last = -1
        self._spun = False
        """Whether the receive that begins has waited for a short while already."""
        self._posted = PostedReceives(lambda: [m for pending in self._pending for m in pending], self._serve)
        self._sources: tuple[int, ...] = ()
        self._unreceived = UnexpectedMessages(context.world_size)
        context.progress = self.drain

    # -- receiving -------------------------------------------------------------------------------------

    def recv(
        self,
        buffer: AnyArray | None,
        src: int | None,
        tag: int,
        deadline_ns: int | None,
        *,
        group: int = 0,
        sources: Sequence[int] = (),
    ) -> tuple[Any, int]:
        """Return the next value from `src` with this tag (or `buffer`, filled), and who sent it.

        Parameters
        ----------
        group : int
            The word of the group; 0: the world.
        sources : sequence of int
            Who may be meant by None, if not all.
        """
        context = self._context
        line = context.call_site.line()
        if fault_injection.ARMED:
            fault_injection.hit("enter", context.rank)
        if self._posted:
            self.advance()
        message = self._find(src, tag, group)
        if message is None:
            look = partial(self._find, src, tag, group)
            message = self._wait_for_message(src, tag, line, deadline_ns, sources, look)
        if buffer is not None:
            self._check(buffer, message, line)
        try:
            value = self._content(buffer, message, line, deadline_ns)
        finally:
            self._took(message)
        context.operations += 1
        # a large array travels elsewhere, and its handle here
        context.nbytes += value.nbytes if message.kind in (ADOPTED, STREAMED) else len(message.body)
        return value, message.source

    def _content(self, buffer: AnyArray | None, message: Envelope, line: int, deadline_ns: int | None) -> Any:
        """Return the value, or the buffer, filled."""
        kind = message.kind
        if kind in (ADOPTED, STREAMED):
            self._streams_in[message.source].prefer(buffers=buffer is not None)
        if kind == STREAMED:
            return self._read_stream(buffer, message, line, deadline_ns)
        if buffer is None:
            return self._packer.unpack(message)
        self._packer.fill(buffer, message)
        return buffer

    def _read_stream(
        self, buffer: AnyArray | None, message: Envelope, line: int, deadline_ns: int | None
    ) -> AnyArray:
        form = self._packer.form(message)
        assert form is not None, "only arrays are streamed"
        whole = buffer is not None and buffer.flags.c_contiguous
        target = buffer if buffer is not None and whole else np.empty(form[1], form[0])
        context = self._context
        outer, context.open = context.open, context.open or -1  # half a message voids the epoch
        self._streams_in[message.source].read(target, message.body, Call(line, message.tag, deadline_ns))
        context.open = outer
        if buffer is None or whole:
            return target
        np.copyto(buffer, target)
        return buffer

    def _find(self, src: int | None, tag: int, group: int) -> Envelope | None:
        """Return the first message that matches; it stays pending until it was taken."""
        for source in self._order() if src is None else (src,):
            pending = self._pending[source]
            for message in pending:
                if message.tag == tag and message.group == group:
                    return message
            incoming = self._in[source]
            while incoming.has_message():
                message = incoming.take()
                self._file(message)
                if message.tag == tag and message.group == group:
                    return message
        return None

    def _file(self, message: Envelope) -> None:
        """Put aside what has arrived."""
        if message.kind == INTRODUCTION:
            self._introductions[message.source, message.group] = bytes(message.body)
        else:
            self._pending[message.source].append(message)

    def _order(self) -> Sequence[int]:
        """Return all sources, beginning behind the last one that was served: nobody starves."""
        n, last = self._context.world_size, self._last
        return [(last + 1 + i) % n for i in range(n)]

    def _took(self, message: Envelope) -> None:
        source = message.source
        self._last = source
        pending = self._pending[source]
        pending.remove(message)
        low = pending[0].number - 1 if pending else self._in[source].number
        self._newest[source] = newest = max(self._newest[source], message.number)
        self._in[source].acknowledge(low, newest)

    def _wait_for_message(
        self,
        src: int | None,
        tag: int,
        line: int,
        deadline_ns: int | None,
        sources: Sequence[int],
        look: Callable[[], T | None],
    ) -> T:
        """Wait until `look` finds something, which it does as soon as the right message is there."""
        context = self._context
        others = [r for r in sources or range(context.world_size) if r != context.rank]
        peers = (others or [context.rank]) if src is None else [src]
        rings = [self._in[r] for r in peers]
        only = rings[0] if len(rings) == 1 else None
        call = f"recv(src={src}{f', tag={tag}' if tag else ''})"

        def explain(finished: list[int]) -> NbParallelError:
            return DeadlockError(
                f"deadlock: rank {context.rank} waits in {call} on line {line}, and "
                + self._why_gone(finished)
                + self._other_tags(peers)
            )

        if peers == [context.rank] and deadline_ns is None:  # with a time-out it ends, and is no deadlock
            raise context.doom(
                DeadlockError(
                    f"deadlock: rank {context.rank} waits in {call} on line {line} for itself and has sent "
                    "itself nothing that matches" + self._other_tags([context.rank])
                )
            )

        def satisfied() -> bool:
            return any(ring.has_message() for ring in rings)

        has_message = only.has_message if only is not None else satisfied

        while True:
            wait = WaitRecord(
                Operation.recv, lambda: [] if satisfied() else peers, explain, line,
                any_source=src is None, peer=-1 if src is None else src, tag=tag, deadline_ns=deadline_ns,
            )  # fmt: skip
            self._sources = tuple(peers)
            spun, self._spun = self._spun, False
            try:
                if spun or not context.waiter.spin_until(has_message):
                    context.wait(has_message, -1 if src is None else src, wait)
            finally:
                self._sources = ()
            if self._posted:
                self.advance()
            found = look()
            if found is not None:
                return found

    # -- receives that were posted ---------------------------------------------------------------------

    def post(self, receive: Receive) -> Work:
        """Begin a receive."""
        self._posted.add(receive)
        self.advance()
        return receive.work

    def push(self, receive: Receive, deadline_ns: int | None, wait: bool) -> None:
        """Go on with a posted receive; until it is served, if `wait`."""
        self.advance()
        work = receive.work
        if work.done:
            return
        sources = receive.sources if receive.src is None else (receive.src,)
        others = [r for r in sources if r != self._context.rank]
        self._context.check_peers(others if receive.src is not None else ())
        if wait or (others and all(map(self._context.gone, others))):  # who only asks is told as well
            src, line = receive.src, self._context.call_site.line()
            look = partial(_served, work)
            self._wait_for_message(src, receive.tag, line, deadline_ns, receive.sources, look)

    def advance(self) -> None:
        """Take in everything that has arrived, and serve posted receives; not while a slot says "waiting"."""
        for source in range(self._context.world_size):
            self._drain_from(source)
        self._posted.match()

    def _serve(self, receive: Receive, message: Envelope) -> None:
        work = receive.work
        try:
            if receive.buffer is not None:
                self._check(receive.buffer, message, work.line)
        except CollectiveMismatchError as error:  # the message can still be received
            work.fail(error)
            return
        try:
            value = self._content(receive.buffer, message, work.line, None)
            work.finish(value if receive.buffer is None else receive.tensor, message.source)
        except Exception as error:  # whatever a value raises while it is rebuilt
            work.fail(error)
            if message.kind == STREAMED:
                raise  # in the middle of it: nothing more can come through that stream
        finally:
            self._took(message)
        self._context.operations += 1
        self._context.nbytes += len(message.body)

    def drop(self) -> None:
        """End what was posted in a cell with it."""
        self._posted.drop()

    def end_cell(self) -> list[str]:
        """Return what earlier cells have sent to this rank and nobody has received, in words."""
        arrived = [incoming.number for incoming in self._in]
        return self._unreceived.end_cell(self._pending, arrived, self._packer.form)

    # -- introductions of groups -----------------------------------------------------------------------

    def introduce(self, dst: int, group: int, packed: bytes, deadline_ns: int | None) -> None:
        """Tell a member of a group where it meets."""
        record = Payload(INTRODUCTION, b"", packed).record(-1, 0, group)
        if not self._out[dst].has_room(len(record)):
            self._wait_for_room(dst, len(record), 0, self._context.call_site.line(), deadline_ns)
        self._out[dst].put(record)

    def await_introduction(self, src: int, group: int, deadline_ns: int | None) -> bytes:
        """Return where a group meets, as soon as its first member has said so."""
        context, incoming = self._context, self._in[src]
        line = context.call_site.line()

        def explain(finished: list[int]) -> NbParallelError:
            return CollectiveMismatchError(
                f"rank {src} finished the cell without an operation of the group in which "
                f"rank {context.rank} waits for it on line {line}"
            )

        while True:
            self._drain_from(src)
            packed = self._introductions.get((src, group))
            if packed is not None:
                return packed
            wait = WaitRecord(
                Operation.new_group, lambda: [] if incoming.has_message() else [src], explain, line,
                peer=src, deadline_ns=deadline_ns,
            )  # fmt: skip
            self._sources = (src,)
            try:
                if not context.waiter.spin_until(incoming.has_message):
                    context.wait(incoming.has_message, src, wait)
            finally:
                self._sources = ()

    def _why_gone(self, ranks: list[int]) -> str:
        absent = [r for r in ranks if r not in self._context.participants]
        left = [r for r in ranks if r in self._context.participants]
        parts = [f"{rank_list(left)} finished the cell without sending it"] if left else []
        if absent:
            parts.append(f"{rank_list(absent)} {'is' if len(absent) == 1 else 'are'} not in this cell")
        return " and ".join(parts)

    def _other_tags(self, sources: Sequence[int]) -> str:
        tags = sorted({(r, m.tag) for r in sources for m in self._pending[r]})
        if not tags:
            return ""
        found = ", ".join(f"tag {tag} from rank {source}" for source, tag in tags[:8])
        return f" (what has arrived: {found})"

    def drain(self) -> None:
        """Take in what has arrived, but from those whose messages are just being waited for."""
        for source in self._context.others:
            if source not in self._sources:
                self._drain_from(source)
        self._posted.match()

    def _drain_from(self, source: int) -> None:
        incoming = self._in[source]
        while incoming.has_message():
            self._file(incoming.take())

    # -- checking ----------------------------------------------------------------------------------------

    def _check(self, buffer: AnyArray, message: Envelope, line: int) -> None:
        """Raise if the message does not fit the buffer; it can be received again then."""
        form = self._packer.form(message)
        if form is not None:
            dtype, shape = form
            if dtype == buffer.dtype and shape == buffer.shape:
                return
            sent = ("send", str(dtype), str(shape), "-", "-", str(message.line or "?"))
        else:
            value = "a pickled object"
            sent = ("send", value, "-", "-", "-", str(message.line or "?"))
        mine = ("recv", str(buffer.dtype), str(buffer.shape), "-", "-", str(line or "?"))
        raise CollectiveMismatchError(
            f"what rank {message.source} sent does not fit the buffer (nothing was written; "
            "it can still be received, x = recv(src=…) needs no buffer):\n"
            + (
                table({message.source: sent, self._context.rank: mine})
                if message.source != self._context.rank
                else f"  sent: {sent[1:3]}, buffer: {mine[1:3]}"
            )
        )

    def release(self, dst: int | None = None) -> None:  # noqa: D102 - inherited
        super().release(dst)
        if dst is None:
            for stream in self._streams_in:
                stream.release()

    def close(self) -> None:
        """Drop all messages."""
        for held in self._held:
            held.clear()
        for pending in self._pending:
            pending.clear()
        for out in self._streams_out:
            out.close()
        for stream in self._streams_in:
            stream.release()


def _served(work: Work) -> Work | None:
    return work if work.done else None
