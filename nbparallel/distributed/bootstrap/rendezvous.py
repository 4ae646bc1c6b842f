"""Rendezvous of processes that another program started: a private directory, and the start of a supervisor.

They meet in a directory that only this user may enter.  The first to lock it starts the supervisor, which
inherits the lock and listens on a socket there; the others connect.  When all have joined, or cannot, the
directory is removed.  So one that exists and is *not* locked was left by processes that are all dead, and is
reused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from nbparallel.channel import Channel, SegmentClient
from nbparallel.errors import (
    ChannelClosedError,
    CollectiveTimeoutError,
    ProtocolError,
    RendezvousError,
    StartError,
    SupervisorDiedError,
)
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.identity import DRAFT, SOCKET, AbortJoin, Join, Joined, Refused, peer_of
from nbparallel.wire.segments import Meet
from nbparallel.wire.system import without_debugger

PAUSE_SECONDS = 0.005
"""Between two attempts while another process starts the supervisor; arbitrary."""
LAST_WORD_SECONDS = 1.0
"""How long the supervisor may take to name the missing ranks."""
STARTS = 3
"""How often one process starts a supervisor that exits immediately."""
START_SECONDS = 60.0
"""A generous bound for an interpreter that only has to start and fork."""
_PARENT = str(Path(__file__).resolve().parents[3])
_CODE = (
    "import sys; sys.path.append(sys.argv[1]); from nbparallel.supervisor.external_world import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"
)


@dataclass(slots=True)
class Admission:
    """What a process gets once the world is formed; its receiver owns channel and descriptors."""

    channel: Channel
    """To the supervisor, for segments."""
    control: int
    """Descriptor of the control segment."""
    supervisor: int
    """A pidfd."""
    joined: Joined
    """The members of the world."""


def arrive_and_wait(place: str, join: Join, seconds: float) -> Admission:
    """Wait in `place` until all processes of the world are there.

    Raises
    ------
    RendezvousError
        They do not fit together, one of them ended, or the place cannot be used.
    CollectiveTimeoutError
        `seconds` were over before all had joined; the message names the missing ranks.
    StartError
        The supervisor could not be started.
    """
    rendezvous = _Rendezvous(place, join, time.monotonic() + seconds, seconds)
    while True:
        admission = rendezvous.attempt()
        if admission is not None:
            return admission
        if rendezvous.seconds_left <= 0:
            raise CollectiveTimeoutError(
                f"rank {join.rank} found no other rank of {join.world_size} within {seconds:g} s in {place}"
            )
        time.sleep(PAUSE_SECONDS)


def meet_at_supervisor(broker: SegmentClient, place: str, join: Join, seconds: float) -> Admission:
    """Wait until all processes of the world have named `place` to the supervisor whose guest this one is.

    Raises
    ------
    RendezvousError, CollectiveTimeoutError
        As `arrive_and_wait`.
    SupervisorDiedError
        The supervisor has ended.
    """
    mine, theirs = Channel.pair()
    try:
        with theirs:
            broker.send(Meet(place), theirs.fileno())
        return _Rendezvous(place, join, time.monotonic() + seconds, seconds).request(Channel(mine))
    except ChannelClosedError as error:
        mine.close()
        raise SupervisorDiedError(
            f"the supervisor of process {os.getpid()} has ended, so that it can meet no other process"
        ) from error
    except BaseException:
        mine.close()
        raise


class _Rendezvous:
    """One process's attempts to join the others."""

    def __init__(self, place: str, join: Join, deadline: float, seconds: float) -> None:
        self._place, self._join, self._deadline, self._seconds = place, join, deadline, seconds
        self._starts = 0

    @property
    def seconds_left(self) -> float:
        """Seconds until the time-out."""
        return self._deadline - time.monotonic()

    def attempt(self) -> Admission | None:
        """Return an admission; None if it is to be tried again in a moment."""
        directory = _enter(self._place)
        if directory is None:
            return None
        log = -1
        try:
            channel = _connect(directory, self._place)
            if channel is None:
                if not _lock(directory, self._place):
                    return None  # another process starts the supervisor, or it is about to exit
                try:
                    _clear(directory, self._place)
                    log = _log()
                    channel = _start(directory, self._place, log)
                except BaseException:
                    _remove(self._place)  # no other process can be there: it is locked
                    raise
                self._starts += 1
            os.close(directory)  # and with it our lock: from now on only the supervisor holds it
            directory = -1
            try:
                return self.request(channel)
            except ChannelClosedError as error:
                if log >= 0 and self._starts >= STARTS:
                    _remove(self._place)
                    raise StartError(f"the world's supervisor exited immediately: {_read(log)}") from error
                return None  # it ended, with a world that we were late for, or killed: try again
        finally:
            for fd in (directory, log):
                if fd >= 0:
                    os.close(fd)

    def request(self, channel: Channel) -> Admission:
        """Join over a connection to a supervisor, which is closed if that fails."""
        try:
            me = _own_pidfd()
            try:
                channel.send(Kind.JOIN, self._join.pack(), fds=(me,), abandon=lambda: self.seconds_left <= 0)
            finally:
                os.close(me)
            frame = channel.receive(max(0.0, self.seconds_left))
            if frame is None:
                channel.send(Kind.ABORT_JOIN, AbortJoin(self._seconds).pack(), abandon=lambda: True)
                frame = channel.receive(LAST_WORD_SECONDS)
            return self._read_answer(channel, frame)
        except BaseException:
            channel.close()
            raise

    def _read_answer(self, channel: Channel, frame: Frame | None) -> Admission:
        if frame is None:
            raise CollectiveTimeoutError(
                f"rank {self._join.rank} has waited {self._seconds:g} s in {self._place}, and the supervisor "
                "there does not answer which ranks are missing"
            )
        try:
            if frame.kind is Kind.JOINED and len(frame.fds) == 2:
                joined = Joined.unpack(frame.payload)
                supervisor, control = frame.fds.pop(), frame.fds.pop()
                return Admission(channel, control, supervisor, joined)
            if frame.kind is not Kind.REFUSED:
                raise ProtocolError(f"unexpected {frame.kind.name} frame as an answer to JOIN")
            refused = Refused.unpack(frame.payload)
            kind = CollectiveTimeoutError if refused.late else RendezvousError
            raise kind(f"{refused.text} (they meet in {self._place})")
        finally:
            frame.close()


