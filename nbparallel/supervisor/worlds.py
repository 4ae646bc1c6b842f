"""Worlds: how processes become ranks of one, and the worlds of introduced clients.

::

    client ─segments──  MEET(place) with one end of a socketpair; LEAVE_WORLD
          ──socketpair──  JOIN ABORT_JOIN -> <- JOINED REFUSED, as with `external_world`

Nothing is started and nothing has a name: those that name the same place meet.  They stay the clients that
they are, so that arrays and messages of theirs go on as before.  The supervisor writes the death records.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial

from nbparallel.errors import ProtocolError, rank_list
from nbparallel.supervisor.clients import Client, Clients, is_ready
from nbparallel.wire import control
from nbparallel.wire.control import ControlView
from nbparallel.wire.control_layout import MAX_WORLD_SIZE
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.identity import (
    AbortJoin,
    Join,
    Joined,
    Process,
    Refused,
    peer_of,
    process_of,
    process_state,
)
from nbparallel.wire.inspection import IntroducedRow
from nbparallel.wire.segments import FIRST_INTRODUCED, MAX_CLIENT, Announce, Introduction, Welcome
from nbparallel.wire.system import usable_cpus

# Exit statuses of processes that are not children of this one, as far as the system reports them.
#
# Some facts (proc_pid_stat(5), pidfs):
#
# * only the parent can wait for a process; for others its pidfd only shows *that* it has ended;
# * until its parent has waited, the last field but one of ``/proc/PID/stat`` is the status that it will get;
# * from then on a pidfd answers ``PIDFD_GET_INFO`` with it (Linux 6.15).

_INFO = struct.Struct("=QQ11Ii")
"""mask, cgroup, eleven numbers of process and users, exit status: what `PIDFD_GET_INFO` fills."""
_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
_HAS_STATUS = 1 << 3
_TRIES = 3
"""The parent may wait for it between our two questions."""


def exit_code_of(pidfd: int, process: Process) -> int | None:
    """Return the exit code of a process that has ended (negative: of a signal); None: it cannot be known."""
    for _ in range(_TRIES):
        state = process_state(process.pid)
        if state is not None and state.letter == "Z" and state.started == process.started:
            return os.waitstatus_to_exitcode(state.status)
        if (status := _of_pidfd(pidfd)) is not None:
            return os.waitstatus_to_exitcode(status)
    return None


def _of_pidfd(pidfd: int) -> int | None:
    question = bytearray(64)
    struct.pack_into("=Q", question, 0, _HAS_STATUS)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, question)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EINVAL, errno.ESRCH, errno.EPERM):
            return None  # an older system, or its parent has not waited yet
        raise
    mask, *_, status = _INFO.unpack_from(question)
    return status if mask & _HAS_STATUS else None


class WorldMember(Client):
    """A connection over which a process joins a world.

    Attributes
    ----------
    rank : int
        -1: it has not sent JOIN.
    client : int
        Client number of the process, if it has said ``MEET``.
    place : bytes
        What that named.
    """

    rank = -1
    process = Process(0, 0)
    client = -1
    place = b""
    world: World | None = None


class World:
    """One world, before and after it is formed.

    Attributes
    ----------
    members : list of WorldMember
        Those that have joined, and have neither left nor ended.
    world_size : int
        How many there will be, by the first JOIN; 0 before it.
    view : ControlView or None
        None: it is not formed yet.
    parcels : list of int
        Hold what ranks that left had sent, until the world ends.
    """

    def __init__(self) -> None:
        self.members: list[WorldMember] = []
        self.world_size = 0
        self._entries: dict[int, tuple[Join, Process]] = {}
        """Those that have joined, by rank."""
        self.view: ControlView | None = None
        self.parcels: list[int] = []

    def act_on(self, member: WorldMember, frame: Frame, begin: Callable[[], None]) -> Refused | None:
        """Act on a frame of a process that joins; return why no world can be formed.

        With the last one the world is formed: `begin` is called, and all are notified.
        """
        if frame.kind is Kind.JOIN and member.world is None:
            join = Join.unpack(frame.payload)
            member.rank, member.process = join.rank, process_of(peer_of(member.socket)[0])
            member.world = self
            self.members.append(member)
            problem = self.enter(join, member.process) or (self._form(begin) if self.complete else "")
            return Refused(False, problem) if problem else None
        if frame.kind is Kind.ABORT_JOIN and member.world is not None:
            seconds = AbortJoin.unpack(frame.payload).seconds
            text = f"rank {member.rank} has waited {seconds:g} s for {self.missing}, which did not join"
            return Refused(True, text)
        raise ProtocolError(f"unexpected {frame.kind.name} frame before the world is complete")

    def enter(self, join: Join, process: Process) -> str:
        """Record a process; return why no world can be formed, empty if one can.

        If two processes contradict each other, it cannot be known which is right: all of them are refused
        immediately, instead of when their time-outs end.
        """
        rank, size = join.rank, join.world_size
        if not 1 <= size <= MAX_WORLD_SIZE or rank >= size:
            return f"process {process.pid} joined as rank {rank} of {size}, which is not possible"
        for other, (their, earlier) in self._entries.items():
            if their.world_size != size:
                return (
                    f"the world sizes differ: rank {other} (process {earlier.pid}) has {their.world_size}, "
                    f"rank {rank} (process {process.pid}) has {size}; give all the same WORLD_SIZE"
                )
            if other == rank:
                return (
                    f"rank {rank} joined twice, as process {earlier.pid} and as process {process.pid}: every "
                    "process needs a RANK of its own, and every world its own MASTER_PORT or file"
                )
            if their.versions != join.versions:
                return (
                    f"not all run the same: rank {other} (process {earlier.pid}) {their.versions}, "
                    f"rank {rank} (process {process.pid}) {join.versions}"
                )
        self.world_size = size
        self._entries[rank] = join, process
        return ""

    @property
    def complete(self) -> bool:
        """Whether all have joined."""
        return 0 < self.world_size == len(self._entries)

    @property
    def missing(self) -> str:
        """The ranks that have not joined, in words."""
        return rank_list(rank for rank in range(self.world_size) if rank not in self._entries)

    @property
    def processes(self) -> tuple[Process, ...]:
        """Those that have joined, in rank order."""
        return tuple(process for _, (_, process) in sorted(self._entries.items()))

    @property
    def cpus(self) -> int:
        """How many CPUs they may use together: a launcher may have bound each to its own."""
        return len({cpu for join, _ in self._entries.values() for cpu in join.cpus})

    def _form(self, begin: Callable[[], None]) -> str:
        """Make the control segment, and notify all; return why not, empty if it is done."""
        try:
            fd = control.create(self.world_size, 1, label="world")
        except OSError as error:
            return f"there is no memory for a world of {self.world_size}: {error}"
        mine = -1
        try:
            mine = os.pidfd_open(os.getpid())
            begin()
            self.view = ControlView(fd)
            payload = Joined(usable_cpus(self.cpus), self.processes).pack()
            for member in list(self.members):
                member.outbox.send(Kind.JOINED, payload, [fd, mine])
        finally:
            os.close(fd)
            if mine >= 0:
                os.close(mine)
        return ""

    def lost_text(self, member: WorldMember) -> str:
        """Return what is said when a member is gone too early."""
        whose = f"rank {member.rank} (process {member.process.pid})"
        return f"{whose} left or ended before {self.missing} had joined"


class ClientWorlds:
    """The worlds of one supervisor's introduced clients."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._forming: dict[bytes, World] = {}
        self._waiting: list[WorldMember] = []
        """Those whose world is not formed."""
        self._ranks: dict[int, WorldMember] = {}
        """Client number -> member of a formed world."""

    # before a world is formed -----------------------------------------------------------------------

    def meet(self, client: int, frame: Frame) -> None:
        """Take in a client that wants to meet others.

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
        member = WorldMember(self._clients, sock, self)
        member.client, member.place = client, frame.payload
        self._waiting.append(member)

    def received(self, member: WorldMember, frame: Frame) -> None:
        """Act on a frame of a client that meets others."""
        if member not in self._waiting:
            return  # it is refused, or gives up a world that has just been formed
        if (world := member.world) is None:
            self._check_alone(member)
            world = self._forming.setdefault(member.place, World())
        if (refused := world.act_on(member, frame, partial(self._begin, world))) is not None:
            late, text = refused
            if late:
                text += (
                    ". The ranks of this world are processes that one notebook or script has started with "
                    "nbparallel.multiprocessing, without that itself"
                )
            self._refuse(world, late, text)

    def _begin(self, world: World) -> None:
        self._end_forming(world)
        self._ranks.update((member.client, member) for member in world.members)

    def _check_alone(self, member: WorldMember) -> None:
        """Refuse a process that is in a world already, or joins another one."""
        others = [other for other in self._waiting if other.client == member.client and other.world]
        for other in others:
            self._clients.read(other)  # its end may not have been read
        if member.client in self._ranks or any(other in self._waiting for other in others):
            raise ProtocolError("a JOIN frame of a process that has joined another world")

    def _refuse(self, world: World, late: bool, text: str) -> None:
        """Notify all that have joined why no world is formed."""
        self._end_forming(world)
        for member in world.members:
            member.outbox.send(Kind.REFUSED, Refused(late, text).pack())

    def _end_forming(self, world: World) -> None:
        self._forming = {place: other for place, other in self._forming.items() if other is not world}
        self._waiting = [member for member in self._waiting if member.world is not world]

    def disconnected(self, member: WorldMember, error: Exception | None) -> None:
        """Act on the end of a member's socket: of a rank it says nothing, which still is a client."""
        self._clients.forget(member)
        if member not in self._waiting:
            return
        self._waiting.remove(member)
        if (world := member.world) is not None:
            world.members.remove(member)
            self._refuse(world, False, world.lost_text(member))

    # afterwards -------------------------------------------------------------------------------------

    def has_rank(self, client: int) -> bool:
        """Return whether a client is in a world that was formed."""
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
        member.world.parcels.append(self._clients.server.hold_all_of(client))
        self._remove(member, member.world)

    def client_ended(self, client: int, pidfd: int) -> None:
        """Record the death of a client, if it is a rank; what it sent before has been read."""
        member = self._ranks.get(client)
        if member is None or member.world is None or member.world.view is None:
            return
        member.world.view.write_death(member.rank, exit_code_of(pidfd, member.process))
        self._remove(member, member.world)

    def _remove(self, member: WorldMember, world: World) -> None:
        del self._ranks[member.client]
        world.members.remove(member)
        self._clients.forget(member)
        if not world.members and world.view is not None:
            world.view.close()
            self._clients.send(self._clients.server.end_parcels(world.parcels))

    def end_all(self) -> None:
        """Close what belongs to them: the supervisor exits."""
        for member in (*self._waiting, *self._ranks.values()):
            self._clients.forget(member)


