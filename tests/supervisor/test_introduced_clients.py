"""Guests of which the supervisor does not know yet which process they are."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.clients import Client, Clients
from nbparallel.supervisor.introduced import IntroducedClients, IntroducedProcess
from nbparallel.wire.frames import Frame, Kind, encode
from nbparallel.wire.parcels import Introduction
from nbparallel.wire.segments import FIRST_INTRODUCED, Announce

ROOT = 0


class Introducing:
    """A supervisor's part for guests, in this process, and a process that may become one."""

    def __init__(self) -> None:
        self.logged: list[str] = []
        self.clients = Clients(self.logged.append)
        self.kernel, root = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.guests = IntroducedClients(self.clients)
        self.clients.admit(Client(self.clients, root, self.guests), ROOT)
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    def introduce(self, parent: int = ROOT, *, daemon: bool) -> socket.socket:
        """Introduce a process; return its end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        payload = Introduction(daemon, True).pack()
        frame = Frame(Kind.INTRODUCE, 0, 0, payload, [theirs.detach()])
        try:
            self.guests.received(self.clients.by_number[parent], frame)
        except ProtocolError:
            ours.close()
            raise
        finally:
            frame.close()
        return ours

    def announce(self, end: socket.socket) -> None:
        """Say at that end that it is our process."""
        pidfd = os.pidfd_open(self.process.pid)
        socket.send_fds(end, [encode(Kind.ANNOUNCE, Announce(self.process.pid).pack())], [pidfd])
        os.close(pidfd)

    def turn(self) -> None:
        """Act on what came."""
        self.clients.event_loop.wait(block=False)

    def killed(self) -> bool:
        """Wait for the end of the process, if it was killed."""
        try:
            return self.process.wait(0.3) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False


@pytest.fixture
def introducing() -> Iterator[Introducing]:
    """Yield one, and look at the end whether it has closed all."""
    before = len(os.listdir("/proc/self/fd"))
    case = Introducing()
    yield case
    case.process.kill()
    case.process.communicate()
    for _ in range(3):
        case.turn()
    case.guests.end_all()
    case.clients.forget(case.clients.by_number[ROOT])
    case.clients.server.close()
    case.kernel.close()
    assert not case.guests.present
    del case.clients, case.guests
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("daemon", [True, False])
def test_its_parent_ends_before_it_is_known(introducing: Introducing, daemon: bool) -> None:
    """A daemonic one is killed as soon as it says who it is, another one is not."""
    first = introducing.introduce(daemon=False)
    second = introducing.introduce(FIRST_INTRODUCED, daemon=daemon)
    first.close()
    introducing.turn()  # the first one ends without a word
    introducing.announce(second)
    introducing.turn()
    assert introducing.killed() == daemon
    second.close()


def test_the_root_ends_before_it_is_known(introducing: Introducing) -> None:
    """It is killed as soon as it says who it is."""
    end = introducing.introduce(daemon=False)
    introducing.guests.end_with(ROOT)
    introducing.announce(end)
    introducing.turn()
    assert introducing.killed()
    end.close()


def test_its_word_lies_unread_when_all_ends(
    introducing: Introducing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor reads it before it exits; a word that it would not read fails: its sender knows."""
    spoken, silent = introducing.introduce(daemon=False), introducing.introduce(daemon=False)
    introducing.announce(spoken)
    drain, refused = Clients.drain, []

    def drain_then_speak(clients: Clients, guest: IntroducedProcess) -> bool:
        drained = drain(clients, guest)
        if guest.number != FIRST_INTRODUCED:
            with pytest.raises(BrokenPipeError):
                silent.send(encode(Kind.ANNOUNCE, Announce(1).pack()))
            refused.append(guest.number)
        return drained

    monkeypatch.setattr(Clients, "drain", drain_then_speak)
    introducing.guests.end_all()
    assert introducing.killed()
    assert refused == [FIRST_INTRODUCED + 1]
    spoken.close()
    silent.close()


def test_the_end_of_its_connection(introducing: Introducing) -> None:
    """There is no process, or it has ended: no guest is left."""
    introducing.introduce(daemon=False).close()
    introducing.turn()
    assert not introducing.guests.present


def test_it_says_who_it_is_twice(introducing: Introducing) -> None:
    """It is disconnected; a client that is no guest is refused."""
    end = introducing.introduce(daemon=True)
    root = introducing.clients.by_number[ROOT]
    with pytest.raises(ProtocolError, match="not introduced"):
        introducing.guests.received(root, Frame(Kind.ANNOUNCE, 0, 0, Announce(1).pack(), []))
    introducing.announce(end)
    introducing.announce(end)
    introducing.turn()
    introducing.turn()
    assert "second ANNOUNCE" in introducing.logged[0]
    assert not introducing.killed(), "its program may be any"
    end.close()
