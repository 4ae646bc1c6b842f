"""Channel: frames over one end of a ``SOCK_SEQPACKET`` socketpair."""

from __future__ import annotations

import array
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from nbparallel.errors import ChannelClosedError, ForkedRankError
from nbparallel.wire import frames
from nbparallel.wire.frames import Frame
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
        if len(payload) <= frames.MAX_INLINE:
            data = frames.encode(kind, payload, epoch=epoch, sequence=sequence)
            self._send(data, fds, abandon)
            return
        fd = frames.spill(payload)
        try:
            data = frames.encode(kind, epoch=epoch, sequence=sequence, spilled=len(payload))
            self._send(data, [fd, *fds], abandon)
        finally:
            os.close(fd)

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
