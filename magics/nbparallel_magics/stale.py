"""The sweep when the extension is loaded: it never makes the load wait for a disk."""

from __future__ import annotations

import os
import threading

from nbparallel.wire.owners import usual_places
from nbparallel.wire.segments import NAME_PREFIX

WAIT_SECONDS = 0.02
"""How long the load waits for a sweep, so that a short one is told at once; arbitrary."""


class LoadSweep:
    """Removes what dead sessions left, in a thread of its own if there seems to be anything.

    `sentence` says what was removed; empty as long as nothing has been, or it was taken.
    """

    def __init__(self) -> None:
        self.sentence = ""
        if any(map(_has_names, usual_places())):
            thread = threading.Thread(target=self._run, name="nbparallel-sweep", daemon=True)
            thread.start()
            thread.join(WAIT_SECONDS)

    def _run(self) -> None:
        from nbparallel.supervisor.sweep import sweep

        self.sentence = sweep().sentence

    def tell(self) -> None:
        """Print what was removed, once."""
        sentence, self.sentence = self.sentence, ""
        if sentence:
            print(sentence)  # noqa: T201  (it belongs under the cell that runs)


def _has_names(directory: str) -> bool:
    try:
        return any(name.startswith(NAME_PREFIX) for name in os.listdir(directory))
    except OSError:
        return False
