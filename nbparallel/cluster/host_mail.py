"""Mail: messages between ranks of different hosts, carried by the nodes of these hosts.

The control segment of a host has rings and words of all ranks of the session.  Those of other hosts' ranks
are copies there, which the node keeps up to date, so that ranks send, match, wait and find deadlocks as on
one machine::

    a ring     what a rank here puts in for one on another host is written there, into the same ring
    words      what a rank here says of itself: what it waits for, how far it has read and written its rings,
               whether it has left the cell; `SLICE_MS` after a change, `PROMPT_MS` while messages move
    contents   of large messages stay with the sender until the receiver asks for them; then they come in
               pieces, into memory that the receiver has made

A ring holds what its reader has not taken, on both hosts: so the sender waits for room as on one machine, and
a node never waits to pass on what has come.  A piece waits for no ring, and a ring for one piece at most.

Words of one rank are sent as they are at one moment, behind what it put into rings until then.  So a deadlock
is certain wherever it is seen: let all ranks of a set wait, each at a moment of its own, and what each ring
among them got be what was taken.  The first of them that went on after its moment did so by a message that
was not in that ring: then its sender had gone on before it.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nbparallel.cluster.host_messages import STAMP, FailureNotice, HostClock
from nbparallel.cluster.host_place import LINK, HostPlace
from nbparallel.cluster.rank_mail import POKE
from nbparallel.distributed.runtime.waiting import Waiter
from nbparallel.errors import ProtocolError, SegmentLostError, label_of_rank, rank_list
from nbparallel.wire.control import ControlView, FailureKind, order_stores
from nbparallel.wire.control_layout import ARRIVE, LEFT, LINE, SLOT
from nbparallel.wire.frames import DOOR_HEAD, MailKind
from nbparallel.wire.system import roomy_pair, send_all

SLICE_MS, PROMPT_MS = 50, 2
"""Longest time until a change of words is sent; and while messages move."""
CLOCK_SECONDS = 0.2
"""How long a very short cell waits at its end until this host's clock was compared."""
TOLD_SECONDS = 3.0
"""How long the reason may take to come from the notebook after a link was closed."""
_RING, _PAIR = struct.Struct("<HHQ"), struct.Struct("<HHI")
"""Source, destination, and where in the ring what follows begins, or the number of a content."""
CHUNK = 1 << 20
"""Most bytes of a piece."""
_MOST_QUESTION = 1 << 16
_STATE_WORDS = 2 * LINE
"""Of a rank's slot, which come first in its row."""