def _enter(place: str) -> int | None:
    """Return a descriptor of the directory, made if needed; None if it is being removed."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(place, 0o700)
        directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENOENT and os.path.isdir(os.path.dirname(place)):
            return None
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise RendezvousError(
                f"{place} is there already and no meeting place of nbparallel: a stale file, from torch "
                "perhaps. Remove it, or pass the path of a file that does not exist"
            ) from None
        raise RendezvousError(f"the ranks cannot meet in {place}: {os.strerror(error.errno or 0)}") from None
    status = os.fstat(directory)
    if status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077:
        return directory
    os.close(directory)
    whose = "may be entered by others" if status.st_uid == os.geteuid() else "belongs to another user"
    raise RendezvousError(f"the ranks cannot meet in {place}: it {whose}; take another MASTER_PORT or path")


def _connect(directory: int, place: str) -> Channel | None:
    """Return a connection to the supervisor that listens there, None if none does."""
    # A socket's path has 107 bytes at most, the directory's may have more.
    short = f"/proc/self/fd/{directory}"
    with contextlib.ExitStack() as unless_connected:
        sock = unless_connected.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sock.setblocking(False)  # it connects immediately or not at all, even if no process accepts
        try:
            sock.connect(os.path.join(short if os.path.isdir(short) else place, SOCKET))
            if peer_of(sock)[1] != os.geteuid():
                raise PermissionError(errno.EPERM, "a process of another user listens there")
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):
            return None
        except OSError as error:
            raise RendezvousError(f"the ranks cannot meet in {place}: {error.strerror or error}") from None
        unless_connected.pop_all()
        return Channel(sock)


def _lock(directory: int, place: str) -> bool:
    """Return whether the directory is ours alone now, and still the one of that name."""
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        here, there = os.fstat(directory), os.lstat(place)
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:
        raise RendezvousError(
            f"the ranks cannot meet in {place}: locks do not work there ({error})"
        ) from None
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _clear(directory: int, place: str) -> None:
    """Remove what a supervisor has left there that was killed."""
    found = set(os.listdir(directory))
    if not found <= {SOCKET, DRAFT}:
        raise RendezvousError(
            f"the ranks cannot meet in {place}: it holds other files; pass the path of a file that does not "
            "exist"
        )
    for name in found:
        os.unlink(name, dir_fd=directory)
    if found:
        sys.stderr.write(f"nbparallel: {place} was stale, left by processes that are dead; it is used anew\n")
        sys.stderr.flush()


def _remove(place: str) -> None:
    with contextlib.suppress(OSError):  # it is gone, or holds what is not ours
        os.rmdir(place)


def _start(directory: int, place: str, log: int) -> Channel:
    """Start the supervisor and return our end of a connection to it."""
    mine, theirs = Channel.pair()
    # Of a session below which this process may run, which must not end the world.
    marks = ("NBP_SESSION", "NBP_CLIENT", "NBP_OWNER")
    given = [directory, theirs.fileno()]
    try:
        with without_debugger():
            popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-E", "-c", _CODE, _PARENT, *map(str, given), place],
                stdin=subprocess.DEVNULL,
                stdout=log,  # never the launcher's pipes: it would wait for their end
                stderr=log,
                pass_fds=given,
                start_new_session=True,
                cwd="/",
                env={name: value for name, value in os.environ.items() if name not in marks},
            )
        popen.wait(START_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        mine.close()
        raise StartError(f"the supervisor of the world could not be started: {error}") from error
    except BaseException:
        mine.close()
        raise
    finally:
        theirs.close()
    return Channel(mine)


def _own_pidfd() -> int:
    try:
        return os.pidfd_open(os.getpid())
    except (OSError, AttributeError) as error:
        raise StartError(
            f"ranks cannot watch each other: pidfd_open does not work here ({error}). It needs Linux 5.3 or "
            "newer, and a container whose seccomp profile allows it (Docker's does since 20.10)"
        ) from error


def _log() -> int:
    with tempfile.TemporaryFile(prefix="nbp-log") as file:
        return os.dup(file.fileno())


def _read(log: int) -> str:
    return os.pread(log, 4000, 0).decode("utf-8", "backslashreplace").strip() or "it said nothing"
