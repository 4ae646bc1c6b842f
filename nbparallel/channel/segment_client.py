"""SegmentClient: one process's end of the segment protocol."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable

from nbparallel.channel.channel import SLICE_SECONDS, Channel
from nbparallel.errors import (
    LET_WRITE,
    FileDescriptorLimitError,
    ForkedRankError,
    NbParallelError,
    ProtocolError,
    ReadOnlyArrayError,
    SegmentLostError,
)
from nbparallel.wire.frames import MAX_INLINE, Frame, Kind
from nbparallel.wire.segments import (
    Fetch,
    Fetched,
    Hold,
    Lost,
    LostReason,
    Notice,
    NoticeKind,
    Register,
    creator_of,
    pack_path,
    pack_segment,
    pack_use,
    unpack_memory,
    unpack_segment,
    unpack_use,
)
from nbparallel.wire.system import ready

PATIENCE_SECONDS = 10.0
"""The supervisor answers within a millisecond; if it does not within this, something is broken."""


READ_EVERY = 64
"""Frames sent before received ones are read: a socket holds a few hundred, and the supervisor answers every
release of a segment that no other client holds."""


class SegmentClient:
    """Asks the supervisor for segments, and answers for this process's own.

    Parameters
    ----------
    channel : Channel
        Used for nothing else; the client owns it.
    client : int
        This process's client number in the session.

    Notes
    -----
    Thread-safe.  All waits are cut into slices of at most 50 ms and bounded.  After an interrupt within
    `fetch` the answer may still come: it then is an ``UNCLAIMED_HOLD`` notice.
    """

    def __init__(self, channel: Channel, client: int, *, patience: float = PATIENCE_SECONDS) -> None:
        self.client = client
        self._channel = channel
        self._patience = patience
        self._lock = threading.RLock()
        self._sequence = 0
        self._awaited: set[int] = set()
        self._answers: dict[int, Frame] = {}
        """Answers read by a signal handler, or a user's ``__del__``, while a call above it waits for them."""
        self._notices: list[Notice] = []
        self._unread = 0
        self._pid = os.getpid()
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)

    # docstrings as in `nbparallel.sharing.SegmentBroker`

    def register(
        self, segment: int, nbytes: int, fd: int, *, writable: bool, path: str = "", memory: int = 0
    ) -> None:
        """Announce an own segment and hold it; the caller keeps `fd`."""
        self._send(Kind.REGISTER, Register(segment, nbytes, writable, path, memory).pack(), fd=fd)

    def intend(self, path: str) -> None:
        """Announce a name before it exists."""
        self._send(Kind.INTEND, pack_path(path))

    def removed(self, path: str) -> None:
        """Notify the supervisor that an announced name is gone, or was never made."""
        self._send(Kind.REMOVED, pack_path(path))

    def release(self, segment: int, memory: int = 0) -> None:
        """End this process's hold; harmless if there is none.  What `memory` names stays mapped here."""
        self._send(Kind.RELEASE, pack_use(segment, memory))

    def hold(self, segment: int, memory: int, *, writable: bool) -> None:
        """Hold a use of a memory that is still mapped here; does not wait for an answer."""
        self._send(Kind.HOLD, Hold(segment, memory, writable).pack())

    def freed(self, memory: int) -> None:
        """Notify the supervisor that an own memory was returned to the system; 0: that there is no room."""
        self._send(Kind.FREED, pack_segment(memory))

    def allow_write(self, segment: int) -> None:
        """Let others write to an own segment from now on."""
        self._send(Kind.ALLOW_WRITE, pack_segment(segment))

    def forget(self, segment: int) -> None:
        """End the hold of an own segment, without an ``IDLE`` notice later."""
        self._send(Kind.FORGET, pack_segment(segment))

    # messages in flight, and processes that this one starts: `wire.parcels`

    def post(
        self, parcel: int, segments: Iterable[int], *, mailbox: int = 0, carried: Iterable[int] = ()
    ) -> None:
        """Let a message hold segments, and mailboxes whose reading ends it carries, until it is taken."""
        from nbparallel.wire.parcels import Post  # few processes send any; loading its classes takes 4 ms

        payload = Post(parcel, mailbox, tuple(segments), tuple(carried)).pack()
        if len(payload) > MAX_INLINE:
            self._channel.send(Kind.POST, payload, abandon=self._abandon())
        else:
            self._send(Kind.POST, payload)

    def take(self, parcel: int) -> None:
        """End what a message holds: what this process wants of it, it holds now."""
        self._send(Kind.TAKE, pack_segment(parcel))

    def open_mailbox(self, mailbox: int) -> None:
        """Notify the supervisor that this process can read from a mailbox."""
        self._send(Kind.OPEN, pack_segment(mailbox))

    def close_mailbox(self, mailbox: int) -> None:
        """Notify the supervisor that it can no longer."""
        self._send(Kind.CLOSE, pack_segment(mailbox))

    def introduce(self, payload: bytes, fd: int) -> None:
        """Have a process admitted that is about to be started; `fd` is the supervisor's end for it."""
        self._send(Kind.INTRODUCE, payload, fd=fd)

    def fork_done(self, process: int, pidfd: int | None) -> None:
        """Say which process a forked child is, or that there is none."""
        self._send(Kind.FORK_DONE, pack_segment(process), fd=pidfd)

    def meet(self, place: str, fd: int) -> None:
        """Meet other guests as ranks of a world: over the socketpair with the end `fd` it is spoken of."""
        self._send(Kind.MEET, os.fsencode(place), fd=fd)

    def leave_world(self) -> None:
        """Leave that world: what this process holds now is held until all have left."""
        self._send(Kind.LEAVE_WORLD, b"")

    def fetch(self, segment: int, *, writable: bool, memory: int = 0) -> int:
        """Hold a segment and return a descriptor of it, which the caller closes.

        Raises
        ------
        SegmentLostError
            Its memory is no longer there, or no answer arrived within 10 s.
        ReadOnlyArrayError
            `writable` was asked for, and its creator does not allow that.
        FileDescriptorLimitError
            The supervisor has no descriptor left.
        ChannelClosedError
            The session is gone.
        """
        self._check_pid()
        with self._lock:
            self._sequence += 1
            sequence = self._sequence
            deadline = time.monotonic() + self._patience
            self._awaited.add(sequence)
            try:
                self._send(Kind.FETCH, Fetch(segment, writable, memory).pack(), sequence=sequence)
                while time.monotonic() < deadline:
                    frame = self._answers.pop(sequence, None) or self._receive(segment)
                    if frame is None:
                        continue
                    if frame.kind in (Kind.FETCHED, Kind.LOST) and frame.sequence == sequence:
                        return self._answer(frame, segment)
                    self._note(frame)
            finally:
                self._awaited.discard(sequence)
                late = self._answers.pop(sequence, None)
                if late is not None:
                    self._note(late)
        raise SegmentLostError(
            f"the supervisor did not hand out segment {segment:#x} within {self._patience:g} s"
        )

    def fileno(self) -> int:
        """Return the socket's descriptor, for poll: readable when `notices` has something."""
        return self._channel.fileno()

    def notices(self) -> tuple[Notice, ...]:
        """Return what has come in unasked since the last call, without waiting."""
        self._check_pid()
        with self._lock:
            self._read()
            if not self._notices:
                return ()
            notices = tuple(self._notices)
            self._notices.clear()
            return notices

    def close(self) -> None:
        """Close the channel: all holds of this process end."""
        self._channel.close()

    def _receive(self, segment: int) -> Frame | None:
        try:
            return self._channel.receive(SLICE_SECONDS)
        except ProtocolError as error:
            if _has_descriptors():
                raise
            # The descriptor was lost on arrival; the hold was granted all the same.
            self._notices.append(Notice(NoticeKind.UNCLAIMED_HOLD, segment))
            raise FileDescriptorLimitError(
                "this process has no file descriptor left to receive a shared array: delete shared arrays, "
                "put small ones into one large array, or raise the limit (`ulimit -n`)"
            ) from error

    def _check_pid(self) -> None:
        # Before any lock: the process this one was forked from may have held it.
        if os.getpid() != self._pid:
            raise ForkedRankError(
                f"this process ({os.getpid()}) was forked from {self._pid}, which alone may share arrays"
            )

    def _read(self) -> None:
        self._unread = 0
        # Mostly there is nothing, and an exception takes three times as long to say so.
        if self._channel.fileno() >= 0 and self._nothing_came():
            return
        while (frame := self._channel.receive_nowait()) is not None:
            self._note(frame)

    def _nothing_came(self) -> bool:
        try:
            return not ready(self._poll, 0)
        except RuntimeError:  # a signal handler, called while this very thread polls
            return False

    def _send(self, kind: Kind, payload: bytes, *, fd: int | None = None, sequence: int = 0) -> None:
        self._check_pid()
        with self._lock:
            self._unread += 1
            if self._unread >= READ_EVERY:
                self._read()
        if self._channel.send_at_once(kind, payload, sequence, fd):
            return
        fds = () if fd is None else (fd,)
        self._channel.send(kind, payload, fds=fds, sequence=sequence, abandon=self._abandon())

    def _abandon(self) -> Callable[[], bool]:
        deadline = time.monotonic() + self._patience
        return lambda: time.monotonic() > deadline

    def _answer(self, frame: Frame, segment: int) -> int:
        try:
            if frame.kind is Kind.LOST:
                raise lost_error(Lost.unpack(frame.payload), segment)
            fetched = Fetched.unpack(frame.payload)
            if fetched.segment != segment or len(frame.fds) != 1:
                raise ProtocolError(f"the answer to FETCH {segment:#x} is damaged")
            # Records keep their order: notices about this segment sent before the hold no longer apply.
            self._notices = [n for n in self._notices if n.memory or n.segment != segment]
            return frame.fds.pop()
        finally:
            frame.close()

    def _note(self, frame: Frame) -> None:
        if frame.sequence in self._awaited and frame.kind in (Kind.FETCHED, Kind.LOST):
            self._answers[frame.sequence] = frame
            return
        try:
            if frame.kind is Kind.IDLE:
                self._notices.append(Notice(NoticeKind.IDLE, unpack_segment(frame.payload, frame.kind)))
            elif frame.kind is Kind.DROP:
                self._notices.append(Notice(NoticeKind.DROP, unpack_segment(frame.payload, frame.kind)))
            elif frame.kind is Kind.ENDED:
                self._notices.append(Notice(NoticeKind.ENDED, *unpack_use(frame.payload, frame.kind)))
            elif frame.kind is Kind.UNMAP:
                memory = unpack_memory(frame.payload, frame.kind)
                self._notices.append(Notice(NoticeKind.UNMAP, 0, memory))
            elif frame.kind is Kind.FETCHED:
                # The request was given up: its time-out passed, or it was interrupted.
                self._notices.append(Notice(NoticeKind.UNCLAIMED_HOLD, Fetched.unpack(frame.payload).segment))
            elif frame.kind is Kind.LOST:
                lost = Lost.unpack(frame.payload)  # of others' segments: the request was given up
                if lost.reason is LostReason.DESCRIPTORS and creator_of(lost.segment) == self.client:
                    self._notices.append(Notice(NoticeKind.NOT_KEPT, lost.segment))
            else:
                raise ProtocolError(f"unexpected {frame.kind.name} frame on the segment socket")
        finally:
            frame.close()


