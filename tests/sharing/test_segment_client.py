"""The client's end of the segment protocol, over a real socket."""

import os
import select
import threading
import time
from types import SimpleNamespace

import pytest

from nbparallel.channel import Channel, SegmentClient, channel
from nbparallel.errors import ChannelClosedError, SegmentLostError
from nbparallel.sharing.strategies.memfd import FileDescriptorStrategy
from nbparallel.wire.frames import Kind
from nbparallel.wire.segments import (
    Drop,
    Fetched,
    Freed,
    Idle,
    Release,
    segment_id,
)


@pytest.fixture
def ends():
    """Make a client and the other end of its socket."""
    ours, theirs = Channel.pair()
    client, other = SegmentClient(Channel(ours), 1, patience=0.3), Channel(theirs)
    yield client, other
    client.close()
    other.close()


def test_silence_is_bounded(ends):
    """A supervisor that never answers costs the bound, not for ever."""
    client, _ = ends
    begun = time.monotonic()
    with pytest.raises(SegmentLostError, match="within"):
        client.fetch(segment_id(0, 1), writable=False)
    assert 0.25 < time.monotonic() - begun < 2.0


def test_a_closed_session_is_told_at_once(ends):
    """The end of the supervisor ends every wait."""
    client, other = ends
    timer = threading.Timer(0.05, other.close)
    timer.start()
    with pytest.raises(ChannelClosedError):
        client.fetch(segment_id(0, 1), writable=False)
    timer.join()
    with pytest.raises(ChannelClosedError):
        client.notices()
    with pytest.raises(ChannelClosedError):
        client.send(Release(segment_id(0, 1)))


def test_notices_come_in_between(ends):
    """What comes unasked during a fetch is kept; what it said about this segment before is invalid."""
    client, other = ends
    mine, another = segment_id(1, 1), segment_id(1, 2)
    source = FileDescriptorStrategy().create(4096)
    for segment in (mine, another):
        other.send(Kind.IDLE, Idle(segment).pack())
    other.send(Kind.FETCHED, Fetched(mine, 4096, True).pack(), fds=[source.fd], sequence=1)
    os.close(client.fetch(mine, writable=True))
    other.send(Kind.DROP, Drop(mine).pack())
    assert client.notices() == (Idle(another), Drop(mine))
    assert client.notices() == ()
    source.close()


@pytest.mark.time_limit(10)
def test_a_signal_handler_may_send_while_something_is_sent():
    """Nobody waits for himself: a handler, or a ``__del__``, that lets go of an array comes anywhere."""
    (sock, theirs), handled = Channel.pair(), []

    class Interrupted:
        def send(self, data):
            if not handled:
                handled.append(True)
                client.send(Freed(segment_id(1, 2)))
            return sock.send(data)

        def __getattr__(self, name):
            return getattr(sock, name)

    client, other = SegmentClient(Channel(Interrupted()), 1, patience=0.3), Channel(theirs)
    client.send(Release(segment_id(0, 1)))
    assert [other.receive(1.0).kind for _ in range(2)] == [Kind.FREED, Kind.RELEASE]
    sock.close()
    other.close()


def test_a_signal_handler_may_listen_while_we_look_whether_something_came(monkeypatch):
    """A poll object refuses to be used twice at a time, also by the thread that uses it."""
    looks, heard = select.poll(), []

    class Interrupted:
        register = looks.register

        def poll(self, milliseconds):
            if heard:
                raise RuntimeError("concurrent poll() invocation")
            heard.append(None)
            heard[0] = client.notices()
            return looks.poll(milliseconds)

    ours, theirs = map(Channel, Channel.pair())
    with monkeypatch.context() as patch:
        patch.setattr(channel, "select", SimpleNamespace(poll=Interrupted, POLLIN=select.POLLIN))
        client = SegmentClient(ours, 1)
    theirs.send(Kind.IDLE, Idle(segment_id(1, 1)).pack())
    assert client.notices() == ()
    assert heard == [(Idle(segment_id(1, 1)),)]
    client.close()
    theirs.close()


def test_a_signal_handler_may_listen_while_an_answer_is_awaited(ends, monkeypatch):
    """It may read the answer: that is kept for who waits for it, and is a stray one if nobody does."""
    client, other = ends
    mine, source = segment_id(0, 1), FileDescriptorStrategy().create(4096)
    receive = Channel.receive

    def interrupted(channel, timeout):
        assert client.notices() == ()
        return receive(channel, timeout)

    def ended(channel, timeout):
        interrupted(channel, timeout)
        raise KeyboardInterrupt

    answer = Fetched(mine, 4096, True).pack()
    monkeypatch.setattr(Channel, "receive", interrupted)
    other.send(Kind.FETCHED, answer, fds=[source.fd], sequence=1)
    os.close(client.fetch(mine, writable=True))
    monkeypatch.setattr(Channel, "receive", ended)
    other.send(Kind.FETCHED, answer, fds=[source.fd], sequence=2)
    with pytest.raises(KeyboardInterrupt):
        client.fetch(mine, writable=True)
    assert client.notices() == (Fetched(mine, 4096, True),)
    source.close()
