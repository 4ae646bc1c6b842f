"""Whatever guests say when they want to meet, only those lose that said it; the supervisor goes on."""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from nbparallel.supervisor.clients import Client, Clients
from nbparallel.supervisor.introduced import IntroducedClients
from nbparallel.wire.frames import HEADER, Frame, Kind, encode
from nbparallel.wire.parcels import Introduction
from nbparallel.wire.rendezvous import AbortJoin, Join
from nbparallel.wire.segments import Announce
from tests.supervisor.test_damaged_frames import memory, mutated

MEMBER = 0


LATE = [*(AbortJoin(seconds).pack() for seconds in (1.5, math.nan, math.inf, -1.0)), b"x", b"\xff"]
"""Payloads of ABORT_JOIN, some of them damaged."""


@dataclass
class Peer:
    """What a process that is a guest has."""

    connection: socket.socket
    speaks: bool
    """Whether it has said which process it is."""
    meetings: list[socket.socket] = field(default_factory=list)

    def close(self) -> None:
        """Close all."""
        for end in (self.connection, *self.meetings):
            end.close()


def send(end: socket.socket, kind: Kind, payload: bytes, fds: list[int]) -> None:
    """Send a frame if the other end takes it; close the descriptors."""
    try:
        socket.send_fds(end, [encode(kind, payload)], fds)
    except (BrokenPipeError, ConnectionResetError, BlockingIOError):
        pass
    finally:
        for fd in fds:
            os.close(fd)


def drain(end: socket.socket) -> bool:
    """Read what came; return whether the other end is open."""
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(end, HEADER.size + 70_000, 8)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        for fd in fds:
            os.close(fd)
        if not data:
            return False


class Meetings:
    """A supervisor's part for guests, and guests that say anything; all in this process.

    `victim` is the process of them all, which is killed at the end.
    """

    def __init__(self, seed: int, victim: int) -> None:
        self.random, self.victim = random.Random(seed), victim
        self.clients, self.logged = Clients(self.log), 0
        self.loop = self.clients.event_loop
        self.kernel, member = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.guests = IntroducedClients(self.clients)
        self.member = Client(self.clients, member, self.guests)
        self.clients.admit(self.member, MEMBER)
        self.peers: list[Peer] = []

    def log(self, _: str) -> None:
        """Count a connection that was given up."""
        self.logged += 1

    def come(self) -> None:
        """Have a process introduce itself."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        payload = Introduction(self.random.random() < 0.5, self.random.random() < 0.5).pack()
        self.guests.received(self.member, Frame(Kind.INTRODUCE, 0, 0, payload, [theirs.detach()]))
        speaks = self.random.random() < 0.9
        if speaks:
            send(ours, Kind.ANNOUNCE, Announce(self.victim).pack(), [os.pidfd_open(self.victim)])
        self.peers.append(Peer(ours, speaks))

    def meet(self, peer: Peer) -> None:
        """Send a MEET frame, with what belongs there or with anything."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        fds = [theirs.detach()]
        pick = self.random.random()
        if pick < 0.05:
            fds.append(memory(4096))
        elif pick < 0.1:
            fds.insert(0, memory(4096))
        elif pick < 0.15:
            os.close(fds.pop())
        place = self.random.choice([b"a"] * 5 + [b"b", b"", b"\0" * 3000])
        send(peer.connection, Kind.MEET, self.damage(place), fds)
        peer.meetings.append(ours)

    def join(self, peer: Peer) -> None:
        """Go on in a socket of a meeting."""
        size = self.random.choice([2] * 9 + [0, 1, 3])
        join = Join(self.random.randrange(max(size, 1)), size, self.random.choice("xxxxxxxxy"), (0, 1)).pack()
        kind, payload = self.random.choice(
            [(Kind.JOIN, join)] * 8
            + [(Kind.ABORT_JOIN, self.random.choice(LATE))]
            + [(self.random.choice(list(Kind)), join)]
        )
        fds = [memory(4096)] if self.random.random() < 0.1 else []
        if peer.meetings:
            send(self.random.choice(peer.meetings), kind, self.damage(payload), fds)
        else:
            send(peer.connection, kind, self.damage(payload), fds)

    def leave(self, peer: Peer) -> None:
        """Leave a world, or say so."""
        send(peer.connection, Kind.LEAVE_WORLD, self.damage(b""), [])

    def go(self, peer: Peer) -> None:
        """Close an end of a meeting, or all."""
        if peer.meetings and self.random.random() < 0.7:
            peer.meetings.pop(self.random.randrange(len(peer.meetings))).close()
        else:
            self.forget(peer)

    def forget(self, peer: Peer) -> None:
        """Close what a peer has."""
        self.peers.remove(peer)
        peer.close()

    def damage(self, payload: bytes) -> bytes:
        """Return a payload, as a rule as it is."""
        return mutated(self.random, payload) if self.random.random() < 0.1 else payload

    def turn(self) -> None:
        """One process does something, and the supervisor acts on it."""
        if len(self.peers) < 4:
            self.come()
        peer = self.random.choice(self.peers)
        actions: list[Callable[[Peer], None]] = [self.meet, self.join, self.join, self.leave, self.go]
        self.random.choices(actions, [4, 2, 2, 1, 1])[0](peer)
        for _ in range(2):
            self.loop.wait(block=False)
        for peer in list(self.peers):
            for end in list(peer.meetings):
                if not drain(end):
                    peer.meetings.remove(end)
                    end.close()
            if not drain(peer.connection):
                self.forget(peer)

    def end(self) -> None:
        """Have the guests' process end, and close everything."""
        os.kill(self.victim, signal.SIGKILL)
        os.waitid(os.P_PID, self.victim, os.WEXITED | os.WNOWAIT)
        for peer in self.peers:
            if not peer.speaks:
                peer.close()  # as the system does
        for _ in range(3):
            self.loop.wait(block=False)
        assert not self.guests.present
        for peer in self.peers:
            peer.close()
        for _ in range(3):
            self.loop.wait(block=False)
        self.guests.end_all()
        self.clients.forget(self.member)
        self.clients.server.close()
        self.kernel.close()


def check(seed: int, turns: int) -> None:
    """Run `turns` turns of one seed."""
    before = len(os.listdir("/proc/self/fd"))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        meetings = Meetings(seed, victim.pid)
        try:
            for _ in range(turns):
                meetings.turn()
        finally:
            meetings.end()
    assert meetings.logged, "damage was noticed"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_guests_that_say_anything() -> None:
    """No frame brings the supervisor down or costs it a descriptor."""
    for seed in range(6):
        check(seed, 400)


@pytest.mark.stress
@pytest.mark.once
@pytest.mark.time_limit(1800)
def test_guests_that_say_anything_for_long() -> None:
    """Nor do two hundred thousand: a thousand turns of each seed."""
    for seed in range(200):
        check(seed, 1_000)
