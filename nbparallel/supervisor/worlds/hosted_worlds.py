"""Worlds of guests: processes that are clients of this supervisor already, and become ranks of one world.

::

    guest ──segments──  MEET(place) with one end of a socketpair; LEAVE_WORLD
          ──socketpair──  JOIN ABORT_JOIN -> <- JOINED REFUSED, as with `external.world`

Nothing is started and nothing has a name: those that name the same place meet.  They stay the clients that
they are, so that arrays and messages of theirs go on as before.  The supervisor writes the death records.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.event_loop import Outbox, SupervisorEventLoop, take
from nbparallel.supervisor.exit_status import exit_status
from nbparallel.supervisor.ledger.segment_server import Reply, SegmentServer
from nbparallel.supervisor.worlds.membership import Membership
from nbparallel.wire import control
from nbparallel.wire.control import ControlView
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.identity import Process, peer_of, process_of
from nbparallel.wire.rendezvous import Join, Joined, Reason, Refused
from nbparallel.wire.system import usable_cpus


@dataclass(slots=True, eq=False)
class HostedMember:
    """A guest that has said ``MEET``."""

    client: int
    place: bytes
    socket: socket.socket
    outbox: Outbox
    rank: int = -1
    """-1: it has not sent JOIN."""
    process: Process = field(default_factory=lambda: Process(0, 0))
    world: HostedWorld | None = None


@dataclass(slots=True, eq=False)
class HostedWorld:
    """One world, before and after it is formed."""

    membership: Membership = field(default_factory=Membership)
    members: list[HostedMember] = field(default_factory=list)
    """Those that have joined, and have neither left nor ended."""
    view: ControlView | None = None
    """None: it is not formed yet."""
    parcels: list[int] = field(default_factory=list)
    """Hold what ranks that left had sent, until the world ends."""


class HostedWorlds:
    """The worlds of one supervisor's guests.

    Parameters
    ----------
    deliver : callable
        Called with the ledger's replies.
    log : callable
        Called with a line about a process that broke the protocol.
    """

    def __init__(
        self,
        event_loop: SupervisorEventLoop,
        server: SegmentServer,
        deliver: Callable[[list[Reply]], None],
        log: Callable[[str], None],
    ) -> None:
        self._event_loop, self._server, self._deliver, self._log = event_loop, server, deliver, log
        self._forming: dict[bytes, HostedWorld] = {}
        self._waiting: list[HostedMember] = []
        """Those whose world is not formed."""
        self._ranks: dict[int, HostedMember] = {}
        """Client -> member of a formed world."""

    # before a world is formed -----------------------------------------------------------------------

    def meet(self, client: int, frame: Frame) -> None:
        """Take in a guest that wants to meet others.

        Raises
        ------
        ProtocolError
            The frame is damaged.
        """
        if len(frame.fds) != 1 or not frame.payload or client in self._ranks:
            raise ProtocolError(f"a MEET frame of client {client} that no process of nbparallel sends")
        try:
            sock = socket.socket(fileno=frame.fds[0])
        except OSError as error:
            raise ProtocolError(f"a MEET frame without a socket: {error}") from error
        frame.fds.clear()
        outbox = self._event_loop.add_socket(sock, lambda: self._on_frame(member))
        member = HostedMember(client, frame.payload, sock, outbox)
        self._waiting.append(member)

    def _on_frame(self, member: HostedMember) -> None:
        if member.socket.fileno() < 0:
            return
        try:
            frame = take(member.socket)
            if frame is False:
                return
            if frame is None:
                self._on_end(member)
                return
            assert isinstance(frame, Frame)
            try:
                self._handle(member, frame)
            finally:
                frame.close()
        except (ProtocolError, ValueError, KeyError, TypeError) as error:
            self._log(f"client {member.client} broke the protocol: {error}")
            self._on_end(member)

    def _handle(self, member: HostedMember, frame: Frame) -> None:
        if member not in self._waiting:
            return  # it is refused, or gives up a world that has just been formed
        world = member.world
        if frame.kind is Kind.JOIN and world is None:
            join = Join.unpack(frame.payload)
            self._check_alone(member)
            member.rank, member.process = join.rank, process_of(peer_of(member.socket)[0])
            world = member.world = self._forming.setdefault(member.place, HostedWorld())
            world.members.append(member)
            problem = world.membership.enter(join, member.process)
            if problem:
                self._refuse(world, Reason.WRONG, problem)
            elif world.membership.complete:
                self._form(world)
        elif frame.kind is Kind.ABORT_JOIN and world is not None:
            text = f"rank {member.rank} has waited {float(frame.payload):g} s for {world.membership.missing}"
            self._refuse(
                world,
                Reason.LATE,
                f"{text}, which did not join. The ranks of this world are processes that one notebook or "
                "script has started with nbparallel.multiprocessing, without that itself",
            )
        else:
            raise ProtocolError(f"unexpected {frame.kind.name} frame before the world is complete")

    def _check_alone(self, member: HostedMember) -> None:
        """Refuse a process that is in a world already, or joins another one."""
        others = [other for other in self._waiting if other.client == member.client and other.world]
        for other in others:
            self._on_frame(other)  # its end may not have been read
        if member.client in self._ranks or any(other in self._waiting for other in others):
            raise ProtocolError("a JOIN frame of a process that has joined another world")

    def _form(self, world: HostedWorld) -> None:
        membership = world.membership
        try:
            fd = control.create(membership.world_size, 1, label="world")
        except OSError as error:
            text = f"there is no memory for a world of {membership.world_size}: {error}"
            self._refuse(world, Reason.WRONG, text)
            return
        mine = -1
        try:
            mine = os.pidfd_open(os.getpid())
            world.view = ControlView(fd)
            self._end_forming(world)
            payload = Joined(usable_cpus(membership.cpus), membership.members).pack()
            for member in world.members:
                self._ranks[member.client] = member
                member.outbox.send(Kind.JOINED, payload, [fd, mine])
        finally:
            os.close(fd)
            if mine >= 0:
                os.close(mine)

    def _refuse(self, world: HostedWorld, reason: Reason, text: str) -> None:
        """Notify all that have joined why no world is formed."""
        self._end_forming(world)
        for member in world.members:
            member.outbox.send(Kind.REFUSED, Refused(reason, text).pack())

    def _end_forming(self, world: HostedWorld) -> None:
        self._forming = {place: other for place, other in self._forming.items() if other is not world}
        self._waiting = [member for member in self._waiting if member.world is not world]

    def _on_end(self, member: HostedMember) -> None:
        """Act on the end of a member's socket: of a rank it says nothing, which still is a client."""
        self._event_loop.forget(member.socket)
        if member not in self._waiting:
            return
        self._waiting.remove(member)
        if (world := member.world) is not None:
            world.members.remove(member)
            whose = f"rank {member.rank} (process {member.process.pid})"
            missing = world.membership.missing
            self._refuse(world, Reason.WRONG, f"{whose} left or ended before {missing} had joined")

    # afterwards -------------------------------------------------------------------------------------

    def has_rank(self, client: int) -> bool:
        """Return whether a guest is in a world that was formed."""
        return client in self._ranks

    def leave(self, client: int) -> None:
        """Act on LEAVE_WORLD: what the rank has sent may not be received yet, so all it has is held.

        Raises
        ------
        ProtocolError
            The client is in no world.
        """
        member = self._ranks.get(client)
        if member is None or member.world is None:
            raise ProtocolError(f"a LEAVE_WORLD frame of client {client}, which is in no world")
        member.world.parcels.append(self._server.hold_all_of(client))
        self._remove(member, member.world)

    def client_ended(self, client: int, pidfd: int) -> None:
        """Record the death of a guest, if it is a rank; what it sent before has been read."""
        member = self._ranks.get(client)
        if member is None or member.world is None or member.world.view is None:
            return
        code, number = exit_status(pidfd, member.process)
        member.world.view.write_death(member.rank, exit_code=code, signal=number)
        self._remove(member, member.world)

    def _remove(self, member: HostedMember, world: HostedWorld) -> None:
        del self._ranks[member.client]
        world.members.remove(member)
        self._event_loop.forget(member.socket)
        if not world.members and world.view is not None:
            world.view.close()
            self._deliver(self._server.end_parcels(world.parcels))

    def end_all(self) -> None:
        """Close what belongs to them: the supervisor exits."""
        for member in (*self._waiting, *self._ranks.values()):
            self._event_loop.forget(member.socket)
        self._waiting.clear()
        self._ranks.clear()
