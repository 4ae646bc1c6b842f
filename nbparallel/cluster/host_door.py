"""Place and door of a host: which ranks are on which; and how its first rank reaches those of the others.

A socket that came with the task leads to what has the connections.  What one leader has for another is a
stream: the sizes of its buffers, then their bytes, in frames of at most `CHUNK` bytes.  A leader reads
whenever it waits to write, and each host takes part in each exchange: so all that is sent is taken in the
end, and a host is at most one exchange ahead.
"""

from __future__ import annotations

import importlib
import itertools
import os
import select
import socket
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbparallel.errors import ChannelClosedError, HostBoundaryError, rank_list
from nbparallel.wire.control import ControlView, SlotRecord
from nbparallel.wire.control_layout import ARRIVE
from nbparallel.wire.frames import DOOR_HEAD, DoorKind, Octets
from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.system import ready

INSIDE_HOSTS = (
    "only messages, barrier, broadcast, reduce, all_reduce, gather, all_gather, scatter, reduce_scatter, "
    "all_to_all and dist's average_gradients, assert_same and batches cross hosts, in a cell on all ranks: "
    "use one of these, or pass group=dist.host_group(), the ranks of this host"
)


@dataclass(frozen=True, slots=True)
class HostPlace(WorldPlace):
    """Which ranks stand on which hosts of a session, and which host this is.

    >>> place = HostPlace(5, ("a", "b"), (0, 2, 5), 1)
    >>> place.ranks, place.host_of(1), place.name
    (range(2, 5), 'a', 'b')
    """

    hosts: tuple[str, ...]
    """Names of the hosts."""
    firsts: tuple[int, ...]
    """The first rank of each; behind the last host, the number of all ranks."""
    index: int
    """Which of the hosts this is."""

    @property
    def name(self) -> str:
        """The name of this host."""
        return self.hosts[self.index]

    @property
    def ranks(self) -> range:
        """The ranks of this host."""
        return self.ranks_of(self.index)

    @property
    def part(self) -> int:
        """Which of the hosts this is."""
        return self.index

    @property
    def parts(self) -> dict[str, range]:
        """The ranks of each host."""
        return dict(zip(self.hosts, map(range, self.firsts, self.firsts[1:]), strict=True))

    @property
    def no_input(self) -> str:
        """Why no rank may ask the user."""
        return "this rank is on a host of a cluster"

    def index_of(self, rank: int) -> int:
        """Return which of the hosts has a rank."""
        return bisect_right(self.firsts, rank) - 1

    def host_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        return self.hosts[self.index_of(rank)]

    def ranks_of(self, host: int) -> range:
        """Return the ranks of a host, given by its index."""
        return range(self.firsts[host], self.firsts[host + 1])

    def around(self, rank: int) -> range:
        """Return the ranks of a rank's host."""
        return self.ranks_of(self.index_of(rank))

    def awaited(self, view: ControlView, record: SlotRecord) -> list[int] | None:
        """Return the first ranks of hosts that have not begun the exchange in which a rank waits."""
        begun = {rank: view.words[exchange_word(view, rank)] for rank in self.firsts[:-1]}
        return [rank for rank, number in begun.items() if number < record.sequence] or None

    def label_of(self, rank: int) -> str:
        """Return what messages say behind a rank's number."""
        return f" (host {self.host_of(rank)})"

    def check_reach(self, ranks: Iterable[int], what: str) -> None:
        """Raise if one of `ranks`, which `what` needs, is on another host."""
        if others := [rank for rank in ranks if rank not in self.ranks]:
            raise HostBoundaryError(
                f"{what} on host {self.name} needs {rank_list(others)}, and {INSIDE_HOSTS}"
            )

    def operations(self, context: Any, fds: Sequence[int]) -> Any:
        """Return `HostOperations` in a cell on all ranks, with which a door has come."""
        if not fds:
            return None
        module = importlib.import_module("nbparallel.cluster.host_operations")  # it stands on this module
        return module.HostOperations(context, self, *fds)

    def mail(self, context: Any) -> Any:
        """Return `RankMail`."""
        return importlib.import_module("nbparallel.cluster.rank_mail").RankMail(context)


def exchange_word(view: ControlView, rank: int) -> int:
    """Return the word with the number of the exchange that a host's first rank has begun last."""
    return view.word(rank, ARRIVE) + 1


CHUNK = 1 << 20
TOGETHER = 64
"""Parts that one call sends: heads and payloads."""
SLICE_MS = 50.0
"""Longest sleep between two checks of whether the wait can still succeed."""
_SIZE, _COUNT = struct.Struct("<Q"), struct.Struct("<I")


