"""The supervisor's poll: what waits for room goes out."""

import socket

from nbparallel.supervisor.clients import SupervisorEventLoop, readable, take
from nbparallel.wire.frames import Frame, Kind


def pair():
    """Return two ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def fill(box):
    """Send until frames wait; return how many were sent."""
    sent = 0
    while not box.waiting:
        box.send(Kind.IDLE, b"x" * 1000)
        sent += 1
    return sent


def drain(sock):
    """Take all that is there; return how many frames."""
    taken = 0
    while readable(sock):
        frame = take(sock)
        assert isinstance(frame, Frame)
        taken += 1
    return taken


def test_what_waits_goes_out_when_there_is_room():
    """Twice: whoever has emptied his outbox once is watched for room again the next time."""
    watch, (mine, theirs) = SupervisorEventLoop(), pair()
    with theirs:
        box = watch.add_socket(mine, lambda: None)
        for _ in range(2):
            sent = fill(box)
            watch.wait(block=False)
            assert box.waiting
            taken = drain(theirs)
            watch.wait()  # it would not end if the socket were not watched for room
            assert not box.waiting
            assert taken + drain(theirs) == sent
            watch.wait(block=False)
        watch.forget(mine)
