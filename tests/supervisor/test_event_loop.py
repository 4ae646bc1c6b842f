"""The supervisor's poll: what waits for room goes out, and a descriptor's next owner is no other's."""

import socket
from functools import partial

from nbparallel.supervisor.clients import SupervisorEventLoop, readable, take
from nbparallel.wire.frames import Frame, Kind, encode


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


def test_what_comes_within_a_moment_is_heard_together(monkeypatch):
    """Who has heard what others are about to say as well is woken once for all of them."""
    watch, ends, heard, slept = SupervisorEventLoop(), [pair() for _ in range(3)], [], []

    def listen(sock):
        assert isinstance(take(sock), Frame)
        heard.append(sock)
        watch.linger = len(heard) == 1

    def others_speak(seconds):
        slept.append(seconds)
        for _, theirs in ends[1:]:
            theirs.send(encode(Kind.HOLD))

    monkeypatch.setattr("nbparallel.supervisor.clients.time.sleep", others_speak)
    for mine, _ in ends:
        watch.add_socket(mine, partial(listen, mine))
    ends[0][1].send(encode(Kind.HOLD))
    watch.wait()
    watch.wait(block=False)
    assert (len(heard), len(slept)) == (1, 0), "who has more to do does not linger"
    watch.wait()
    assert (len(heard), len(slept)) == (3, 1)
    watch.wait(block=False)
    assert len(slept) == 1
    for mine, theirs in ends:
        watch.forget(mine)
        theirs.close()


def test_what_has_come_already_is_heard_without_a_pause(monkeypatch):
    """A rank that lets go of memory and holds it again, all the time, is not kept waiting for each."""
    watch, (mine, theirs), heard, slept = SupervisorEventLoop(), pair(), [], []

    def listen():
        heard.append(take(mine))
        watch.linger = True

    monkeypatch.setattr("nbparallel.supervisor.clients.time.sleep", slept.append)
    watch.add_socket(mine, listen)
    for _ in range(3):
        theirs.send(encode(Kind.HOLD))
    for _ in range(3):
        watch.wait()
    assert (len(heard), slept) == (3, [])
    theirs.close()
    watch.wait()
    assert heard[3] is None
    watch.forget(mine)


def test_a_descriptor_that_comes_again_is_watched_anew():
    """A socket that was forgotten while it was full leaves nothing to the next one with its number."""
    watch = SupervisorEventLoop()
    for _ in range(2):
        mine, theirs = pair()
        with theirs:
            box = watch.add_socket(mine, lambda: None)
            sent = fill(box)
            watch.wait(block=False)
            taken = drain(theirs)
            watch.wait()
            assert taken + drain(theirs) == sent
            fill(box)
            watch.wait(block=False)
            watch.forget(mine)


def test_readable_names_those_that_are():
    """Of several sockets; an end counts as something to read."""
    (one, other), (third, fourth), (fifth, sixth) = pair(), pair(), pair()
    with one, other, third, fourth, fifth, sixth:
        assert readable(one, third, fifth) == set()
        other.send(b"x")
        sixth.close()
        assert readable(one, third, fifth) == {one.fileno(), fifth.fileno()}
        assert readable() == set()
