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
from typing import Any, NamedTuple

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
    NbParallelError,
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
        self._asked: dict[int, int] = {}
        """Source -> number of the last content that was asked for."""

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

    def fetch(self, message: Envelope, deadline_ns: int | None) -> AnyArray:
        """Return the content of a message, as bytes in shared memory, when it has come from its host.

        After a time-out it can be fetched again.
        """
        context, there = self._context, decode_handle(message.body)
        if self._socket is None:
            raise InternalError("the content of a message is on another host, and no cell on all ranks runs")
        memory = context.store.empty(math.prod(there.shape) * rebuild_dtype(there.dtype).itemsize, np.uint8)
        here = context.store.handle(memory, writable=True)
        if here is None:
            raise InternalError("the store's own array is not shared")
        source, rank, words = message.source, context.rank, context.words
        word = fetched_word(context.view.layout, source, rank)
        # one that was left before its content had come still counts: what comes of it is not this one's
        number = self._asked[source] = max(words[word], self._asked.get(source, 0)) + 1
        question = pickle.dumps((source, rank, number, bytes(message.body), encode_handle(here)))
        try:
            self._socket.send(question)
        except OSError as error:
            raise HostLostError("the node of this host, which carries messages, is gone") from error
        context.waiter.until(
            lambda: words[word] >= number, source, check=lambda: self._check(source, deadline_ns)
        )
        return memory

    def _check(self, source: int, deadline_ns: int | None) -> None:
        if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
            raise CollectiveTimeoutError(
                f"recv: timed out while a message of rank {source} was coming from its host; "
                "another `recv` still receives it"
            )
        self._context.check_peers([source] if self._context.cell.go_on else None)
        if (lost := self._context.peers.lost()) is not None:
            raise self._context.mark_failed(lost)


def fetched_word(layout: Any, source: int, rank: int) -> int:
    """Return the word that counts contents which came from a rank of another host, by its node.

    On one machine it counts chunks of a stream, which no pair of ranks on two hosts has.
    """
    return int(layout.tail_word(source, rank)) + 1


class ExchangeCall(NamedTuple):
    """The call of a collective of which an exchange is a step."""

    operation: Operation
    line: int
    until: int | None
    """When it times out."""
    explain: Callable[[list[int]], NbParallelError]
    """Returns the error when these ranks have finished the cell without this call."""


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
        self, sent: Mapping[int, Sequence[Octets]], others: Mapping[int, list[int]], call: ExchangeCall
    ) -> dict[int, list[memoryview]]:
        """Send other leaders their buffers, and return those of each; all leaders call it, equally often.

        Parameters
        ----------
        others : mapping
            By leader, the members on its host.
        """
        context, sender = self._context, self._sender
        strict, operations, sender.strict = sender.strict, context.operations, False
        try:
            for leader in others:
                self._send(leader, [memoryview(each).cast("B") for each in sent[leader]])
            return {leader: self._take(leader, ranks, call) for leader, ranks in others.items()}
        except PeerFailedError as error:
            if LINK not in str(error):
                raise
            reason = f"{call.operation.name} needs {str(error).replace(' cannot be reached: ', ', and ')}"
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

    def _take(self, leader: int, ranks: list[int], call: ExchangeCall) -> list[memoryview]:
        ring = self._receiver.rings[leader]
        find = partial(self._receiver.unexpected.find, leader, 0, self._word)

        def wait() -> WaitRecord:
            awaited = lambda: [] if ring.has_message() else ranks  # noqa: E731
            operation, line, until, explain = call
            return WaitRecord(operation, awaited, explain, line, peer=leader, deadline_ns=until)

        if find() is None:
            self._receiver.wait_for(ring.has_message, leader, [leader], wait, find)
        receive = partial(self._receiver.recv, None, leader, 0, None, group=self._word)
        came, _ = receive()
        if isinstance(came, int):
            came = [receive()[0] for _ in range(came)]
        return [memoryview(each) for each in came]
