"""SegmentClient: one process's end of the segment protocol."""

from __future__ import annotations

import os
import select
import threading
import time

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
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.segments import (
    NOTICES,
    Ended,
    Fetch,
    Fetched,
    FramePayload,
    Lost,
    LostReason,
    Notice,
    Unmap,
    creator_of,
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
    `fetch` the answer may still come: it then is a `Fetched` among the notices.
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

    def send(self, message: FramePayload, fd: int | None = None, *, sequence: int = 0) -> None:
        """Send a message, with a descriptor that the caller keeps; `sequence`: the number of a question."""
        self._check_pid()
        with self._lock:
            self._unread += 1
            if self._unread >= READ_EVERY:
                self._read()
        fds, deadline = () if fd is None else (fd,), time.monotonic() + self._patience
        abandon = lambda: time.monotonic() > deadline  # noqa: E731
        self._channel.send(message.kind, message.pack(), fds=fds, sequence=sequence, abandon=abandon)

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
                self.send(Fetch(segment, writable, memory), sequence=sequence)
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
            self._notices.append(Fetched(segment, 0, False))
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

    def _answer(self, frame: Frame, segment: int) -> int:
        try:
            if frame.kind is Kind.LOST:
                raise lost_error(Lost.unpack(frame.payload), segment)
            fetched = Fetched.unpack(frame.payload)
            if fetched.segment != segment or len(frame.fds) != 1:
                raise ProtocolError(f"the answer to FETCH {segment:#x} is damaged")
            # Records keep their order: notices about this segment sent before the hold no longer apply.
            self._notices = [n for n in self._notices if isinstance(n, Ended | Unmap) or n.segment != segment]
            return frame.fds.pop()
        finally:
            frame.close()

    def _note(self, frame: Frame) -> None:
        if frame.sequence in self._awaited and frame.kind in (Kind.FETCHED, Kind.LOST):
            self._answers[frame.sequence] = frame
            return
        try:
            if (unpack := NOTICES.get(frame.kind)) is not None:
                notice = unpack(frame.payload)
                if isinstance(notice, Lost):
                    own = creator_of(notice.segment) == self.client
                    if notice.reason is not LostReason.DESCRIPTORS or not own:
                        return  # the answer to a request that was given up
                self._notices.append(notice)
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