def _has_descriptors() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def lost_error(lost: Lost, segment: int) -> NbParallelError:
    """Return what a fetch raises that the supervisor answers with this."""
    if lost.reason is LostReason.READ_ONLY:
        return ReadOnlyArrayError(
            f"ranks may only read this array: share it with {LET_WRITE}, or work on `x.copy()`"
        )
    if lost.reason is LostReason.DESCRIPTORS:
        return FileDescriptorLimitError(
            "the session's supervisor has no file descriptor left for another shared array: delete shared "
            "arrays, put small ones into one large array, or raise its limit (`ulimit -n`), of which it may "
            "use all that `ulimit -Hn` shows"
        )
    if lost.reason is LostReason.REMOVED:
        return SegmentLostError(
            f"the name of segment {segment:#x} was removed by another program, so that it cannot be attached "
            "any more; processes that use it go on. Systems that remove a user's shared memory at log-out "
            "(RemoveIPC=yes in /etc/systemd/logind.conf) do that; `%sharing_strategy file_descriptor` needs "
            "no names"
        )
    if lost.reason is LostReason.NO_PROC:
        return SegmentLostError(
            f"segment {segment:#x} cannot be handed out for reading only: /proc is not mounted here; "
            "`x = nbp.share(x)` lets ranks write to it, which works without"
        )
    return SegmentLostError(
        f"segment {segment:#x} is no longer there: its last array was deleted before this one was attached"
    )
