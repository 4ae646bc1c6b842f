"""Door: a host's leader exchanges bytes with the leaders of the other hosts; their nodes carry the frames.

A socket that came with the task leads to the node of this host, which passes frames on to the others'.  What
one leader has for another is a stream: the sizes of its buffers, then their bytes, in frames of `CHUNK`
bytes.  Frame k is sent only when k + 1 - `WINDOW` frames of the other have come, which has as many: one with
less to send sends empty ones.  So no process on the way holds more, and no leader waits without end:
one that may not send waits for a frame that the other may send.
"""

from __future__ import annotations

import itertools
import math
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from nbparallel.errors import ChannelClosedError, ProtocolError
from nbparallel.wire.frames import DOOR_HEAD, DoorKind, Octets
from nbparallel.wire.identity import WorldPlace
from nbparallel.wire.system import ready

CHUNK = 1 << 20
WINDOW = 4
TOGETHER = 64
"""Parts that one call sends: heads and payloads."""
SLICE_MS = 50.0
"""Longest sleep between two checks of whether the wait can still succeed."""
_SIZE, _COUNT = struct.Struct("<Q"), struct.Struct("<I")


class _Stream:
    """What two leaders have for each other in one exchange, as one of them sees it."""

    def __init__(self, buffers: Sequence[Octets]) -> None:
        parts = [memoryview(buffer).cast("B") for buffer in buffers]
        head = _COUNT.pack(len(parts)) + b"".join(_SIZE.pack(len(part)) for part in parts)
        self._left = deque([memoryview(head), *parts])
        self._frames = max(1, math.ceil((len(head) + sum(map(len, parts))) / CHUNK))
        self._sent = self._came = 0
        self._sizes: list[int] = []
        self._whole = memoryview(b"")
        """Memory for all that the other sends, from its first frame on."""

    def may_send(self) -> bool:
        """Whether the next frame may be sent now."""
        return self._sent < min(self._frames, self._came + WINDOW)

    def next_frame(self) -> list[memoryview]:
        """Return the parts of the next frame."""
        self._sent += 1
        found, room = [], CHUNK
        while self._left and room:
            part = self._left.popleft()
            if len(part) > room:
                self._left.appendleft(part[room:])
            found.append(part[:room])
            room -= len(found[-1])
        return found

    def room(self, waiting: int, nbytes: int) -> memoryview:
        """Return where a frame belongs, before which so many others wait to be taken; empty: not known."""
        start = (self._came + waiting) * CHUNK
        return self._whole[start : start + nbytes]

    def take(self, payload: memoryview) -> None:
        """Take the other's next frame."""
        if not self._came:
            (count,) = _COUNT.unpack_from(payload)
            start = _COUNT.size
            self._sizes = [_SIZE.unpack_from(payload, start + n * _SIZE.size)[0] for n in range(count)]
            total = start + count * _SIZE.size + sum(self._sizes)
            self._frames = max(self._frames, math.ceil(total / CHUNK))
            self._whole = payload if total == len(payload) else memoryview(bytearray(total))
        if payload.obj is not self._whole.obj:
            if len(place := self.room(0, len(payload))) != len(payload):
                raise ProtocolError("a frame of another host has more bytes than it announced")
            place[:] = payload
        self._came += 1

    @property
    def complete(self) -> bool:
        """Whether everything has come; it has been sent, too, since the other has as many frames."""
        return self._came == self._frames and self._sent == self._frames

    def buffers(self) -> list[memoryview]:
        """Return what has come."""
        start, found = _COUNT.size + len(self._sizes) * _SIZE.size, []
        for size in self._sizes:
            found.append(self._whole[start : start + size])
            start += size
        return found


class HostDoor:
    """The leader's end of the door, for one cell.

    Parameters
    ----------
    fd : int
        The socket; it stays the caller's.
    """

    def __init__(self, fd: int, place: WorldPlace) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))
        self._socket.setblocking(False)
        self._poll = select.poll()
        self._hosts = [host for host in range(len(place.hosts)) if host != place.index]
        self._inbox: dict[int, deque[tuple[int, memoryview]]] = {host: deque() for host in self._hosts}
        self._outbox: deque[memoryview] = deque()
        self._head: tuple[int, int, int, int] | None = None
        """Of the frame whose payload is being read; None: of none, the next head is."""
        self._streams: dict[int, _Stream] = {}
        """Of the exchange that was begun last."""
        self._part = self._missing = memoryview(bytearray(DOOR_HEAD.size))
        """The head or payload that comes next, and what has not come of it."""
        self._number = 0
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
        self._number += 1
        streams = self._streams = {host: _Stream(outgoing.get(host, ())) for host in self._hosts}
        while (missing := self._advance(streams)) or self._outbox:
            check(missing)  # behind what has come: a host that sent its part may fail afterwards
            self._move()
        return {host: stream.buffers() for host, stream in streams.items()}

    def _advance(self, streams: Mapping[int, _Stream]) -> list[int]:
        """Take what has come, send what may be sent; return the hosts of which something is missing."""
        for host, stream in streams.items():
            inbox = self._inbox[host]
            while inbox and not stream.complete:
                number, payload = inbox.popleft()
                if number != self._number:
                    raise ProtocolError(f"a frame of exchange {number} came in exchange {self._number}")
                stream.take(payload)
            while stream.may_send():
                parts = stream.next_frame()
                head = DOOR_HEAD.pack(host, DoorKind.DATA, sum(map(len, parts)), self._number)
                self._outbox.extend([memoryview(head), *(part for part in parts if part)])
        return [host for host, stream in streams.items() if not stream.complete]

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

    def _expect(self, nbytes: int) -> None:
        """Have so many bytes read next, straight into their place if that is known."""
        place = memoryview(b"")
        if self._head is not None and self._head[1] == DoorKind.DATA and self._head[3] == self._number:
            host = self._head[0]
            place = self._streams[host].room(len(self._inbox[host]), nbytes)
        self._part = self._missing = place if len(place) == nbytes else memoryview(bytearray(nbytes))

    def _take_part(self) -> None:
        """Take a head or a payload that has come whole."""
        if self._head is None:
            self._head = DOOR_HEAD.unpack(self._part)
            self._expect(self._head[2])
            if self._missing:
                return
        host, kind, _, number = self._head
        if kind == DoorKind.DATA:
            self._inbox[host].append((number, self._part))
        else:
            self.ended.setdefault(host, DoorKind(kind))
        self._head = None
        self._expect(DOOR_HEAD.size)

    @staticmethod
    def _gone() -> ChannelClosedError:
        return ChannelClosedError("the node of this host, which carries operations over hosts, is gone")

    def close(self) -> None:
        """Close this end (idempotent)."""
        self._socket.close()
