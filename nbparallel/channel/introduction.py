"""Introduction: how a process that a client is about to start becomes a client as well.

The client makes a socketpair, sends one end to the supervisor and leaves the other to the process.  While the
system starts that, the supervisor answers at its end.  The process sends its identity, and reads the answer.

A forked child copies each page of its parent's that it touches, and an object's count of references lies in
its page.  So the parent makes all that it can.
"""

from __future__ import annotations

import _socket
import os
import socket
import time

from nbparallel.channel.channel import Channel
from nbparallel.channel.segment_client import PATIENCE_SECONDS, SegmentClient
from nbparallel.errors import ChannelClosedError, ProtocolError
from nbparallel.wire.frames import Kind
from nbparallel.wire.parcels import Introduction
from nbparallel.wire.segments import Announce, Welcome

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


class IntroducedClient:
    """What an introduced process is a client by, once it has begun.

    Parameters
    ----------
    end : socket
        From `introduce`; owned.
    """

    def __init__(self, end: socket.SocketType) -> None:
        self._channel = Channel(end)
        self.client = SegmentClient(self._channel, 0)

    def begin(self, pid: int) -> SegmentClient:
        """Return what process `pid`, this one, is a client by; to be called before anything else is.

        Raises
        ------
        ChannelClosedError
            The supervisor has ended, or did not know of this process when the one that started it ended.
        """
        self.client._pid = self._channel._pid = pid
        pidfd, deadline = os.pidfd_open(pid), time.monotonic() + PATIENCE_SECONDS
        abandon = lambda: time.monotonic() > deadline  # noqa: E731
        try:
            self._channel.send(Kind.ANNOUNCE, Announce(pid).pack(), fds=[pidfd], abandon=abandon)
        finally:
            os.close(pidfd)
        self.client.client = _await_welcome(self._channel)
        return self.client

    def close(self) -> None:
        """Close the connection: the process that made this for a child does so."""
        self.client.close()


def _await_welcome(channel: Channel) -> int:
    frame = channel.receive(PATIENCE_SECONDS)
    if frame is None:
        raise ChannelClosedError(
            f"the supervisor did not answer the introduction of process {os.getpid()} within "
            f"{PATIENCE_SECONDS:g} s"
        )
    try:
        if frame.kind is not Kind.WELCOME:
            raise ProtocolError(f"unexpected {frame.kind.name} frame as an answer to INTRODUCE")
        return Welcome.unpack(frame.payload).client
    finally:
        frame.close()
