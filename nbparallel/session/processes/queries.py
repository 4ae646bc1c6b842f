"""Queries: what idle ranks and the supervisor are asked beside the tasks, one query at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from nbparallel.session.interrupts import InterruptCounter
from nbparallel.session.processes.rank_handle import RankHandle
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.inspection import CompletionRequest, Completions, LedgerRow, NamespaceReport, read_report

PATIENCE_SECONDS = 1.0
"""Time for a reply: an idle rank takes a millisecond, a stopped or just busy one is not waited for."""
SLICE_SECONDS = 0.05
"""Longest wait before it is checked whether the processes that have not replied still live."""


class QueryChannel:
    """One query at a time and its replies, matched by number.

    Notes
    -----
    `ask` may be called from any thread but the one that calls `take`.  An interrupt raises when it returns.
    """

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._changed = threading.Condition()
        self._number = 0
        self._replies: list[Any] = []

    def ask(
        self, send: Callable[[int], None], incomplete: Callable[[list[Any]], bool], patience: float
    ) -> list[Any]:
        """Send a query under a new number; return the replies that came within `patience` seconds.

        Parameters
        ----------
        incomplete : callable
            Whether a reply is missing in the list of replies, and can still come.
        """
        deadline = time.monotonic() + patience
        with InterruptCounter():  # an interrupt must not come between a lock and its release
            if not self._one_at_a_time.acquire(timeout=patience):
                return []
            try:
                return self._ask(send, incomplete, deadline)
            finally:
                self._one_at_a_time.release()

    def _ask(
        self, send: Callable[[int], None], incomplete: Callable[[list[Any]], bool], deadline: float
    ) -> list[Any]:
        with self._changed:
            self._number += 1
            self._replies = []
        send(self._number)
        with self._changed:
            while incomplete(self._replies) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, SLICE_SECONDS))
            return list(self._replies)

    def take(self, number: int, reply: Any) -> None:
        """Take a reply; drop it if its query was given up."""
        with self._changed:
            if number == self._number:
                self._replies.append(reply)
                self._changed.notify_all()


class RankQueries:
    """Queries to idle ranks: their names, or completions; a busy rank is never waited for."""

    def __init__(self) -> None:
        self._channel = QueryChannel()

    def names(
        self, handles: Sequence[RankHandle], patience: float = PATIENCE_SECONDS
    ) -> dict[int, NamespaceReport]:
        """Return the names of those ranks that are idle and reply in time, by rank."""
        return self._ask(handles, patience, Kind.INSPECT, lambda number: number)

    def complete(self, handle: RankHandle, text: str, cursor: int, patience: float) -> Completions:
        """Return the completions of `text` in an idle rank's shell; none if it does not reply in time."""
        replies: dict[int, Completions] = self._ask(
            [handle], patience, Kind.COMPLETE, lambda number: CompletionRequest(number, text, cursor)
        )
        return replies.get(handle.rank, Completions(0, ()))

    def _ask(
        self, handles: Sequence[RankHandle], patience: float, kind: Kind, query: Callable[[int], Any]
    ) -> dict[int, Any]:
        asked: list[RankHandle] = []

        def send(number: int) -> None:
            idle = [handle for handle in handles if handle.usable and not handle.busy and handle.alive]
            asked.extend(handle for handle in idle if handle.offer(kind, query(number)))

        def incomplete(replies: list[Any]) -> bool:
            replied = {rank for rank, _ in replies}
            return any(handle.alive and handle.rank not in replied for handle in asked)

        return dict(self._channel.ask(send, incomplete, patience))

    def take(self, rank: int, reply: NamespaceReport | Completions) -> None:
        """Take a rank's reply."""
        self._channel.take(reply.number, (rank, reply))


class LedgerQuery:
    """The query for the supervisor's ledger.

    Parameters
    ----------
    send : callable
        Sends the query with this number.
    ended : callable
        Whether the supervisor has ended.
    """

    def __init__(self, send: Callable[[int], None], ended: Callable[[], bool]) -> None:
        self._send, self._ended = send, ended
        self._channel = QueryChannel()

    def ask(self, patience: float = PATIENCE_SECONDS) -> tuple[LedgerRow, ...] | None:
        """Return the rows of the ledger; None if they do not come within `patience` seconds."""
        replies = self._channel.ask(self._send, lambda found: not (found or self._ended()), patience)
        return replies[0] if replies else None

    def take(self, frame: Frame) -> None:
        """Take the reply."""
        self._channel.take(frame.sequence, read_report(frame.payload)[0])
