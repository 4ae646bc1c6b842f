"""Polling that survives a want of memory (poll(2): ENOMEM): whoever waits must not die of it."""

from __future__ import annotations

import errno
import select
import time

PAUSE_SECONDS = 0.001
"""Between two tries."""
TRIES = 100
"""Then nothing is there, as far as anybody can tell."""


def ready(poll: select.poll, milliseconds: float | None = None) -> list[tuple[int, int]]:
    """Return what `poll.poll` does, trying again while the system has no memory for the question."""
    for _ in range(TRIES):
        try:
            return poll.poll(milliseconds)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            time.sleep(PAUSE_SECONDS)
    return []
