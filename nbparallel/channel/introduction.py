"""Introduction: how a process that a client has started becomes a client as well.

It has a copy of that client's socket, by inheritance or by ``SCM_RIGHTS``, and makes a socketpair.  One frame
over the copy takes one end to the supervisor, which answers at the other.  The copy is only ever written to,
and records keep their bounds, so that client does not notice.
"""

from __future__ import annotations

import os
import socket
import time

from nbparallel.channel.channel import Channel
from nbparallel.channel.segment_client import PATIENCE_SECONDS, SegmentClient
from nbparallel.errors import ChannelClosedError, ProtocolError
from nbparallel.wire.frames import Kind
from nbparallel.wire.parcels import Introduction, unpack_client


def send_introduction(fd: int, *, daemon: bool, parcel: int = 0) -> Channel:
    """Ask to become a client, before anything else is done with shared memory; `await_welcome` comes next.

    The supervisor answers within a tenth of a millisecond, in which this process can do something else.

    Parameters
    ----------
    fd : int
        Copy of the socket of the client that has started this process; closed in any case.
    daemon : bool
        Whether this process ends with that client, however that ends; otherwise only with the root process.
    parcel : int
        Of a forked process: what its parent named in `SegmentClient.forking`.

    Raises
    ------
    ChannelClosedError
        That client has ended, or the supervisor.
    """
    with Channel(socket.socket(fileno=fd)) as copy:
        mine, theirs = Channel.pair()
        channel = Channel(mine)
        try:
            with theirs:
                _send(copy, theirs.fileno(), Introduction(os.getpid(), daemon, parcel))
        except BaseException:
            channel.close()
            raise
        return channel


def await_welcome(channel: Channel) -> SegmentClient:
    """Return what this process is a client by; `channel` is closed if it does not become one.

    Raises
    ------
    ChannelClosedError
        The client that has started this process has ended, or the supervisor, or it did not answer within
        10 s.
    """
    try:
        return SegmentClient(channel, _welcome(channel))
    except BaseException:
        channel.close()
        raise


def _send(copy: Channel, end: int, introduction: Introduction) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    pidfd = os.pidfd_open(os.getpid())
    try:
        abandon = lambda: time.monotonic() > deadline  # noqa: E731
        copy.send(Kind.INTRODUCE, introduction.pack(), fds=[end, pidfd], abandon=abandon)
    finally:
        os.close(pidfd)


def _welcome(channel: Channel) -> int:
    frame = channel.receive(PATIENCE_SECONDS)
    if frame is None:
        raise ChannelClosedError(
            f"the supervisor did not answer the introduction of process {os.getpid()} within "
            f"{PATIENCE_SECONDS:g} s"
        )
    try:
        if frame.kind is not Kind.WELCOME:
            raise ProtocolError(f"unexpected {frame.kind.name} frame as an answer to INTRODUCE")
        return unpack_client(frame.payload)
    finally:
        frame.close()
