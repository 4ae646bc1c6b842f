"""Liveness of the supervisor, which writes the death records that end a wait for a dead rank.

A session's ranks exit with their supervisor.  Ranks of a world that other programs started do not, and
without a supervisor a wait for a dead rank would never end.
"""

from __future__ import annotations

import os
import select

from nbparallel.errors import NbParallelError, SupervisorDiedError
from nbparallel.wire.identity import Process, process_state
from nbparallel.wire.system import ready


class SupervisorLiveness:
    """The liveness of a world's supervisor, by its pidfd, which this owns."""

    def __init__(self, pidfd: int, members: tuple[Process, ...]) -> None:
        self._pidfd, self._members = pidfd, members
        self._poll = select.poll()
        self._poll.register(pidfd, select.POLLIN)

    def lost(self) -> NbParallelError | None:
        """Return the error that ends every wait if it has ended: no death records are written any more."""
        if not ready(self._poll, 0):
            return None
        return SupervisorDiedError(
            "the supervisor process of this world was ended, so that a dead rank would not be noticed: leave "
            "with destroy_process_group(), and join a new world if the others do as well"
        )

    def vanished(self, rank: int) -> bool:
        """Return whether a rank has ended, if the supervisor has, which writes no record of that any more."""
        if not ready(self._poll, 0):
            return False
        process = self._members[rank]
        state = process_state(process.pid)
        return state is None or state.letter in "ZX" or state.started != process.started

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self._pidfd)
