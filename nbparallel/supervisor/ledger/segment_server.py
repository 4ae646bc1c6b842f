"""The segment server: registers segments and sends their descriptors to the clients that fetch them.

It owns one descriptor of every published segment, so that a segment can still be handed out when its
creator is busy, stopped or dead.  Standard library only: it runs under ``python -I -S -E``.

Some facts about descriptors of memory (memfd_create(2), proc_pid_fd(5)):

* opening /proc/self/fd/N makes a new open file of the same memory, here with O_RDONLY: what is received
  that way cannot be mapped for writing.  A duplicate would share the rights of the original;
* a received descriptor is close-on-exec only because `wire.frames` asks for it; the template is started
  with ``close_fds``, so no process inherits any.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.ledger import records as act
from nbparallel.supervisor.ledger.ledger import Ledger
from nbparallel.wire import locked_names
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.inspection import LedgerRow
from nbparallel.wire.segments import (
    CLIENT_SHIFT,
    MESSAGES,
    Fetched,
    FramePayload,
    Lost,
    LostReason,
    Post,
    Register,
    Release,
    creator_of,
    segment_id,
)

NO_CLIENT = -1
"""Sender of a parcel that outlives the client whose segments it holds."""
MOST_SPARE = 64
"""Descriptors left for sockets, pidfds and what is on its way out; at most a quarter of the table."""


@dataclass(slots=True)
class Reply:
    """A frame to be sent; its receiver closes the descriptors after sending, or instead."""

    client: int
    """The client that gets it."""
    message: FramePayload
    """What it says."""
    fds: list[int] = field(default_factory=list)
    """Descriptors that travel with it; they belong to this object."""
    sequence: int = 0
    """Number of the question that it answers."""

    def close(self) -> None:
        """Close the descriptors (idempotent)."""
        while self.fds:
            os.close(self.fds.pop())


class SegmentServer:
    """Acts on the clients' frames and returns the frames to send.

    Parameters
    ----------
    max_descriptors : int, optional
        How many segments may be kept; by default as many as leave enough of the process's table.

    Notes
    -----
    For one thread.  Nothing a client sends makes a method raise anything but `ProtocolError`, which
    concerns this client alone: the caller ends its connection and performs `Ledger.client_gone`.
    """

    def __init__(self, max_descriptors: int | None = None) -> None:
        self.ledger = Ledger()
        """Where it is `unsettled`: call `mark`, read all that clients have sent until then, and `settle`."""
        self._fds: dict[int, int] = {}
        self._inodes: dict[int, tuple[int, int]] = {}
        """Device and inode of segments whose descriptor was not kept."""
        self.max_descriptors = max_descriptors
        self._kept = 0
        """How often `hold_all_of` was called."""

    def rows(self) -> Iterator[LedgerRow]:
        """Yield a record of each segment."""
        for segment, entry in self.ledger.entries.items():
            clients = tuple(sorted(holder for holder in entry.holders if holder >= 0))
            messages = len(entry.holders) - len(clients)
            yield LedgerRow(segment, entry.nbytes, entry.writable, clients, messages)

    def end_parcels(self, parcels: Sequence[int]) -> list[Reply]:
        """End what messages hold that will not be received."""
        return [r for parcel in parcels for r in self.perform(self.ledger.end_parcel(parcel))]

    def hold_all_of(self, client: int) -> int:
        """Return a new parcel that holds what a client holds now, until `end_parcels`."""
        self._kept += 1
        parcel = segment_id(client, (1 << CLIENT_SHIFT) - self._kept)  # no client gets as far
        held = [segment for segment, entry in self.ledger.entries.items() if client in entry.holders]
        self.ledger.step(client, Post(parcel, 0, tuple(held)))
        self.ledger.parcels.parcels[parcel].sender = NO_CLIENT
        return parcel

    def receive(self, client: int, frame: Frame) -> list[Reply]:
        """Act on a client's frame, and close its descriptors.

        Raises
        ------
        ProtocolError
            The frame is damaged, or says what no client of nbparallel sends.
        """
        try:
            expected = 1 if frame.kind is Kind.REGISTER else 0
            if len(frame.fds) != expected:
                raise ProtocolError(f"{frame.kind.name} frame with {len(frame.fds)} descriptors")
            if (unpack := MESSAGES.get(frame.kind)) is None:
                raise ProtocolError(f"unexpected {frame.kind.name} frame on a segment socket")
            message = unpack(frame.payload)
            if isinstance(message, Register):
                _check_memory(frame.fds[0], message.nbytes)
            return self.perform(self.ledger.step(client, message, frame.sequence), frame)
        finally:
            frame.close()

    def close(self) -> None:
        """Remove every name and close every descriptor: the session is over (idempotent)."""
        for path in self.ledger.names:
            _unlink(path)
        self.ledger = Ledger()
        while self._fds:
            os.close(self._fds.popitem()[1])

    def perform(self, actions: Sequence[act.Action], frame: Frame | None = None) -> list[Reply]:
        """Do what the ledger has decided, of a message that came with a frame; return the frames to send."""
        outgoing: list[Reply] = []
        for action in actions:
            match action:
                case act.StoreDescriptor(segment):
                    self._keep(segment, frame)
                case act.Close(segment):
                    self._inodes.pop(segment, None)
                    fd = self._fds.pop(segment, None)
                    if fd is not None:
                        os.close(fd)
                case act.Unlink(path):
                    _unlink(path)
                case act.Grant():
                    outgoing += self._grant(action)
                case act.Notify(client, message, sequence):
                    outgoing.append(Reply(client, message, sequence=sequence))
        return outgoing

    def _keep(self, segment: int, frame: Frame | None) -> None:
        assert frame is not None, "only a REGISTER frame has the ledger keep a descriptor"
        if segment in self._fds:
            return
        if self._has_room(frame.fds[-1]):
            self._fds[segment] = frame.fds.pop()
            self._inodes.pop(segment, None)
            return
        # Otherwise only its number is known; it may still be found by its name, if it has one.
        status = os.fstat(frame.fds[-1])
        self._inodes[segment] = status.st_dev, status.st_ino

    def _grant(self, grant: act.Grant) -> list[Reply]:
        fd = self._descriptor(grant)
        if not isinstance(fd, LostReason):
            answer = Fetched(grant.segment, grant.nbytes, grant.writable)
            return [Reply(grant.client, answer, [fd], grant.sequence)]
        outgoing = [_lost(grant.client, grant.segment, fd, grant.sequence)]
        creator = creator_of(grant.segment)
        if fd is LostReason.DESCRIPTORS and grant.segment not in self._fds and creator in self.ledger.clients:
            outgoing.append(_lost(creator, grant.segment, fd, 0))
        if grant.fresh:
            outgoing += self.perform(self.ledger.step(grant.client, Release(grant.segment)))
        return outgoing

    def _descriptor(self, grant: act.Grant) -> int | LostReason:
        """Return a descriptor to be sent, or why there is none."""
        kept = self._fds.get(grant.segment)
        try:
            if kept is None:
                return self._open_by_name(grant)
            # Of a file with a name, a new open file where /proc is: mapping it does not keep it locked.
            named = self.ledger.entries[grant.segment].path and os.path.exists("/proc/self/fd")
            if grant.writable and not named:
                return os.dup(kept)
            access = os.O_RDWR if grant.writable else os.O_RDONLY
            return os.open(f"/proc/self/fd/{kept}", access | os.O_CLOEXEC)
        except OSError as error:
            return LostReason.NO_PROC if error.errno == errno.ENOENT else LostReason.DESCRIPTORS

    def _open_by_name(self, grant: act.Grant) -> int | LostReason:
        path = self.ledger.entries[grant.segment].path
        if not path:
            return LostReason.DESCRIPTORS
        access = os.O_RDWR if grant.writable else os.O_RDONLY
        try:
            fd = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            return (
                LostReason.DESCRIPTORS if error.errno in (errno.EMFILE, errno.ENFILE) else LostReason.REMOVED
            )
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != self._inodes.get(grant.segment) or not locked_names.hold(fd):
            os.close(fd)  # another file was put there; locked, as no other process need have it open
            return LostReason.REMOVED
        return fd

    def _has_room(self, fd: int) -> bool:
        if self.max_descriptors is not None:
            return len(self._fds) < self.max_descriptors
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        # A new descriptor gets the lowest free number: a high one means that the table is nearly full.
        return soft <= 0 or fd < soft - min(MOST_SPARE, soft // 4)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # its maker was quicker, or never made it
    except OSError:
        pass  # a directory that went away or became read-only: what is left there is the sweep's


def _check_memory(fd: int, nbytes: int) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
        raise ProtocolError(f"a segment of {nbytes} bytes was announced, something else came")


def _lost(client: int, segment: int, reason: LostReason, sequence: int) -> Reply:
    return Reply(client, Lost(segment, reason), sequence=sequence)