class _Incoming:
    """What another host has sent in one exchange; it begins with the first frame."""

    def __init__(self, frame: memoryview) -> None:
        (count,) = _COUNT.unpack_from(frame)
        start = _COUNT.size + count * _SIZE.size
        sizes = [_SIZE.unpack_from(frame, at)[0] for at in range(_COUNT.size, start, _SIZE.size)]
        whole = memoryview(bytearray(start + sum(sizes)))
        whole[: len(frame)] = frame
        self.left = whole[len(frame) :]
        """What has not come."""
        ends = list(itertools.accumulate(sizes, initial=start))
        self.buffers = [whole[at:end] for at, end in itertools.pairwise(ends)]


class HostDoor:
    """The leader's end of the door, for one cell.

    Parameters
    ----------
    fd : int
        The socket; it stays the caller's.
    """

    def __init__(self, fd: int, place: HostPlace) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._hosts = [host for host in range(len(place.hosts)) if host != place.index]
        self._incoming: dict[tuple[int, int], _Incoming] = {}
        """By host and number of the exchange: this one, or the next."""
        self._outbox: deque[memoryview] = deque()
        self._head: tuple[int, int, int, int] | None = None
        """Of the frame whose payload is being read; None: of none, the next head is."""
        self._part = self._missing = memoryview(bytearray(DOOR_HEAD.size))
        """The head or payload that comes next, and what has not come of it."""
        self.number = 0
        """Of the exchange that has begun last."""
        self.ended: dict[int, DoorKind] = {}
        """Hosts from which no frame comes any more, and why."""

    def exchange(
        self, outgoing: Mapping[int, Sequence[Octets]], check: Callable[[list[int]], None]
    ) -> dict[int, list[memoryview]]:
        """Send each host its buffers, and return those of each; all leaders call it, equally often.

        Parameters
        ----------
        check : callable
            Called at least every 50 ms with the hosts that are missing; raises if that has become hopeless.
        """
        self.number += 1
        for host in self._hosts:
            self._send(host, outgoing.get(host, ()))
        while (missing := [host for host in self._hosts if self._lacks(host)]) or self._outbox:
            check(missing)  # behind what has come: a host that sent its part may fail afterwards
            self._move()
        return {host: self._incoming.pop((host, self.number)).buffers for host in self._hosts}

    def _lacks(self, host: int) -> bool:
        came = self._incoming.get((host, self.number))
        return came is None or len(came.left) > 0

    def _send(self, host: int, buffers: Sequence[Octets]) -> None:
        """Put buffers into the outbox, as frames."""
        parts = [memoryview(buffer).cast("B") for buffer in buffers]
        head = _COUNT.pack(len(parts)) + b"".join(_SIZE.pack(len(part)) for part in parts)
        left = deque([memoryview(head), *parts])
        while left:
            frame, room = list[memoryview](), CHUNK
            while left and room:
                part = left.popleft()
                if len(part) > room:
                    left.appendleft(part[room:])
                if part := part[:room]:
                    frame.append(part)
                room -= len(part)
            size = CHUNK - room
            self._outbox += [memoryview(DOOR_HEAD.pack(host, DoorKind.DATA, size, self.number)), *frame]

    def _move(self) -> None:
        """Send what the socket takes, and read what it has; waits for at most one slice."""
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        if not ready(self._poll, SLICE_MS):
            return
        try:
            while self._outbox:
                count = self._socket.sendmsg(itertools.islice(self._outbox, TOGETHER))
                while count:
                    part = self._outbox.popleft()
                    if count < len(part):
                        self._outbox.appendleft(part[count:])
                    count -= min(count, len(part))
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._gone() from error
        try:
            while count := self._socket.recv_into(self._missing):
                self._missing = self._missing[count:]
                if not self._missing:
                    self._take_part()
            raise self._gone()
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._gone() from error

    def _take_part(self) -> None:
        """Take a head or a payload that has come whole, and expect the next."""
        if self._head is None:
            host, kind, nbytes, number = self._head = DOOR_HEAD.unpack(self._part)
            if nbytes:  # straight into its place if that is known
                came = self._incoming.get((host, number))
                self._part = self._missing = (
                    memoryview(bytearray(nbytes)) if came is None else came.left[:nbytes]
                )
                return
        host, kind, nbytes, number = self._head
        if kind != DoorKind.DATA:
            self.ended.setdefault(host, DoorKind(kind))
        elif (came := self._incoming.get((host, number))) is None:
            self._incoming[host, number] = _Incoming(self._part)
        else:
            came.left = came.left[nbytes:]
        self._head = None
        self._part = self._missing = memoryview(bytearray(DOOR_HEAD.size))

    @staticmethod
    def _gone() -> ChannelClosedError:
        return ChannelClosedError("the node of this host, which carries operations over hosts, is gone")

    def close(self) -> None:
        """Close this end (idempotent)."""
        self._socket.close()
