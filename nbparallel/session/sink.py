"""Where the output of a task goes while it runs."""

from __future__ import annotations

from typing import Any, Protocol


class OutputSink(Protocol):
    """Takes what ranks print and show.

    Called from the session's own thread, also after the task has ended (a thread that it started may print
    later): an implementation has to be safe to call from another thread, and quick.
    """

    def stream(self, rank: int, name: str, text: str) -> None:
        """Take text that `rank` wrote to `name` (``stdout`` or ``stderr``), in pieces as they came."""

    def display(
        self,
        rank: int,
        data: dict[str, Any],
        metadata: dict[str, Any],
        transient: dict[str, Any],
        update: bool,
    ) -> None:
        """Take a rich output as a mime bundle."""

    def result(self, rank: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Take the value of the last expression as a mime bundle."""

    def clear(self, rank: int, wait: bool) -> None:
        """Take a rank's ``clear_output``."""

    def note(self, text: str) -> None:
        """Take one line of nbparallel's own for the reader of the cell."""

    def finish(self) -> None:
        """Hear that every rank has ended the task; late output may still come."""
