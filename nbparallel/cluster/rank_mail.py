"""A rank's side of messages to and from ranks of other hosts; the node carries them (`host_mail`)."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import time

import numpy as np

from nbparallel.distributed.point_to_point.packing import Envelope
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, decode_handle, encode_handle
from nbparallel.errors import CollectiveTimeoutError, HostLostError, InternalError
from nbparallel.sharing.memory.array_layout import rebuild_dtype

POKE = b"\0"
"""To the node: a ring has something for another host; what is no poke asks for the content of a message."""


class RankMail:
    """One rank's way to the node of its host; open in cells in which messages cross hosts."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._socket: socket.socket | None = None
        self._asked = 0
        self._coming: dict[tuple[int, int], AnyArray] = {}
        """By source and message, contents that were asked for; behind each a byte: whether it has come."""

    def open(self, fd: int) -> None:
        """Use a socket, which stays the caller's, until `close`."""
        self._socket = socket.socket(fileno=os.dup(fd))

    def close(self) -> None:
        """Close it (idempotent)."""
        self._coming.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def announce_to(self, reader: int, words: memoryview, word: int, value: int) -> None:
        """Write one of this rank's words, and have the node look; as `Waiter.announce_to`."""
        fence = self._context.waiter.fence
        fence()
        words[word] = value
        fence()
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has a poke already that it has not read; or it ends
                self._socket.send(POKE, socket.MSG_DONTWAIT)

    def fetch(self, message: Envelope, deadline_ns: int | None) -> None:
        """Wait until the content of a message has come from its host; after an error it still comes."""
        waiter, source, key = self._context.waiter, message.source, (message.source, message.number)
        if (memory := self._coming.get(key)) is None:
            memory = self._coming[key] = self._ask(message)
        waiter.until(lambda: bool(memory[-1]), source, check=lambda: self._check(source, deadline_ns))
        waiter.fence()  # the content after the byte that announced it

    def take(self, message: Envelope) -> AnyArray:
        """Return a content that has come, as bytes in shared memory."""
        return self._coming.pop((message.source, message.number))[:-1]

    def _ask(self, message: Envelope) -> AnyArray:
        """Have the content of a message sent; return the memory into which it comes."""
        context, there = self._context, decode_handle(message.body)
        if self._socket is None:
            raise InternalError("the content of a message is on another host, and no cell on all ranks runs")
        nbytes = math.prod(there.shape) * rebuild_dtype(there.dtype).itemsize
        memory = context.store.empty(nbytes + 1, np.uint8)
        memory[-1] = 0
        here = context.store.handle(memory, writable=True)
        assert here is not None, "the store's own arrays are shared"
        self._asked += 1
        question = message.source, context.rank, self._asked, bytes(message.body), encode_handle(here)
        try:
            self._socket.send(pickle.dumps(question))
        except OSError as error:
            raise HostLostError("the node of this host, which carries messages, is gone") from error
        return memory

    def _check(self, source: int, deadline_ns: int | None) -> None:
        self._context.check_peers([source] if self._context.cell.go_on else None)
        if (lost := self._context.peers.lost()) is not None:
            raise self._context.mark_failed(lost)
        if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
            raise CollectiveTimeoutError(
                f"recv: timed out while a message of rank {source} was coming from its host; "
                "another `recv` still receives it"
            )