class HostMail:
    """A node's side of the messages of one task.

    `open_door` has frames carried that come through a socket, which it takes a copy of; `failure` returns
    what went wrong first on this host, and ``attach(handle)`` the bytes of a packed handle's array;
    `failed` is called with what went wrong on another host: waits for its ranks end.  Through `pokes` ranks
    send `POKE`, or a question for the content of a message.
    """

    def __init__(
        self, place: HostPlace, control: ControlView, former: HostMail | None,
        open_door: Callable[[socket.socket], None], failure: Callable[[], FailureNotice | None],
        attach: Callable[[bytes], npt.NDArray[Any]], failed: Callable[[FailureNotice], None],
    ) -> None:  # fmt: skip
        self._place, self._view, self._failure = place, control, failure
        self._attach, self._failed = attach, failed
        self._leaving = deque[tuple[int, bytes, memoryview]]()
        """Contents that are being sent: the host, the pair, what is left."""
        self._answers = deque[tuple[int, MailKind, bytes]]()
        """For hosts that have asked: notices about contents that are gone, and when a question came."""
        self.clock = HostClock(is_first=not place.index)
        self._coming: dict[tuple[int, ...], tuple[npt.NDArray[Any], int]] = {}
        """Contents that are coming, by pair, and how much has."""
        self._changed, self._left = threading.Condition(), set(range(len(place.hosts))) - {place.index}
        """Hosts whose ranks may still send."""
        self._unlinked: dict[int, float] = {}
        """Hosts to which there is no link any more, and since when."""
        self._told = self._stopped = self._moving = False
        self._ended = math.inf
        """When the ranks of this host have ended the task."""
        self.error = ""
        """Why messages cannot be carried any more; empty: they are."""
        self._words = np.frombuffer(control.map, np.uint64)
        layout, everyone, here = control.layout, range(place.world_size), place.ranks
        away = self._away = [rank for rank in everyone if rank not in here]
        self._proxies = {rank: Waiter(control, rank, spin=False) for rank in away}
        self._rows = {
            rank: np.array([
                *range(layout.rank_word(rank, SLOT), layout.rank_word(rank, SLOT) + _STATE_WORDS),
                layout.rank_word(rank, LEFT), layout.rank_word(rank, ARRIVE),
                *(layout.head_word(source, rank) + i for i in range(3) for source in everyone),
                *(layout.tail_word(rank, other) for other in everyone),
            ])
            for rank in everyone
        }  # fmt: skip
        self._tails = np.array([[layout.tail_word(source, other) for other in away] for source in here])
        self._sent = np.zeros(self._tails.shape, np.uint64)
        """How much of each ring to another host has been sent."""
        if former is not None and former._view is control:
            self._sent = former._sent
        self._taken = np.ones(self._rows[0].size, bool)
        """Which words of a row are taken over as they are."""
        self._taken[: _STATE_WORDS + 1] = False
        self._taken[-place.world_size :] = [other not in here for other in everyone]  # others come with bytes
        self._door, theirs = roomy_pair()
        self._questions, self.pokes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            open_door(theirs)
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name="nbparallel-mail", daemon=True)
            for work in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        label_of_rank.set(self._place.label_of)
        try:
            work()
        except Exception as error:  # noqa: BLE001  ranks of all hosts would wait forever
            if not self._stopped:
                self.error = self.error or f"messages between hosts: {type(error).__name__}: {error}"
                self._failed(FailureNotice(FailureKind.PEER, self._away[0], self.error))

    # -- sending -------------------------------------------------------------------------------------------

    def _send(self, host: int, kind: MailKind, *parts: bytes | memoryview) -> None:
        send_all(self._door, DOOR_HEAD.pack(host, kind, sum(map(len, parts))), *parts)

    def _to_all(self, kind: MailKind, content: bytes = b"") -> None:
        for host in range(len(self._place.hosts)):
            if host != self._place.index:
                self._send(host, kind, content)

    def _write(self) -> None:
        poll, wait, sent, sent_at, told = select.poll(), SLICE_MS, b"", 0.0, False
        poll.register(self._questions, select.POLLIN)
        while not self._stopped:
            if poll.poll(0 if self._leaving else wait):
                self._hear()
                self._moving = True
            wait, self._moving = PROMPT_MS if self._moving else min(2 * wait, SLICE_MS), False
            now = time.monotonic()
            # The first host answers until this one has sent that it ended.
            last = not self._told and now >= self._ended + CLOCK_SECONDS * (not self.clock.known)
            if self._place.index and (question := self.clock.ask()):
                self._send(0, MailKind.CLOCK, question)
            words = self._own_words()
            if not told and (notice := self._failure()) is not None:
                told = True
                failed = pickle.dumps(notice)
                self._to_all(MailKind.FAILED, failed)  # before the words that others left for it
            while self._answers:
                asker, kind, answer = self._answers.popleft()
                self._send(asker, kind, answer, STAMP.pack(time.monotonic_ns()) * (kind == MailKind.CLOCK))
            self._forward()
            if words != sent and (last or now - sent_at >= PROMPT_MS / 1000):
                self._to_all(MailKind.WORDS, words)
                sent, sent_at = words, now
            if last:
                self._to_all(MailKind.ENDED)
                with self._changed:
                    self._told = True
                    self._changed.notify()
            for host, since in list(self._unlinked.items()):
                if now - since > TOLD_SECONDS:
                    ranks = self._place.ranks_of(host)
                    text = f"{rank_list(ranks)} cannot be reached: {LINK}"
                    self._failed(FailureNotice(FailureKind.PEER, ranks[0], text))
            if self._leaving:
                host, pair, content = self._leaving.popleft()
                self._send(host, MailKind.PIECE, pair, content[:CHUNK])
                if len(content) > CHUNK:
                    self._leaving.append((host, pair, content[CHUNK:]))

    def _own_words(self) -> bytes:
        """Return the words of this host's ranks, each's of one moment; a rank that moves is computing."""
        rows = []
        for rank in self._place.ranks:
            row, again = self._words[self._rows[rank]], self._words[self._rows[rank]]
            row[0] |= np.uint64((row != again).any())  # an odd version
            rows.append(row)
        order_stores()
        return np.concatenate(rows).tobytes()

    def _forward(self) -> None:
        """Send what ranks have put into rings to other hosts."""
        tails = self._words[self._tails]
        order_stores()
        for i, j in np.argwhere(tails != self._sent).tolist():
            source, destination = self._place.ranks[i], self._away[j]
            start, end = int(self._sent[i, j]), int(tails[i, j])
            head, parts = _RING.pack(source, destination, start), self._ring(source, destination, start, end)
            self._send(self._place.index_of(destination), MailKind.RING, head, *parts)
            self._sent[i, j] = end
            self._moving = True

    def _ring(self, source: int, destination: int, start: int, end: int) -> tuple[memoryview, memoryview]:
        """Return where a ring holds the bytes from one position to another: around its end in two parts."""
        layout, octets = self._view.layout, self._view.octets
        begin, offset = layout.ring_byte(source, destination), start % layout.ring_capacity
        first = min(end - start, layout.ring_capacity - offset)
        return octets[begin + offset : begin + offset + first], octets[begin : begin + end - start - first]

    def _hear(self) -> None:
        """Take what ranks of this host and the other thread have asked for."""
        while True:
            try:
                question = self._questions.recv(_MOST_QUESTION, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            if not question:
                raise EOFError
            if question[:1] == POKE:
                continue
            source, rank, number, there, here = pickle.loads(question)
            self._coming[source, rank, number] = self._attach(here), 0
            asked = _PAIR.pack(source, rank, number)
            self._send(self._place.index_of(source), MailKind.FETCH, asked, there)

    # -- receiving -----------------------------------------------------------------------------------------

    def _read(self) -> None:
        head = memoryview(bytearray(DOOR_HEAD.size))
        while True:
            self._fill(head)
            host, kind, nbytes = DOOR_HEAD.unpack(head)
            if kind == MailKind.CLOSED:
                self._unlinked.setdefault(host, time.monotonic())
                self._host_ended(host)
            elif kind == MailKind.PIECE:
                self._take_piece(nbytes)
            else:
                content = memoryview(bytearray(nbytes))
                self._fill(content)
                self._take(host, kind, content)

    def _fill(self, into: memoryview) -> None:
        while into:
            count = self._door.recv_into(into)
            if not count:
                raise EOFError
            into = into[count:]

    def _take(self, host: int, kind: int, content: memoryview) -> None:
        if kind == MailKind.RING:
            source, destination, start = _RING.unpack_from(content)
            self._take_ring(source, destination, start, content[_RING.size :])
        elif kind == MailKind.WORDS:
            rows = np.frombuffer(content, np.uint64).reshape(-1, self._rows[0].size)
            for rank, row in zip(self._place.ranks_of(host), rows, strict=True):
                self._take_words(rank, row)
        elif kind == MailKind.FETCH:
            source, rank, _ = _PAIR.unpack_from(content)
            asker = self._place.index_of(rank)
            try:
                array = self._attach(bytes(content[_PAIR.size :]))
            except SegmentLostError:
                text = f"{rank_list([source])} died before {rank_list([rank])} had all that it had sent"
                notice = FailureNotice(FailureKind.PEER, source, text)
                self._answers.append((asker, MailKind.FAILED, pickle.dumps(notice)))
            else:
                self._leaving.append((asker, bytes(content[: _PAIR.size]), array.data))
            self._wake()
        elif kind == MailKind.FAILED:
            self._failed(pickle.loads(content))
        elif kind == MailKind.CLOCK:
            if len(content) == STAMP.size:
                self._answers.append((host, MailKind.CLOCK, bytes(content) + STAMP.pack(time.monotonic_ns())))
            else:
                self.clock.take(content)
            self._wake()
        elif kind == MailKind.ENDED:
            self._host_ended(host)

    def _take_ring(self, source: int, destination: int, start: int, content: memoryview) -> None:
        words, end = self._view.words, start + len(content)
        tail = self._view.layout.tail_word(source, destination)
        if words[tail] != start:
            raise ProtocolError(f"rank {source} and rank {destination} have rings of different epochs")
        first, second = self._ring(source, destination, start, end)
        first[:], second[:] = content[: len(first)], content[len(first) :]
        self._proxies[source].announce_to(destination, words, tail, end)
        self._moving = True
        self._wake()

    def _take_words(self, rank: int, row: npt.NDArray[np.uint64]) -> None:
        """Take over a row of another host's rank: its version behind its slot, and that it has left last."""
        places, keep = self._rows[rank], self._taken
        words, version, left = self._words, places[0], places[_STATE_WORDS]
        words[version] = row[0] | np.uint64(1)
        order_stores()
        words[places[1:_STATE_WORDS]] = row[1:_STATE_WORDS]
        words[places[keep]] = row[keep]
        order_stores()
        words[version] = row[0]
        words[left] = row[_STATE_WORDS]
        proxy = self._proxies[rank]
        proxy.fence()
        proxy.ring()

    def _take_piece(self, nbytes: int) -> None:
        head = memoryview(bytearray(_PAIR.size))
        self._fill(head)
        pair = source, rank, _ = _PAIR.unpack(head)
        memory, at = self._coming[pair]
        end = at + nbytes - _PAIR.size
        self._fill(memory.data[at:end])
        if end < memory.size - 1:
            self._coming[pair] = memory, end
            return
        del self._coming[pair]
        self._proxies[source].announce_to(rank, memory.data, -1, 1)  # the byte behind it

    # -- the end -------------------------------------------------------------------------------------------

    def _host_ended(self, host: int) -> None:
        with self._changed:
            self._left.discard(host)
            self._changed.notify()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it has not taken what woke it before
            self.pokes.send(POKE, socket.MSG_DONTWAIT)

    def finish(self, abandoned: Callable[[], bool]) -> list[tuple[int, int]]:
        """Send what is left, and serve other hosts until their ranks have ended the task as well.

        Returns the pairs of a rank of another host and one of this: what is in their rings stays there.
        """
        self._ended = time.monotonic()
        self._wake()
        with self._changed:
            writes = self._threads[0].is_alive
            while ((self._left and not self.error) or (not self._told and writes())) and not abandoned():
                self._changed.wait(SLICE_MS / 1000)
        return [(source, rank) for source in self._away for rank in self._place.ranks]

    def close(self) -> None:
        """End both threads (idempotent)."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self.pokes.close()
        for thread in self._threads:
            thread.join()
        self._door.close()
        self._questions.close()
        self._leaving.clear()
        self._coming.clear()
        self._words = np.empty(0, np.uint64)  # which had the segment mapped