# Introduced clients: processes that clients have started themselves.
#
# Such a client is a child of the process that started it, or of none: so that introduces it before, with one
# end of a socketpair.  It is a client from then on, and holds what its parent holds if it is forked.  Which
# process it is, it announces itself at the other end, with its pidfd.  Its holds end with it, which the pidfd
# reports; the end of its connection says only that it can share nothing any more.
#
# If that does not come, the end of the connection shows that there is no process.  Only a copy that another
# thread of the parent forked before that could still have the other end open: then what a child that died so
# early inherited is held as long as that copy lives.
#
# They are ended with their *root*, the member by whose socket the first of them came, and the daemonic ones
# with the process that started them.  The others outlive it, as children of other programs do.
#
# Note [admission]
# ----------------
# It says nothing before it has been welcomed.  So whatever it sent before a pass over all sockets began
# (`Ledger.mark`) lies in a socket that this pass reads, although they are admitted at any time.

KINDS = frozenset({Kind.INTRODUCE, Kind.ANNOUNCE, Kind.MEET, Kind.LEAVE_WORLD})
"""What `IntroducedClients.received` acts on; the rest is for the ledger."""


class IntroducedProcess(Client):
    """One process.

    Attributes
    ----------
    parent : int
        Client number of the process that started it.
    root : int
        Of the member with which it ends.
    daemon : bool
        Whether it ends with its parent.
    """

    parent: int
    root: int
    daemon: bool


