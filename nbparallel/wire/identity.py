"""Identity: which process this is, in words that another one can check later.

Some facts (proc(5), pid_namespaces(7), time_namespaces(7)):

* a pid may be used again, in the same pid namespace; pid and start time together may not;
* a start time is shown as the reader's time namespace has it: readers of two of them disagree;
* ``/proc`` may be missing, or show another pid namespace than ours: then ``/proc/self`` is not our pid;
* a process that has ended stays a zombie until its parent waits for it; in a container without an init
  possibly forever.  A process whose other threads go on looks like a zombie, too.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from nbparallel.errors import ProtocolError
from nbparallel.wire.frames import Kind
from nbparallel.wire.segments import FramePayload, Place, Seconds, frame

_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class WorldPlace:
    """Which ranks of a world this machine has: all of them.

    A subclass may have others elsewhere.  It travels to the ranks, and says there what is different.
    """

    world_size: int
    """How many ranks there are."""

    @property
    def ranks(self) -> range:
        """The ranks of this machine."""
        return range(self.world_size)

    @property
    def part(self) -> int:
        """Which part of the world this machine has."""
        return 0

    @property
    def parts(self) -> dict[str, range]:
        """The ranks of each part by its name; empty: there is one."""
        return {}

    @property
    def no_input(self) -> str:
        """Why no rank may ask the user; empty: it may."""
        return ""

    def label_of(self, rank: int) -> str:
        """Return what messages say behind a rank's number."""
        return ""

    def check_reach(self, ranks: Iterable[int], what: str) -> None:
        """Raise if one of `ranks`, which `what` needs, is elsewhere."""

    def operations(self, context: Any, sender: Any, receiver: Any, fds: Sequence[int]) -> Any:
        """Return the collectives in a cell on ranks that share no memory; else None.

        `context` is the `RankContext`, `fds` came with the cell.
        """

    def mail(self, context: Any) -> Any:
        """Return what a rank's messages to ranks elsewhere need beside rings; None: all are here."""

    def around(self, rank: int) -> range:
        """Return the ranks on the machine of a rank."""
        return self.ranks


@dataclass(frozen=True, slots=True)
class Process:
    """A process, for as long as the machine runs."""

    pid: int
    """Its number in its pid namespace."""
    started: int
    """Clock ticks from boot to its start; 0: not known."""


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What ``/proc`` says of a process."""

    letter: str
    """R, S, D, T, Z … as ps(1) explains them."""
    parent: int
    """Its parent's pid."""
    group: int
    """Its process group (setpgid(2))."""
    started: int
    """As `Process.started`."""
    exiting: bool
    """Whether it has begun to exit: the system is closing what it had open."""
    status: int
    """Of a zombie, what its parent will get when it waits for it."""


_PF_EXITING = 0x4
"""Of the flags in ``/proc/PID/stat`` (proc_pid_stat(5))."""


def process_state(pid: int) -> ProcessState | None:
    """Return what ``/proc`` says of a process; None if it says nothing."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        exiting = fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)
        parent, group, started, status = (int(fields[index]) for index in (1, 2, 19, 49))
        return ProcessState(fields[0], parent, group, started, exiting, status)
    except (OSError, IndexError, ValueError):
        return None


def process_of(pid: int) -> Process:
    """Return a process that is known to live."""
    state = process_state(pid) if shows_our_pids() else None
    return Process(pid, 0 if state is None else state.started)


def shows_our_pids() -> bool:
    """Return whether a number under ``/proc`` means what it means to us."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def has_ended(process: Process) -> bool:
    """Return whether a process has ended, for sure; a zombie has, unless other threads of its go on."""
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # another user's
    state = process_state(process.pid) if shows_our_pids() else None
    if state is None or not process.started:
        return False
    if state.started != process.started:
        return True  # another one has its number
    try:
        return state.letter in "ZX" and len(os.listdir(f"/proc/{process.pid}/task")) == 1
    except OSError:
        return False


MODULES = ("nbparallel", "numpy")
"""Compared if both sides have imported them."""


def versions() -> dict[str, str]:
    """Return what this process runs."""
    found = {"Python": platform.python_version()}
    for name in MODULES:
        version = getattr(sys.modules.get(name), "__version__", None)  # a thread may be half-way through it
        if version is not None:
            found[name] = str(version)
    return found


