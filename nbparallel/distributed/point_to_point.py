"""send and recv.

Messages from one rank to another arrive in the order they were sent, for each tag.  A receiver that looks
for one tag keeps what it passes (`_pending`); so does every rank that waits for anything, which is why a send
only blocks while its receiver computes, or after it has left the cell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from nbparallel.distributed import faultpoints
from nbparallel.distributed.fingerprint import table
from nbparallel.distributed.member import Member, Wait
from nbparallel.distributed.memory import AnyArray
from nbparallel.distributed.messages import INTRODUCTION, Packer, Parcel
from nbparallel.distributed.ring import RECORD, Incoming, Message, Outgoing
from nbparallel.errors import CollectiveMismatchError, DeadlockError, NbParallelError, rank_list
from nbparallel.wire.control import Operation

INLINE = 32 << 10
"""Bytes of a value that travel inside a ring; larger ones get shared memory of their own."""


class PointToPoint:
    """The messages of one rank."""

    def __init__(self, member: Member) -> None:
        view, waiter, rank = member.view, member.waiter, member.rank
        self._member = member
        self._out = [Outgoing(view, waiter, rank, r) for r in range(member.world_size)]
        self._in = [Incoming(view, waiter, r, rank) for r in range(member.world_size)]
        self._pending: list[deque[Message]] = [deque() for _ in range(member.world_size)]
        self._introductions: dict[tuple[int, int], bytes] = {}
        self._newest = [0] * member.world_size
        self._held: list[deque[tuple[int, object]]] = [deque() for _ in range(member.world_size)]
        inline = min(INLINE, view.layout.ring_capacity // 2) - RECORD.size
        self._packer = Packer(member.store, member.attach, inline)
        self._last = -1
        self._sources: tuple[int, ...] = ()
        self.strict = False
        member.progress = self.drain

    # -- sending ---------------------------------------------------------------------------------------

    def send(
        self, x: Any, dst: int, tag: int, *, view: bool, deadline_ns: int | None, group: int = 0
    ) -> None:
        """Send `x`; returns when the receiver has it or it is buffered."""
        member = self._member
        line = member.line()
        parcel = self._packer.pack(x, view=view)
        record = parcel.record(tag, line, group)
        ring = self._out[dst]
        self.release(dst)
        if faultpoints.ARMED:
            faultpoints.hit("enter", member.rank)
        if not ring.has_room(len(record)):
            self._wait_for_room(dst, len(record), tag, line, deadline_ns)
        number = ring.number + 1
        if parcel.keep is not None:
            self._held[dst].append((number, parcel.keep))
        if faultpoints.ARMED:
            faultpoints.hit("wrote_header", member.rank)
            faultpoints.hit("half_payload", member.rank)
        ring.put(record)
        if faultpoints.ARMED:
            faultpoints.hit("wrote_flag", member.rank)
        member.operations += 1
        member.nbytes += parcel.nbytes
        if self.strict:
            self._wait_until_taken(dst, number, tag, line, deadline_ns)
        if faultpoints.ARMED:
            faultpoints.hit("leave", member.rank)

    def release(self, dst: int | None = None) -> None:
        """Let go of what receivers have taken over."""
        for rank in range(self._member.world_size) if dst is None else (dst,):
            held = self._held[rank]
            while held and held[0][0] <= self._out[rank].taken():
                held.popleft()

    def _wait_for_room(self, dst: int, nbytes: int, tag: int, line: int, deadline_ns: int | None) -> None:
        ring, member = self._out[dst], self._member

        def explain(finished: list[int]) -> NbParallelError:
            return DeadlockError(
                f"deadlock: rank {member.rank} waits in send(dst={dst}) on line {line} for room, and rank "
                f"{dst} finished the cell without receiving what was sent before"
            )

        if dst == member.rank:  # nobody else makes room
            self._drain_from(dst)
            return

        wait = Wait(
            Operation.send, lambda: [] if ring.has_room(nbytes) else [dst], explain, line,
            peer=dst, tag=tag, deadline_ns=deadline_ns,
        )  # fmt: skip
        member.wait(lambda: ring.has_room(nbytes), dst, wait)

    def _wait_until_taken(self, dst: int, number: int, tag: int, line: int, deadline_ns: int | None) -> None:
        """Rendezvous: what `strict_sync` is for."""
        ring, member = self._out[dst], self._member

        def explain(finished: list[int]) -> NbParallelError:
            return DeadlockError(
                f"deadlock: rank {member.rank} waits in send(dst={dst}) on line {line}, and rank {dst} "
                "finished the cell without receiving it"
            )

        if dst == member.rank:
            raise member.doom(
                DeadlockError(f"deadlock: rank {dst} sends to itself on line {line} and waits for itself")
            )
        wait = Wait(
            Operation.send, lambda: [] if ring.newest_taken() >= number else [dst], explain, line,
            peer=dst, tag=tag, target=number, deadline_ns=deadline_ns,
        )  # fmt: skip
        member.wait(lambda: ring.newest_taken() >= number, dst, wait)

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
        member = self._member
        line = member.line()
        if faultpoints.ARMED:
            faultpoints.hit("enter", member.rank)
        message = self._find(src, tag, group)
        if message is None:
            message = self._wait_for_message(src, tag, line, deadline_ns, group, sources)
        if buffer is not None:
            self._check(buffer, message, line)
        try:
            if buffer is None:
                value = self._packer.unpack(message)
            else:
                self._packer.fill(buffer, message)
                value = buffer
        finally:
            self._took(message)
        member.operations += 1
        member.nbytes += len(message.body)
        return value, message.source

    def _find(self, src: int | None, tag: int, group: int) -> Message | None:
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

    def _file(self, message: Message) -> None:
        """Put aside what has arrived."""
        if message.kind == INTRODUCTION:
            self._introductions[message.source, message.group] = bytes(message.body)
        else:
            self._pending[message.source].append(message)

    def _order(self) -> Sequence[int]:
        """Return all sources, beginning behind the last one that was served: nobody starves."""
        n, last = self._member.world_size, self._last
        return [(last + 1 + i) % n for i in range(n)]

    def _took(self, message: Message) -> None:
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
        group: int,
        sources: Sequence[int],
    ) -> Message:
        member = self._member
        peers = [r for r in sources or range(member.world_size) if r != member.rank] if src is None else [src]
        rings = [self._in[r] for r in peers]
        only = rings[0] if len(rings) == 1 else None
        call = f"recv(src={src}{f', tag={tag}' if tag else ''})"

        def explain(finished: list[int]) -> NbParallelError:
            return DeadlockError(
                f"deadlock: rank {member.rank} waits in {call} on line {line}, and {self._why_gone(finished)}"
                + self._other_tags(peers)
            )

        if src == member.rank or not peers:
            raise member.doom(
                DeadlockError(
                    f"deadlock: rank {member.rank} waits in {call} on line {line} for itself and has sent "
                    "itself nothing that matches" + self._other_tags([member.rank])
                )
            )

        def satisfied() -> bool:
            return any(ring.has_message() for ring in rings)

        has_message = only.has_message if only is not None else satisfied

        while True:
            wait = Wait(
                Operation.recv, lambda: [] if satisfied() else peers, explain, line,
                any_source=src is None, peer=-1 if src is None else src, tag=tag, deadline_ns=deadline_ns,
            )  # fmt: skip
            self._sources = tuple(peers)
            try:
                if not member.waiter.spin_until(has_message):
                    member.wait(satisfied, -1 if src is None else src, wait)
            finally:
                self._sources = ()
            message = self._find(src, tag, group)
            if message is not None:
                return message

    # -- introductions of groups -----------------------------------------------------------------------

    def introduce(self, dst: int, group: int, packed: bytes, deadline_ns: int | None) -> None:
        """Tell a member of a group where it meets."""
        record = Parcel(INTRODUCTION, b"", packed).record(-1, 0, group)
        if not self._out[dst].has_room(len(record)):
            self._wait_for_room(dst, len(record), 0, self._member.line(), deadline_ns)
        self._out[dst].put(record)

    def await_introduction(self, src: int, group: int, deadline_ns: int | None) -> bytes:
        """Return where a group meets, as soon as its first member has said so."""
        member, incoming = self._member, self._in[src]
        line = member.line()

        def explain(finished: list[int]) -> NbParallelError:
            return CollectiveMismatchError(
                f"rank {src} finished the cell without an operation of the group in which rank {member.rank} "
                f"waits for it on line {line}"
            )

        while True:
            self._drain_from(src)
            packed = self._introductions.get((src, group))
            if packed is not None:
                return packed
            wait = Wait(
                Operation.new_group, lambda: [] if incoming.has_message() else [src], explain, line,
                peer=src, deadline_ns=deadline_ns,
            )  # fmt: skip
            self._sources = (src,)
            try:
                if not member.waiter.spin_until(incoming.has_message):
                    member.wait(incoming.has_message, src, wait)
            finally:
                self._sources = ()

    def _why_gone(self, ranks: list[int]) -> str:
        absent = [r for r in ranks if r not in self._member.participants]
        left = [r for r in ranks if r in self._member.participants]
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
        for source in self._member.others:
            if source not in self._sources:
                self._drain_from(source)

    def _drain_from(self, source: int) -> None:
        incoming = self._in[source]
        while incoming.has_message():
            self._file(incoming.take())

    # -- checking ----------------------------------------------------------------------------------------

    def _check(self, buffer: AnyArray, message: Message, line: int) -> None:
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
                table({message.source: sent, self._member.rank: mine})
                if message.source != self._member.rank
                else f"  sent: {sent[1:3]}, buffer: {mine[1:3]}"
            )
        )

    def close(self) -> None:
        """Drop all messages."""
        for held in self._held:
            held.clear()
        for pending in self._pending:
            pending.clear()


def check_buffer(buffer: Any) -> AnyArray | None:
    """Return `buffer` as a plain array.

    Raises
    ------
    TypeError
        It is no array; a number was probably meant as the source.
    ValueError
        It is read-only.
    """
    if buffer is None:
        return None
    if isinstance(buffer, int | np.integer) and not isinstance(buffer, bool):
        raise TypeError(
            f"recv({buffer}) takes an array to fill, not a rank: write recv(src={buffer}), which returns the "
            "value"
        )
    if not isinstance(buffer, np.ndarray) or isinstance(buffer, np.ma.MaskedArray):
        raise TypeError(f"recv fills numpy arrays, not {type(buffer).__name__}; x = recv(src=…) needs none")
    if buffer.dtype.hasobject:
        raise TypeError("recv cannot fill an array of Python objects; x = recv(src=…) needs no buffer")
    if not buffer.flags.writeable:
        raise ValueError("recv fills this array, and it is read-only: pass x.copy(), or use x = recv(src=…)")
    return buffer.view(np.ndarray)
