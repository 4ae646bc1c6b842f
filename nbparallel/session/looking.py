"""Asking idle ranks which names they have; a busy one is never waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from nbparallel.session.rank_handle import RankHandle
from nbparallel.wire.frames import Kind
from nbparallel.wire.sighting import Sighting

PATIENCE_SECONDS = 1.0
"""An idle rank answers within a millisecond; one that does not is stopped, or has just become busy."""
SLICE_SECONDS = 0.05
"""Between two looks whether those who have not answered still live."""


class Looking:
    """One question at a time, from any thread but the one that takes the answers."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._changed = threading.Condition()
        self._number = 0
        self._answers: dict[int, Sighting] = {}

    def ask(self, handles: Sequence[RankHandle], patience: float = PATIENCE_SECONDS) -> dict[int, Sighting]:
        """Return what the idle ones among the ranks say within `patience` seconds, by rank."""
        deadline = time.monotonic() + patience
        if not self._one_at_a_time.acquire(timeout=patience):
            return {}
        try:
            with self._changed:
                self._number += 1
                self._answers = {}
            asked = [h for h in handles if h.usable and not h.busy and h.alive]
            asked = [h for h in asked if h.offer(Kind.LOOK, self._number)]
            with self._changed:
                while any(h.alive and h.rank not in self._answers for h in asked):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(min(left, SLICE_SECONDS))
                return dict(self._answers)
        finally:
            self._one_at_a_time.release()

    def take(self, rank: int, sighting: Sighting) -> None:
        """Take an answer; one to a question that nobody waits for any more is dropped."""
        with self._changed:
            if sighting.number == self._number:
                self._answers[rank] = sighting
                self._changed.notify_all()