def pack_versions() -> bytes:
    """Return the payload of ``RANK_READY``."""
    return json.dumps(versions()).encode()


def difference(payload: bytes) -> str:
    """Compare a rank's versions with this process's: ``numpy 2.3 (the notebook has 2.2)``, empty if equal.

    Raises
    ------
    ProtocolError
        The payload holds no versions.
    """
    try:
        theirs = json.loads(payload)
        mine = versions()
        differing = [name for name in mine if name in theirs and theirs[name] != mine[name]]
        return ", ".join(f"{name} {theirs[name]} (the notebook has {mine[name]})" for name in differing)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"a RANK_READY frame without versions: {payload[:20]!r}") from error


SOCKET, DRAFT = "socket", "socket.new"
"""Names in the directory where processes meet that another program started."""


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, user id) of the process at the other end, as reported by the kernel.

    Of a socketpair that is the process that made it.
    """
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(data)
    return pid, user


# Payloads between a process of a script and the supervisor of its world, before and after they meet.
#
# ``JOIN`` (with a pidfd of the sender) is answered by ``JOINED`` (with the control segment and a pidfd of the
# supervisor) once all have come, or by ``REFUSED``.  ``ABORT_JOIN``: the sender's time is over;
# ``LEAVE_WORLD``: it leaves the world in order.  In between the segment protocol is spoken
# (`wire.segments`), as client number rank + 1.
#
# Processes that are guests of a supervisor already meet there: ``MEET``, with a place and one end of a
# socketpair, goes over their connection; over the socketpair the same is said.  They keep their client
# numbers, and ``LEAVE_WORLD`` goes over their connection as well.  Most of it is JSON: nothing is unpickled
# here.


def client_of(rank: int) -> int:
    """Return the client number of a rank in the ledger of its world."""
    return rank + 1


@dataclass(frozen=True, slots=True)
class Join:
    """``JOIN``: rank, world size, versions and CPUs of the sender."""

    rank: int
    """The number that it was given."""
    world_size: int
    """How many it thinks there are."""
    versions: str
    """What it runs, in words; must be the same for all."""
    cpus: tuple[int, ...]
    """Numbers of the CPUs that it may use."""

    def pack(self) -> bytes:
        """Return the payload."""
        return json.dumps([self.rank, self.world_size, self.versions, self.cpus]).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a payload; `ProtocolError` if it is damaged."""
        rank, world_size, versions, cpus = _fields(payload, 4, "JOIN")
        whole = [rank, world_size, *cpus] if isinstance(cpus, list) else [None]
        # JSON can hold half a character, which an answer that quotes it could not
        if not (isinstance(versions, str) and versions.isascii()) or not all(
            type(n) is int and 0 <= n < 1 << 31 for n in whole
        ):
            raise ProtocolError(f"damaged JOIN frame: {payload[:80]!r}")
        return cls(rank, world_size, versions, tuple(cpus))


@dataclass(frozen=True, slots=True)
class Joined:
    """``JOINED``: the world is complete."""

    usable_cpus: int
    """CPUs that its processes may use together."""
    members: tuple[Process, ...]
    """Its processes, in rank order."""

    def pack(self) -> bytes:
        """Return the payload."""
        return json.dumps([self.usable_cpus, [[p.pid, p.started] for p in self.members]]).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> Self:
        """Read a payload; `ProtocolError` if it is damaged."""
        cpus, members = _fields(payload, 2, "JOINED")
        return cls(int(cpus), tuple(Process(int(pid), int(started)) for pid, started in members))


@frame(Kind.ABORT_JOIN)
class AbortJoin(FramePayload):
    """``ABORT_JOIN``: the sender has waited long enough."""

    seconds: Seconds
    """How long."""


@frame(Kind.REFUSED)
class Refused(FramePayload):
    """``REFUSED``: there will be no world."""

    late: bool
    """Whether the time-out of a process expired before all had joined.

    Otherwise the processes do not fit together, or one of them ended.
    """
    text: Place
    """Why, in a sentence."""


def _fields(payload: bytes, count: int, name: str) -> list[Any]:
    try:
        fields = json.loads(payload)
    except ValueError:
        fields = None
    if not isinstance(fields, list) or len(fields) != count:
        raise ProtocolError(f"damaged {name} frame: {payload[:80]!r}")
    return fields
