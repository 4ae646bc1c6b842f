"""A rank's side of messages to and from ranks of other hosts; the node carries them (`host_mail`).

First ranks of hosts exchange by messages what collectives need.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from nbparallel.cluster.host_place import LINK, HostPlace
from nbparallel.distributed.point_to_point.endpoints import Receiver, Sender
from nbparallel.distributed.point_to_point.packing import Envelope
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, decode_handle, encode_handle
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.errors import (
    CollectiveTimeoutError,
    HostLostError,
    InternalError,
    PeerFailedError,
)
from nbparallel.sharing.memory.array_layout import rebuild_dtype
from nbparallel.wire.control import Operation
from nbparallel.wire.frames import Octets

POKE = b"\0"
"""To the node: a ring has something for another host; what is no poke asks for the content of a message."""

TOGETHER_NBYTES = 16 << 10
"""What a leader sends to another travels in one message up to this size."""


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
        memory = context.store.empty(
            math.prod(there.shape) * rebuild_dtype(there.dtype).itemsize + 1, np.uint8
        )
        memory[-1] = 0
        here = context.store.handle(memory, writable=True)
        assert here is not None, "the store's own arrays are shared"
        self._asked += 1
        question = pickle.dumps(
            (message.source, context.rank, self._asked, bytes(message.body), encode_handle(here))
        )
        try:
            self._socket.send(question)
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


class LeaderExchange:
    """What a host's first rank in a group exchanges with those of other hosts.

    Parameters
    ----------
    word : int
        The group of these messages; those of users are odd.
    """

    def __init__(
        self, context: RankContext, sender: Sender, receiver: Receiver, place: HostPlace, word: int = 2
    ) -> None:
        self._context, self._sender, self._receiver = context, sender, receiver
        self._place, self._word = place, word

    def of(self, word: int) -> LeaderExchange:
        """Return those for a group of users."""
        return LeaderExchange(self._context, self._sender, self._receiver, self._place, word ^ 1)

    def exchange(
        self,
        sent: Mapping[int, Sequence[Octets]],
        others: Mapping[int, list[int]],
        operation: Operation,
        waiting: Callable[..., WaitRecord],
    ) -> dict[int, list[memoryview]]:
        """Send other leaders their buffers, and return those of each; all leaders call it, equally often.

        Parameters
        ----------
        others : mapping
            By leader, the members on its host.
        operation : Operation
            The collective of which this is a step.
        waiting : callable
            Returns the record of a wait in that call: ``waiting(operation, awaited, peer=leader)``.
        """
        context, sender = self._context, self._sender
        strict, operations, sender.strict = sender.strict, context.operations, False
        try:
            for leader in others:
                self._send(leader, [memoryview(each).cast("B") for each in sent[leader]])
            wait = partial(waiting, operation)
            return {leader: self._take(leader, ranks, wait) for leader, ranks in others.items()}
        except PeerFailedError as error:
            if LINK not in str(error):
                raise
            reason = f"{operation.name} needs {str(error).replace(' cannot be reached: ', ', and ')}"
            host = self._place.index_of(error.rank)
            name, ranks = self._place.hosts[host], tuple(self._place.ranks_of(host))
            raise HostLostError(reason, host=name, ranks=ranks, reason=LINK) from error
        finally:
            sender.strict, context.operations = strict, operations

    def _send(self, leader: int, buffers: Sequence[memoryview]) -> None:
        """Send buffers: short ones in one message, else each in one."""
        if sum(map(len, buffers)) <= TOGETHER_NBYTES:
            messages: Sequence[Any] = [list(map(bytes, buffers))]
        else:
            messages = [len(buffers), *(np.frombuffer(each, np.uint8) for each in buffers)]
        for message in messages:
            self._sender.send(message, leader, 0, view=False, deadline_ns=None, group=self._word)

    def _take(self, leader: int, ranks: list[int], waiting: Callable[..., WaitRecord]) -> list[memoryview]:
        ring = self._receiver.rings[leader]
        find = partial(self._receiver.unexpected.find, leader, 0, self._word)

        def wait() -> WaitRecord:
            return waiting(lambda: [] if ring.has_message() else ranks, peer=leader)

        if find() is None:
            self._receiver.wait_for(ring.has_message, leader, [leader], wait, find)
        receive = partial(self._receiver.recv, None, leader, 0, None, group=self._word)
        came, _ = receive()
        if isinstance(came, int):
            came = [receive()[0] for _ in range(came)]
        return [memoryview(each) for each in came]
