"""A rank's side of messages to and from ranks of other hosts; the node carries them (`host_mail`)."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
from typing import Any

import numpy as np

from nbparallel.distributed.point_to_point.ring import Envelope
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, decode_handle, encode_handle
from nbparallel.errors import HostLostError, InternalError
from nbparallel.sharing.memory.array_layout import rebuild_dtype

POKE = b"\0"
"""To the node: a ring has something for another host; what is no poke asks for the content of a message."""


class RankMail:
    """One rank's way to the node of its host; open in cells in which messages cross hosts."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._socket: socket.socket | None = None

    def open(self, fd: int) -> None:
        """Use a socket, which stays the caller's, until `close`."""
        self._socket = socket.socket(fileno=os.dup(fd))

    def close(self) -> None:
        """Close it (idempotent)."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def is_open(self) -> bool:
        """Whether messages cross hosts now."""
        return self._socket is not None

    def announce_to(self, reader: int, words: memoryview, word: int, value: int) -> None:
        """Write one of this rank's words, and have the node look; as `Waiter.announce_to`."""
        fence = self._context.waiter.fence
        fence()
        words[word] = value
        fence()
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has a poke already that it has not read; or it ends
                self._socket.send(POKE, socket.MSG_DONTWAIT)

    def fetch(self, message: Envelope) -> AnyArray:
        """Return the content of a message, as bytes in shared memory, when it has come from its host."""
        context, there = self._context, decode_handle(message.body)
        if self._socket is None:
            raise InternalError("the content of a message is on another host, and no cell on all ranks runs")
        memory = context.store.empty(math.prod(there.shape) * rebuild_dtype(there.dtype).itemsize, np.uint8)
        here = context.store.handle(memory, writable=True)
        if here is None:
            raise InternalError("the store's own array is not shared")
        source, rank, words = message.source, context.rank, context.words
        word = fetched_word(context.view.layout, source, rank)
        number = words[word] + 1
        question = pickle.dumps((source, rank, bytes(message.body), encode_handle(here)))
        try:
            self._socket.send(question)
        except OSError as error:
            raise HostLostError("the node of this host, which carries messages, is gone") from error
        context.waiter.until(lambda: words[word] >= number, source, check=self._check)
        return memory

    def _check(self) -> None:
        self._context.check_peers()
        if (lost := self._context.peers.lost()) is not None:
            raise self._context.mark_failed(lost)


def fetched_word(layout: Any, source: int, rank: int) -> int:
    """Return the word that counts contents which came from a rank of another host, by its node.

    On one machine it counts chunks of a stream, which no pair of ranks on two hosts has.
    """
    return int(layout.tail_word(source, rank)) + 1
