"""Registration: which sessions know which segments and memories of this process."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable

from nbparallel.errors import ChannelClosedError
from nbparallel.sharing.broker import SegmentBroker
from nbparallel.sharing.lifecycle.segment import Block, Segment
from nbparallel.wire.segments import (
    AllowWrite,
    Forget,
    FramePayload,
    Freed,
    Intend,
    Register,
    Removed,
    segment_id,
)

ASK_SECONDS = 1.0
"""Between two requests for room; arbitrary."""


class Sessions:
    """The brokers of the sessions that a process is in.

    Parameters
    ----------
    on_gone : callable
        Called with a broker that cannot be reached any more; takes it off the list.
    """

    def __init__(self, on_gone: Callable[[SegmentBroker], None]) -> None:
        self.brokers: list[SegmentBroker] = []
        self.aside: list[SegmentBroker] = []
        """Those of them that are used only where a caller says so."""
        self._on_gone = on_gone
        self._asked = -ASK_SECONDS

    @property
    def usual(self) -> list[SegmentBroker]:
        """Those that are used where a caller does not say which."""
        return [broker for broker in self.brokers if broker not in self.aside] if self.aside else self.brokers

    def choose(self, broker: SegmentBroker | None) -> SegmentBroker | None:
        """Return `broker`, or the only one there is; None if there is none."""
        if broker is not None:
            return broker
        brokers = self.usual
        if len(brokers) > 1:
            raise ValueError(f"this process is in {len(brokers)} sessions: name one with broker=")
        return brokers[0] if brokers else None

    def intend(self, path: str) -> None:
        """Announce a name to all before it exists.

        Raises
        ------
        ChannelClosedError
            This is a rank, and its session has ended: the rank exits in a moment, and the name would stay.
        """
        for broker in list(self.brokers):
            try:
                broker.send(Intend(path))
            except ChannelClosedError:
                self._on_gone(broker)
                if broker.client:
                    raise

    def removed(self, path: str) -> None:
        """Withdraw a name in every session."""
        for broker in list(self.brokers):
            self.notify(broker, Removed(path))

    def make_room(self) -> bool:
        """Have all other processes return what they keep for reuse; not again within a second: return if so.

        A process that computes reads nothing for long, and must not find a thousand such messages.
        """
        now = time.monotonic()
        if not self.brokers or now < self._asked + ASK_SECONDS:
            return False
        self._asked = now
        for broker in list(self.brokers):
            self.notify(broker, Freed(0))
        return True

    def notify(self, broker: SegmentBroker, message: FramePayload) -> None:
        """Send a message to one session; nothing if that has ended."""
        try:
            broker.send(message)
        except ChannelClosedError:
            self._on_gone(broker)


class SegmentRegistrar:
    """Ids of own segments, and the sessions that know them; not thread-safe, its store locks.

    Parameters
    ----------
    own : dict
        Segments by our ids; what is registered under another id is entered there.
    """

    def __init__(self, client: int, sessions: Sessions, own: dict[int, Segment]) -> None:
        self._client, self._sessions, self._own = client, sessions, own
        self._serial = itertools.count(1)
        self._memories: dict[int, list[SegmentBroker]] = {}
        """Memory id -> sessions in which a process may keep it mapped."""

    def new_id(self) -> int:
        """Return an id that no segment of this process had, greater than all."""
        return segment_id(self._client, next(self._serial))

    def renumber(self, client: int, pooled: Iterable[Block]) -> None:
        """Become another client, in no session; a pooled block has another id at its next use."""
        self._client = client
        for block in pooled:
            self.unmap_elsewhere(block)

    def register(self, segment: Segment, broker: SegmentBroker | None) -> int:
        """Return the id under which a session knows a segment; register it there if it is new."""
        if broker is None or segment.broker is broker:
            return segment.id
        session_id = segment.registered.get(broker)
        if session_id is not None and broker not in segment.not_kept:
            return session_id
        if segment.block is not None:
            self._register(segment, broker, segment.id, segment.block.source.fd, segment.block.source.path)
            return segment.id
        # From one session into another: the same memory under an id of ours.
        session_id = session_id or self.new_id()
        source, source_id = segment.reach()
        fd = source.fetch(source_id, writable=segment.writable)
        try:
            self._register(segment, broker, session_id, fd)
        finally:
            os.close(fd)
        return session_id

    def _register(
        self, segment: Segment, broker: SegmentBroker, session_id: int, fd: int, path: str = ""
    ) -> None:
        memory = segment.memory if segment.own else 0
        if memory and broker not in (known := self._memories.setdefault(memory, [])):
            known.append(broker)
        try:
            broker.send(Register(session_id, segment.nbytes, segment.writable, memory, path), fd)
            self._own[session_id] = segment
            segment.registered[broker] = session_id
            segment.not_kept.discard(broker)
        except BaseException:
            # Whether an interrupted message went out is not known: take it back, which harms in no case.
            segment.registered.pop(broker, None)
            self._sessions.notify(broker, Forget(session_id))
            raise

    def allow_write(self, segment: Segment) -> None:
        """Let every process write to an own segment from now on."""
        if segment.writable:
            return
        if segment.block is not None:
            segment.block.for_all = True
        for broker, session_id in list(segment.registered.items()):
            self._sessions.notify(broker, AllowWrite(session_id))
        segment.writable = True

    def unmap_elsewhere(self, block: Block) -> None:
        """Have other processes unmap the memory of a block, which is not used again (idempotent)."""
        memory, block.memory, block.for_all = block.memory, 0, False
        if memory:
            self._unmap_elsewhere(memory)

    def _unmap_elsewhere(self, memory: int) -> None:
        for broker in list(self._memories.get(memory, ())):
            self._sessions.notify(broker, Freed(memory))
        self._memories.pop(memory, None)

    def repair(self, blocks: Iterable[Block]) -> None:
        """Do what was not done about blocks that are not there any more: something was interrupted."""
        living = {block.memory for block in blocks}
        for memory in [memory for memory in self._memories if memory not in living]:
            self._unmap_elsewhere(memory)

    def disconnect(self, broker: SegmentBroker) -> None:
        """Forget a session."""
        for known in list(self._memories.values()):
            if broker in known:
                known.remove(broker)
