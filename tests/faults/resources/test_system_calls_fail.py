"""System calls that fail where nobody expects it: short of memory is not gone, and gone is gone for both."""

from __future__ import annotations

import errno
import os
import select
import socket
import time

import pytest

from nbparallel.channel import Channel, channel as channels
from nbparallel.errors import ChannelClosedError, ParallelError, RankDiedError
from nbparallel.session import Session
from nbparallel.supervisor.clients import Outbox, take
from nbparallel.testing.waiting import wait_until
from nbparallel.wire.frames import Kind
from nbparallel.wire.system import ready
from tests.harness.ranks import rank_pool
from tests.harness.stores import broker_socket


class Failing:
    """A socket whose first calls fail."""

    def __init__(self, sock: socket.socket, number: int, times: int) -> None:
        self._socket, self._number, self._left = sock, number, times

    def __getattr__(self, name: str) -> object:
        method = getattr(self._socket, name)
        return self._fail_first(method) if name in ("send", "sendmsg", "recvmsg") else method

    def _fail_first(self, method):
        def call(*args):
            if self._left:
                self._left -= 1
                raise OSError(self._number, os.strerror(self._number))
            return method(*args)

        return call


@pytest.fixture
def pair():
    """Return both ends of a socketpair; whatever is wrapped around them, they are closed here."""
    ends = Channel.pair()
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOBUFS])
def test_want_of_memory_passes(pair, number):
    """A message that the system has no memory for goes out, and comes in, a little later."""
    sender, receiver = (Channel(Failing(end, number, 3)) for end in pair)
    sender.send(Kind.IDLE, b"x", fds=[0])
    frame = receiver.receive(5.0)
    assert frame is not None
    assert (frame.payload, len(frame.fds)) == (b"x", 1)
    frame.close()


def test_want_of_memory_that_does_not_pass(pair, monkeypatch):
    """After a while it is given up, with the reason; and the other side hears of it."""
    monkeypatch.setattr(channels, "SHORTAGE_SECONDS", 0.05)
    sender, receiver = Channel(Failing(pair[0], errno.ENOMEM, 1 << 30)), Channel(pair[1])
    with pytest.raises(ChannelClosedError, match="Cannot allocate memory"):
        sender.send(Kind.IDLE)
    with pytest.raises(ChannelClosedError):
        receiver.receive(5.0)


@pytest.mark.parametrize("name", ["send", "receive_nowait"])
def test_what_is_over_is_over_for_both(pair, name):
    """After an error that is no want of memory the other side does not wait for what never comes."""
    one, other = Channel(Failing(pair[0], errno.EPERM, 1)), Channel(pair[1])
    with pytest.raises(ChannelClosedError, match="not permitted"):
        one.send(Kind.IDLE) if name == "send" else one.receive_nowait()
    with pytest.raises(ChannelClosedError):
        other.receive(5.0)


def test_the_supervisor_tries_again(pair):
    """Its sockets pass over a want of memory as well: nothing is there yet, or has to wait."""
    box = Outbox(Failing(pair[0], errno.ENOMEM, 1))
    box.send(Kind.IDLE, b"x")
    assert box.waiting
    assert not box.broken
    box.flush()
    assert not box.waiting
    sock = Failing(pair[1], errno.ENOBUFS, 1)
    assert take(sock) is False
    assert take(sock).payload == b"x"
    broken = Outbox(Failing(pair[1], errno.EPERM, 1))
    broken.send(Kind.IDLE)
    assert broken.broken
    assert take(pair[0]) is None, "the peer is told"


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("waiting", [False, True])
def test_f66_a_rank_that_closes_everything(waiting: bool) -> None:
    """`os.closerange` in a cell costs the rank its sockets: it is ended and named, the other goes on."""
    with Session(2) as session:
        session.run("import os\nx = rank")
        before = session.statistics().ranks[1].pid
        began = time.monotonic()
        last = "recv(src=1)" if waiting else "pass"
        with pytest.raises(ParallelError) as caught:
            session.run(f"if rank == 1: os.closerange({0 if waiting else 3}, 1 << 16)\nelse: {last}")
        assert time.monotonic() - began < 10
        assert isinstance(caught.value.errors[1], RankDiedError)
        assert "code there closed file descriptors that are not its own" in str(caught.value.errors[1])
        assert session.run("globals().get('x')").values == [0, None]
        assert session.run("all_reduce(rank)").values == [1, 1]
        assert session.statistics().ranks[1].pid != before


@pytest.mark.slow
@pytest.mark.matrix(cover=())
@pytest.mark.parametrize("socket_of", ["rank", "notebook"])
def test_a_lost_segment_socket_ends_who_lost_it(socket_of: str) -> None:
    """Who can neither share nor say what it uses is replaced: memory would be nobody's."""
    cell = (
        "from tests.harness.stores import broker_socket, store_brokers\nbroker, = store_brokers()\n"
        "broker_socket(broker).shutdown(2)"
    )
    with Session(2) as session:
        session.run("pass")
        pids = [rank.pid for rank in session.statistics().ranks]
        if socket_of == "rank":
            with pytest.raises(ParallelError, match="rank 0"):
                session.run(
                    f"if rank == 0:\n  {cell.replace(chr(10), chr(10) + '  ')}\n  import time; time.sleep(60)"
                )
            assert session.run("all_reduce(rank)").values == [1, 1]
            assert session.statistics().ranks[1].pid == pids[1]
        else:
            with broker_socket(rank_pool(session).supervisor.broker) as sock:
                sock.shutdown(socket.SHUT_RDWR)
            wait_until(lambda: rank_pool(session).ended())
            assert session.run("all_reduce(rank)").values == [1, 1]


def test_polling_passes_over_a_want_of_memory(pair):
    """Who waits for something goes on waiting when the system has no memory for the question."""

    class Short:
        """A poll object that fails at first."""

        left = 2

        def __init__(self) -> None:
            self._poll = select.poll()
            self._poll.register(pair[1], select.POLLIN)

        def poll(self, milliseconds=None):
            if self.left:
                Short.left -= 1
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return self._poll.poll(milliseconds)

    pair[0].send(b"x")
    assert ready(Short(), 5000) == [(pair[1].fileno(), select.POLLIN)]
    with pytest.raises(OSError, match="Bad"):
        ready(type("Bad", (), {"poll": lambda self, ms: os.close(-1)})())
