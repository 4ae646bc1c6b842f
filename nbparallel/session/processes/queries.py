"""Asking idle ranks which names they have, or how code may go on; a busy one is never waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from nbparallel.session.processes.rank_handle import RankHandle
from nbparallel.wire.frames import Frame, Kind
from nbparallel.wire.inspection import CompletionRequest, Completions, LedgerRow, NamespaceReport, read_page

PATIENCE_SECONDS = 1.0
"""An idle rank answers within a millisecond; one that does not is stopped, or has just become busy."""
SLICE_SECONDS = 0.05
"""Between two looks whether those who have not answered still live."""


class RankQueries:
    """One question at a time, from any thread but the one that takes the answers."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._changed = threading.Condition()
        self._number = 0
        self._answers: dict[int, Any] = {}

    def ask(
        self, handles: Sequence[RankHandle], patience: float = PATIENCE_SECONDS
    ) -> dict[int, NamespaceReport]:
        """Return what the idle ones among the ranks say within `patience` seconds, by rank."""
        return self._ask(handles, patience, Kind.LOOK, lambda number: number)

    def complete(self, handle: RankHandle, text: str, cursor: int, patience: float) -> Completions:
        """Return how an idle rank's shell would complete `text`; nothing if it does not answer in time."""
        answers: dict[int, Completions] = self._ask(
            [handle], patience, Kind.COMPLETE, lambda number: CompletionRequest(number, text, cursor)
        )
        return answers.get(handle.rank, Completions(0, ()))

    def _ask(
        self, handles: Sequence[RankHandle], patience: float, kind: Kind, question: Callable[[int], Any]
    ) -> dict[int, Any]:
        deadline = time.monotonic() + patience
        if not self._one_at_a_time.acquire(timeout=patience):
            return {}
        try:
            with self._changed:
                self._number += 1
                self._answers = {}
            asked = [h for h in handles if h.usable and not h.busy and h.alive]
            asked = [h for h in asked if h.offer(kind, question(self._number))]
            with self._changed:
                while any(h.alive and h.rank not in self._answers for h in asked):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(min(left, SLICE_SECONDS))
                return dict(self._answers)
        finally:
            self._one_at_a_time.release()

    def take(self, rank: int, answer: NamespaceReport | Completions) -> None:
        """Take an answer; one to a question that nobody waits for any more is dropped."""
        with self._changed:
            if answer.number == self._number:
                self._answers[rank] = answer
                self._changed.notify_all()


class LedgerQuery:
    """One question at a time, from any thread but the one that takes the answers.

    Parameters
    ----------
    send : callable
        Sends the question with this number.
    gone : callable
        Whether nobody will answer any more.
    """

    def __init__(self, send: Callable[[int], None], gone: Callable[[], bool]) -> None:
        self._send, self._gone = send, gone
        self._one_at_a_time = threading.Lock()
        self._number = 0
        self._rows: list[LedgerRow] = []
        self._answered = threading.Event()

    def ask(self, patience: float = PATIENCE_SECONDS) -> tuple[LedgerRow, ...] | None:
        """Return the ledger, or None if there is no answer within `patience` seconds."""
        deadline = time.monotonic() + patience
        if not self._one_at_a_time.acquire(timeout=patience):
            return None
        try:
            self._answered.clear()
            self._rows = []
            self._number += 1
            self._send(self._number)
            while not self._answered.wait(SLICE_SECONDS):
                if self._gone() or time.monotonic() >= deadline:
                    return None
            return tuple(self._rows)
        finally:
            self._one_at_a_time.release()

    def take(self, frame: Frame) -> None:
        """Take a page of the answer; one to a question that nobody waits for any more is dropped."""
        if frame.sequence != self._number:
            return
        rows, last = read_page(frame.payload)
        self._rows += rows
        if last:
            self._answered.set()
