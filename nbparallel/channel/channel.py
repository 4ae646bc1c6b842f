"""Channel: frames over one end of a ``SOCK_SEQPACKET`` socketpair."""

from __future__ import annotations

import _socket
import array
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from nbparallel.errors import (
    LET_WRITE,
    ChannelClosedError,
    FileDescriptorLimitError,
    ForkedRankError,
    NbParallelError,
    ProtocolError,
    ReadOnlyArrayError,
    SegmentLostError,
)
from nbparallel.wire import frames
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.segments import (
    NOTICES,
    Announce,
    Ended,
    Fetch,
    Fetched,
    FramePayload,
    Introduction,
    Lost,
    LostReason,
    Notice,
    Unmap,
    Welcome,
    creator_of,
)
from nbparallel.wire.system import ready

_RIGHTS = int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS)
SLICE_SECONDS = 0.05
"""No wait is longer than this without looking again whether it still makes sense."""
SHORTAGE_SECONDS = 10.0
"""How long the system may have no memory for a message before the channel is given up; arbitrary."""
PAUSE_SECONDS = 0.001
"""Between two tries while there is none."""


class Channel:
    """One end of a socketpair; owns the socket.

    Notes
    -----
    `send` may be called from several threads, `receive` from one at a time.  Both block in slices of at
    most 50 ms, so that signal handlers run, and both are inert in a forked child.

    An error that is no want of memory ends the channel for both sides: if only this one knew of it, the other
    would wait for what never comes.
    """

    def __init__(self, sock: socket.SocketType) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        # Reentrant: a signal handler, or a user's __del__, may send something while we do.
        self._send_lock = threading.RLock()
        self._pid = os.getpid()

    @classmethod
    def pair(cls) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a fresh socketpair; neither is inherited by default."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    @classmethod
    def from_fd(cls, fd: int) -> Self:
        """Take over an inherited descriptor."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """Return the descriptor, for poll."""
        return self._socket.fileno()

    def send(
        self,
        kind: int,
        payload: bytes = b"",
        *,
        fds: Sequence[int] = (),
        epoch: int = 0,
        sequence: int = 0,
        abandon: Callable[[], bool] | None = None,
    ) -> None:
        """Send one frame; the caller keeps its descriptors.

        Parameters
        ----------
        abandon : callable, optional
            Asked in every slice of a wait for room; True gives up with `ChannelClosedError`.
        """
        send = lambda data, fds: self._send(data, fds, abandon)  # noqa: E731
        frames.send(send, kind, payload, fds, epoch=epoch, sequence=sequence)

    def _send(self, data: bytes, fds: Sequence[int], abandon: Callable[[], bool] | None) -> None:
        self._check_pid()
        given_up = 0.0
        with self._send_lock:
            while True:
                try:
                    if fds:
                        self._socket.sendmsg([data], [(*_RIGHTS, array.array("i", fds))])
                    else:
                        self._socket.send(data)
                    return
                except BlockingIOError:
                    if abandon is not None and abandon():
                        raise ChannelClosedError(
                            "sending was abandoned: the other process does not read"
                        ) from None
                    poll = select.poll()
                    poll.register(self._socket, select.POLLOUT)
                    ready(poll, SLICE_SECONDS * 1000)
                except OSError as error:
                    given_up = given_up or time.monotonic() + SHORTAGE_SECONDS
                    if error.errno not in frames.PASSING or time.monotonic() > given_up:
                        raise self._over(error) from error
                    time.sleep(PAUSE_SECONDS)

    def receive_nowait(self) -> Frame | None:
        """Return the next frame if there is one, else None."""
        self._check_pid()
        try:
            frame = frames.receive(self._socket)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in frames.PASSING:
                raise self._over(error) from error
            time.sleep(PAUSE_SECONDS)  # the frame is still there
            return None
        if frame is None:
            raise ChannelClosedError("the other process closed its end")
        return frame

    def shut_down(self) -> None:
        """End the connection for both sides; the descriptor stays until `close`."""
        try:
            # Not closed: another thread may poll it, and another file would get its number.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other process is gone

    def _over(self, error: OSError) -> ChannelClosedError:
        self.shut_down()
        return ChannelClosedError(f"the other process is gone ({error})")

    def receive(self, timeout: float | None = None) -> Frame | None:
        """Wait for a frame; None when `timeout` seconds have passed.

        Raises
        ------
        ChannelClosedError
            The other end is gone.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            frame = self.receive_nowait()
            if frame is not None:
                return frame
            left = SLICE_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return None
            ready(poll, min(left, SLICE_SECONDS) * 1000)

    def _check_pid(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedRankError(
                f"this process ({os.getpid()}) was forked from {self._pid}, which alone may talk to the "
                "session; send results back through a pipe or a file"
            )

    def close(self) -> None:
        """Close the socket (idempotent)."""
        # That of `socket.socket` first looks for files over it, in two more functions.
        socket.SocketType.close(self._socket)


# SegmentClient: one process's end of the segment protocol.

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

    def begin(self, pid: int) -> None:
        """Become the client of process `pid`, this one, at the end from `introduce`; before anything else.

        Raises
        ------
        ChannelClosedError
            The supervisor has ended, or did not know of this process when the one that started it ended.
        """
        self._pid = self._channel._pid = pid
        pidfd, deadline = os.pidfd_open(pid), time.monotonic() + PATIENCE_SECONDS
        abandon = lambda: time.monotonic() > deadline  # noqa: E731
        try:
            self._channel.send(Kind.ANNOUNCE, Announce(pid).pack(), fds=[pidfd], abandon=abandon)
        finally:
            os.close(pidfd)
        frame = self._channel.receive(PATIENCE_SECONDS)
        if frame is None:
            raise ChannelClosedError(
                f"the supervisor did not answer the introduction of process {os.getpid()} within "
                f"{PATIENCE_SECONDS:g} s"
            )
        self.client = Welcome.unpack(frame.payload).client

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
            notice = NOTICES[frame.kind](frame.payload)
            if isinstance(notice, Lost):
                own = creator_of(notice.segment) == self.client
                if notice.reason != LostReason.DESCRIPTORS or not own:
                    return  # the answer to a request that was given up
            self._notices.append(notice)
        finally:
            frame.close()


def _has_descriptors() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


_LOST: dict[LostReason, tuple[type[NbParallelError], str]] = {
    LostReason.UNKNOWN: (
        SegmentLostError,
        "segment {:#x} is no longer there: its last array was deleted before this one was attached",
    ),
    LostReason.READ_ONLY: (
        ReadOnlyArrayError,
        f"ranks may only read this array: share it with {LET_WRITE}, or work on `x.copy()`",
    ),
    LostReason.DESCRIPTORS: (
        FileDescriptorLimitError,
        "the session's supervisor has no file descriptor left for another shared array: delete shared "
        "arrays, put small ones into one large array, or raise its limit (`ulimit -n`), of which it may "
        "use all that `ulimit -Hn` shows",
    ),
    LostReason.REMOVED: (
        SegmentLostError,
        "the name of segment {:#x} was removed by another program, so that it cannot be attached "
        "any more; processes that use it go on. Systems that remove a user's shared memory at log-out "
        "(RemoveIPC=yes in /etc/systemd/logind.conf) do that; `%sharing_strategy file_descriptor` needs "
        "no names",
    ),
    LostReason.NO_PROC: (
        SegmentLostError,
        "segment {:#x} cannot be handed out for reading only: /proc is not mounted here; "
        "`x = nbp.share(x)` lets ranks write to it, which works without",
    ),
}


def lost_error(lost: Lost, segment: int) -> NbParallelError:
    """Return what a fetch raises that the supervisor answers with this."""
    kind, text = _LOST[lost.reason]
    return kind(text.format(segment))


# Introduction: how a process that a client is about to start becomes a client as well.
#
# The client makes a socketpair, sends one end to the supervisor and leaves the other to the process.  While
# the system starts that, the supervisor answers at its end.  The process sends its identity, and reads the
# answer.
#
# A forked child copies each page of its parent's that it touches, and an object's count of references lies in
# its page.  So the parent makes all that it can.

_FAMILY, _TYPE = int(socket.AF_UNIX), int(socket.SOCK_SEQPACKET)


def introduce(parent: SegmentClient, *, daemon: bool, inherits: bool = False) -> socket.SocketType:
    """Have a process that is about to be started admitted; return its end of its connection.

    Parameters
    ----------
    parent : SegmentClient
        This process's own connection.
    daemon : bool
        Whether it ends with this process, however that ends; otherwise only with the root process.
    inherits : bool
        Whether it is forked, and holds from now on what this process holds now.

    Raises
    ------
    ChannelClosedError
        The supervisor has ended.
    """
    # Those of `socket.socketpair` are made anew as objects of Python.
    ours, theirs = _socket.socketpair(_FAMILY, _TYPE)
    try:
        parent.send(Introduction(daemon, inherits), theirs.fileno())
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours


def socket_of(fd: int) -> socket.SocketType:
    """Take over the descriptor of what `introduce` returned in another process."""
    return _socket.socket(_FAMILY, _TYPE, 0, fd)
