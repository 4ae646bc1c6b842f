"""Oversight: whether somebody still notices the death of a rank.

A session's ranks end with their supervisor.  Processes that somebody else started do not, and without it a
wait for a dead one would never end.
"""

from __future__ import annotations

import os
import select
from typing import Protocol

from nbparallel.errors import NbParallelError, SupervisorDiedError
from nbparallel.wire.identity import Process, process_state
from nbparallel.wire.system import ready


class LivenessCheck(Protocol):
    """Knows whether death words are still written."""

    def lost(self) -> NbParallelError | None:
        """Return why no wait makes sense any more; None: they are."""

    def vanished(self, rank: int) -> bool:
        """Return whether a rank has ended of which nobody can say so any more."""


class SupervisorLiveness:
    """Whether the world's supervisor lives; owns its pidfd."""

    def __init__(self, pidfd: int, members: tuple[Process, ...]) -> None:
        self._pidfd, self._members = pidfd, members
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    def lost(self) -> NbParallelError | None:
        """Return an error if it has ended."""
        if not ready(self._poll, 0):
            return None
        return SupervisorDiedError(
            "the supervisor process of this world was ended, so that a dead rank would not be noticed: leave "
            "with destroy_process_group(), and join a new world if the others do as well"
        )

    def vanished(self, rank: int) -> bool:
        """Return whether a rank's process has ended, if the supervisor has."""
        if not ready(self._poll, 0):
            return False
        process = self._members[rank]
        state = process_state(process.pid)
        return state is None or state.letter in "ZX" or state.started != process.started

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self._pidfd)
