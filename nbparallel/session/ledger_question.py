"""Asking the supervisor for its ledger: who holds which segment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from nbparallel.wire.frames import Frame
from nbparallel.wire.segments import LedgerRow, read_page

PATIENCE_SECONDS = 1.0
"""The supervisor answers within a millisecond; nobody's status waits longer than this for it."""
SLICE_SECONDS = 0.05
"""Between two looks whether the supervisor still lives."""


class LedgerQuestion:
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
