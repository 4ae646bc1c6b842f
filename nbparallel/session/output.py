"""Output of ranks in one task: collected, and passed on to a sink."""

from __future__ import annotations

import io
import sys
import threading
import warnings
from collections import defaultdict
from typing import Any, Protocol

from nbparallel.wire.messages import Display


class OutputSink(Protocol):
    """Receives what ranks print and show.

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
        """Take one line of nbparallel's own for the user."""

    def finish(self) -> None:
        """Handle the end of the task on every rank; late output may still come."""


KEPT_CHARACTERS = 10 << 20
"""Text of one rank that a result keeps; what is beyond it was shown but is not kept."""


class TaskOutput:
    """Output of one task.  Written from the event loop's thread, read by others after the task's end."""

    def __init__(self, number: int, sink: OutputSink | None) -> None:
        self.number = number
        self._sink = sink
        self._kept = KEPT_CHARACTERS
        self._text: defaultdict[tuple[int, str], io.StringIO] = defaultdict(io.StringIO)
        self._displays: dict[int, list[dict[str, Any]]] = {}

    def stream(self, rank: int, name: str, text: str) -> None:
        """Take text of a rank."""
        if self._kept and self._text[rank, name].tell() < self._kept:
            self._text[rank, name].write(text)
        self._show("stream", rank, name, text)

    def display(self, rank: int, message: Display) -> None:
        """Take a rich output of a rank."""
        if message.kind != "clear" and self._kept:
            self._displays.setdefault(rank, []).append(message.data)
        data, metadata = message.data, message.metadata
        if message.kind == "clear":
            self._show("clear", rank, bool(metadata.get("wait")))
        elif message.kind == "result":
            self._show("result", rank, data, metadata)
        else:
            self._show("display", rank, data, metadata, message.transient, message.kind == "update")

    def note(self, text: str) -> None:
        """Take a line of ours."""
        self._show("note", text)

    def progress(self, text: str) -> None:
        """Show a line of ours that changes, where a sink has one (``progress``); an empty text removes it."""
        if hasattr(self._sink, "progress"):
            self._show("progress", text)

    def show_now(self) -> None:
        """Have a sink that waits for more show what it has."""
        if hasattr(self._sink, "show_now"):
            self._show("show_now")

    def forget(self) -> None:
        """Drop what was kept, which the result holds; later output is only passed on."""
        self._kept = 0
        self._text.clear()
        self._displays = {}

    def finish(self) -> None:
        """Notify the sink that all ranks have ended the task."""
        self._show("finish")

    def _show(self, method: str, *args: Any) -> None:
        """Call a method of the sink, if there is one."""
        try:
            if self._sink is not None:
                getattr(self._sink, method)(*args)
        except Exception as error:  # noqa: BLE001  a broken front end must not stop the ranks
            self._sink = None
            warnings.warn(
                f"output of task {self.number} is no longer shown ({type(error).__name__}: {error}); "
                "it is in the result",
                RuntimeWarning,
                stacklevel=2,
            )

    def text(self, rank: int, name: str) -> str:
        """Return what a rank printed."""
        return self._text[rank, name].getvalue() if (rank, name) in self._text else ""

    def displays(self, rank: int) -> tuple[dict[str, Any], ...]:
        """Return a rank's mime bundles."""
        return tuple(self._displays.get(rank, ()))


class LineSink:
    """Prints whole lines as ``[rank 2] text``; a line without an end is printed when the task ends.

    Called from the session's thread and, at the end, from the one that waits.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: dict[tuple[int, str], str] = {}

    # docstrings inherited from OutputSink

    def stream(self, rank: int, name: str, text: str) -> None:
        with self._lock:
            *whole, rest = (self._begun.get((rank, name), "") + text).split("\n")
            self._begun[rank, name] = "\r".join(rest.split("\r")[-2:])  # of a progress bar the last state
            self._print(rank, name, whole)

    def display(
        self,
        rank: int,
        data: dict[str, Any],
        metadata: dict[str, Any],
        transient: dict[str, Any],
        update: bool,
    ) -> None:
        self.stream(rank, "stdout", str(data.get("text/plain", "")) + "\n")

    def result(self, rank: int, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        self.display(rank, data, metadata, {}, update=False)

    def clear(self, rank: int, wait: bool) -> None:
        """Do nothing: what stands in a terminal or a file stays."""

    def note(self, text: str) -> None:
        with self._lock:
            sys.stderr.write(f"nbparallel: {text}\n")

    def finish(self) -> None:
        with self._lock:
            for (rank, name), rest in sorted(self._begun.items()):
                self._print(rank, name, [rest] if rest else [])
            self._begun.clear()

    def _print(self, rank: int, name: str, lines: list[str]) -> None:
        if lines:
            stream = sys.stderr if name == "stderr" else sys.stdout
            # of a line that was drawn again and again what a terminal shows last
            shown = (next((part for part in reversed(line.split("\r")) if part), "") for line in lines)
            stream.write("".join(f"[rank {rank}] {seen}\n" for seen in shown))
            stream.flush()
