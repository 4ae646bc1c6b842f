"""LineSink: what ranks print, on this process's own stdout and stderr, every line behind its rank."""

from __future__ import annotations

import sys
import threading
from typing import Any


class LineSink:
    """Prints whole lines as ``[rank 2] text``; a line without an end is printed when the task ends.

    Called from the session's thread and, at the end, from the one that waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[tuple[int, str], str] = {}

    # docstrings inherited from OutputSink

    def stream(self, rank: int, name: str, text: str) -> None:  # noqa: D102
        with self._lock:
            *whole, rest = (self._begun.get((rank, name), "") + text).split("\n")
            self._begun[rank, name] = rest
            self._print(rank, name, whole)

    def display(  # noqa: D102
        self,
        rank: int,
        data: dict[str, Any],
        metadata: dict[str, Any],
        transient: dict[str, Any],
        update: bool,
    ) -> None:
        self.stream(rank, "stdout", str(data.get("text/plain", "")) + "\n")

    def result(self, rank: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:  # noqa: D102
        self.display(rank, data, metadata, {}, update=False)

    def clear(self, rank: int, wait: bool) -> None:  # noqa: D102
        pass  # what stands in a terminal or a file stays

    def note(self, text: str) -> None:  # noqa: D102
        with self._lock:
            sys.stderr.write(f"nbparallel: {text}\n")

    def finish(self) -> None:  # noqa: D102
        with self._lock:
            for (rank, name), rest in sorted(self._begun.items()):
                self._print(rank, name, [rest] if rest else [])
            self._begun.clear()

    def _print(self, rank: int, name: str, lines: list[str]) -> None:
        if lines:
            stream = sys.stderr if name == "stderr" else sys.stdout
            stream.write("".join(f"[rank {rank}] {line}\n" for line in lines))
            stream.flush()
