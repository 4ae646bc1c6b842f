"""Sweeping: the supervisor's sweep, of names and then of processes, one small step between other work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any


class Sweeping:
    """A sweep that begins with `begin` and tells `tell` what it removed, as JSON, when it is over."""

    def __init__(self, tell: Callable[[bytes], None]) -> None:
        self._tell = tell
        self._steps: Iterator[Any] | None = None
        self._found: list[Any] = []

    @property
    def pending(self) -> bool:
        """Whether there is more to do."""
        return self._steps is not None

    def begin(self) -> None:
        """Make the first step the next thing to do."""
        # Imported here: the template has been started by now, and takes longer than this.
        from nbparallel.supervisor import sweep

        self._steps = sweep.steps(remove=sweep.unlink_aside)

    def step(self) -> None:
        """Look at one name, and remove it if its owner is dead; nothing if it is over."""
        if self._steps is None:
            return
        try:
            self._found.append(next(self._steps))
            return
        except StopIteration:
            self._steps = None
        except OSError:
            self._steps = None  # a directory that went away under us: the next sweep looks again
        from nbparallel.supervisor import orphans, sweep

        sentences = [sweep.report_of(self._found).sentence, orphans.orphans_text(orphans.end_orphans())]
        self._found = []
        self._tell(json.dumps({"sentences": [sentence for sentence in sentences if sentence]}).encode())