class IntroducedClients:
    """Those of one supervisor."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self.present: dict[int, IntroducedProcess] = {}
        """By client number."""
        self._worlds = ClientWorlds(clients)
        self._admitted = 0
        """How many there have been."""

    # coming -----------------------------------------------------------------------------------------

    def received(self, sender: Client, frame: Frame) -> None:
        """Act on a frame, which came over the socket of one of them, or one of `KINDS` from another client.

        Raises
        ------
        ProtocolError
            It is damaged.
        """
        client = self.present.get(sender.number)
        if frame.kind not in KINDS:
            self._clients.pass_on(sender, frame)
        elif frame.kind is Kind.INTRODUCE:
            self._on_introduce(sender.number, frame)
        elif client is None:
            raise ProtocolError(
                f"a {frame.kind.name} frame of client {sender.number}, which was not introduced"
            )
        elif frame.kind is Kind.ANNOUNCE:
            self._on_announce(client, frame)
        elif client.pidfd < 0:
            raise ProtocolError(f"a {frame.kind.name} frame of client {sender.number} before its ANNOUNCE")
        elif frame.kind is Kind.MEET:
            self._worlds.meet(client.number, frame)
        else:
            self._worlds.leave(client.number)

    def _on_introduce(self, parent: int, frame: Frame) -> None:
        introduction = Introduction.unpack(frame.payload)
        _check_descriptors(frame)
        number, inviter = FIRST_INTRODUCED + self._admitted, self.present.get(parent)
        if number >= MAX_CLIENT:
            raise ProtocolError(f"an INTRODUCE frame of client {number}: there were too many")
        try:
            sock = socket.socket(fileno=frame.fds[-1])
            frame.fds.pop()
            client = IntroducedProcess(self._clients, sock, self)
        except OSError as error:
            raise ProtocolError(f"an INTRODUCE frame without a socket: {error}") from error
        client.parent, client.root = parent, parent if inviter is None else inviter.root
        client.daemon = introduction.daemon
        self._admitted += 1
        self.present[number] = client
        self._clients.admit(client, number)
        if introduction.inherits:
            self._clients.server.ledger.inherit(number, parent)
        client.outbox.send(Kind.WELCOME, Welcome(number).pack())

    def _on_announce(self, client: IntroducedProcess, frame: Frame) -> None:
        if client.pid:
            raise ProtocolError("a second ANNOUNCE frame on one connection")
        client.pid = Announce.unpack(frame.payload).pid
        _check_descriptors(frame)
        client.pidfd = frame.fds.pop()
        self._clients.event_loop.add(client.pidfd, lambda: self._on_exit(client))
        if client.doomed:
            client.kill()

    # while they are here ----------------------------------------------------------------------------

    def rows(self) -> Iterator[IntroducedRow]:
        """Yield a record of each."""
        for client in self.present.values():
            if client.pid:
                yield IntroducedRow(client.number, client.pid, client.parent, client.daemon)

    # going ------------------------------------------------------------------------------------------

    def disconnected(self, client: IntroducedProcess, error: Exception | None) -> None:
        """Act on the end of its socket, or disconnect it: its program may be any, and must not be killed."""
        if error is None and self._worlds.has_rank(client.number):
            self._clients.event_loop.forget(client.socket)  # its pidfd reports the rest, as a rule soon
        elif client.pidfd < 0:
            self._end(client)  # there is no child, or it has ended
        else:
            # What it did not release is not used again: it may still have it mapped.
            self._clients.end(client)

    def _on_exit(self, client: IntroducedProcess) -> None:
        if self.present.get(client.number) is not client or not is_ready(client.pidfd):
            return  # another one's pidfd had this number a moment ago
        self._clients.drain(client)  # what it sent before it ended counts
        was_rank = self._worlds.has_rank(client.number)
        # before its segments end: the others learn why
        self._worlds.client_ended(client.number, client.pidfd)
        self._end(client, disconnect=was_rank)

    def _end(self, client: IntroducedProcess, *, disconnect: bool = False) -> None:
        """Forget one whose process has ended, or was never there."""
        if disconnect or client.socket.fileno() >= 0:
            self._clients.end(client)
        del self.present[client.number]
        self._clients.event_loop.close(client.pidfd)
        self.end_with(client.number)

    def end_with(self, number: int) -> None:
        """End those that end with a client, whose process has ended."""
        for client in self.present.values():
            if client.root == number or (client.daemon and client.parent == number):
                client.kill()

    def watch_root(self, number: int, pidfd: int) -> None:
        """End those of a member with its process, now that it is no member any more; takes over the pidfd."""
        if not any(client.root == number for client in self.present.values()):
            os.close(pidfd)
            return

        def end() -> None:
            self._clients.event_loop.close(pidfd)
            self.end_with(number)

        self._clients.event_loop.once(pidfd, end)

    def end_all(self) -> None:
        """End every one and close what belongs to them: the supervisor exits."""
        for client in list(self.present.values()):
            if client.pidfd < 0:
                # Its identity is in what it has sent; if it sends that from now on, it fails, and exits.
                _refuse(client.socket)
                self._clients.drain(client)
        while self.present:
            client = self.present.popitem()[1]
            client.kill()
            self._clients.forget(client)
            self._clients.event_loop.close(client.pidfd)
        self._worlds.end_all()


def _check_descriptors(frame: Frame) -> None:
    if len(frame.fds) != 1:
        raise ProtocolError(f"an {frame.kind.name} frame with {len(frame.fds)} descriptors")


def _refuse(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RD)
    except OSError:
        pass  # the other end is closed
