"""Unfinished: what has to be done, in order; it stays in its queue until all of it has been done."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

T = TypeVar("T")


class Unfinished(deque[T]):
    """A queue for work that an interrupt, a signal handler or a user's ``__del__`` may break into anywhere.

    ``append`` is the deque's own: see `mapping`, note [leases].
    """

    def first(self) -> T | None:
        """Return what is to be done next, None if there is nothing."""
        try:
            return self[0] if self else None
        except IndexError:
            return None

    def finish(self, item: T) -> None:
        """Take the first one off, unless somebody who came in between has done so."""
        try:
            if self[0] is item:
                self.popleft()
        except IndexError:
            pass
