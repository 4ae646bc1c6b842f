"""The client's end of the segment protocol, over a real socket."""

import os
import select
import threading
import time
from types import SimpleNamespace

import pytest

from nbparallel.channel import Channel, SegmentClient, segment_client
from nbparallel.errors import ChannelClosedError, ProtocolError, SegmentLostError
from nbparallel.sharing import Store
from nbparallel.sharing.strategies.file_descriptor import FileDescriptorStrategy
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.frames import Kind
from nbparallel.wire.segments import (
    Drop,
    Ended,
    Fetched,
    Freed,
    Hold,
    Idle,
    Release,
    Unmap,
    segment_id,
)
from tests.harness.stores import store_brokers


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
        patch.setattr(segment_client, "select", SimpleNamespace(poll=Interrupted, POLLIN=select.POLLIN))
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


def test_what_is_said_about_memory_that_stays_mapped(ends):
    """Both ways; what a fetch makes invalid is what was said about holds, not about memory."""
    client, other = ends
    first, second = segment_id(0, 1), segment_id(0, 2)
    client.send(Release(first, first))
    client.send(Hold(second, first, False))
    client.send(Freed(segment_id(1, 1)))
    frames = [other.receive(1.0) for _ in range(3)]
    assert [frame.kind for frame in frames] == [Kind.RELEASE, Kind.HOLD, Kind.FREED]
    assert Release.unpack(frames[0].payload) == Release(first, first)
    assert Hold.unpack(frames[1].payload) == Hold(second, first, False)
    source = FileDescriptorStrategy().create(4096)
    other.send(Kind.ENDED, Ended(second, first).pack())
    other.send(Kind.UNMAP, Unmap(second).pack())
    other.send(Kind.FETCHED, Fetched(second, 4096, False).pack(), fds=[source.fd], sequence=1)
    os.close(client.fetch(second, writable=False))
    assert client.notices() == (Ended(second, first), Unmap(second))
    source.close()


def test_an_answer_that_nobody_waits_for(ends):
    """A late answer is reported as a hold that nobody wanted, and its descriptor is closed."""
    client, other = ends
    segment = segment_id(0, 1)
    with pytest.raises(SegmentLostError):
        client.fetch(segment, writable=False)
    source = FileDescriptorStrategy().create(4096)
    before = len(os.listdir("/proc/self/fd"))
    other.send(Kind.FETCHED, Fetched(segment, 4096, False).pack(), fds=[source.fd], sequence=1)
    assert client.notices() == (Fetched(segment, 4096, False),)
    assert len(os.listdir("/proc/self/fd")) == before
    source.close()


def test_a_stray_hold_is_given_back(ends):
    """The store releases a hold that came after it had given up."""
    client, other = ends
    store = Store(1)
    store.connect(client)
    segment = segment_id(0, 1)
    source = FileDescriptorStrategy().create(4096)
    other.send(Kind.FETCHED, Fetched(segment, 4096, False).pack(), fds=[source.fd], sequence=99)
    store.drain()
    frame = other.receive(1.0)
    assert (frame.kind, frame.payload) == (Kind.RELEASE, Release(segment).pack())
    source.close()
    store.close()


def test_damage_from_the_supervisor(ends):
    """A frame that does not belong here is a `ProtocolError`, and no descriptor stays open."""
    client, other = ends
    other.send(Kind.TASK, b"")
    with pytest.raises(ProtocolError, match="TASK"):
        client.notices()
    other.send(Kind.FETCHED, Fetched(segment_id(0, 2), 4096, False).pack(), sequence=1)
    with pytest.raises(ProtocolError, match="damaged"):
        client.fetch(segment_id(0, 1), writable=False)


def test_a_session_that_ended_does_not_disturb_new_arrays(connected, supervisor):
    """When the supervisor is gone, the store leaves the session by itself and goes on."""
    store = connected(0)
    array = store.zeros(10)
    store.handle(array)
    del array
    supervisor.close()
    fresh = store.zeros(10)
    assert store.is_shared(fresh)
    assert store_brokers(store) == ()
    assert store.handle(fresh) is not None


def test_fetches_from_many_threads(connected):
    """Threads of one process may fetch at the same time; each gets its own segment."""
    maker, taker = connected(0), connected(1)
    arrays = [maker.zeros(10) for _ in range(40)]
    for number, array in enumerate(arrays):
        array[:] = number
    handles = [maker.handle(array) for array in arrays]
    wrong = []

    def take(start):
        for number in range(start, 40, 4):
            if not (taker.attach(handles[number]) == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=take, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert wrong == []


def test_a_question_may_overtake_the_registration(connected, supervisor):
    """A handle that travels faster than its registration is still found."""
    maker, taker = connected(0), connected(1)
    for _ in range(50):
        array = maker.zeros(10)
        with supervisor.lock:  # the supervisor reads both sockets only after both have spoken
            handle = maker.handle(array)
            asked = threading.Thread(target=lambda handle=handle: taker.attach(handle))
            asked.start()
        asked.join(10)
    assert supervisor.offences == []


def test_a_killed_process_holds_nothing(connected, peer, supervisor):
    """After kill -9 of a rank its holds are gone, and what only it had made is closed."""
    store = connected(0)
    array = store.zeros(10)
    handle = peer.run(
        "a = store.attach(handle); b = store.zeros(5); result = store.handle(b)", handle=store.handle(array)
    )
    both = store.attach(handle)
    only = peer.run("c = store.zeros(5); result = store.handle(c)")
    peer.kill()
    wait_until(lambda: only.segment not in supervisor.server.ledger.entries)
    assert set(supervisor.server.ledger.entries) == {store.handle(array).segment, handle.segment}
    assert both.sum() == 0
    with pytest.raises(SegmentLostError):
        store.attach(only)
