"""What the ranks print and show in one task: collected, and passed on to the cell."""

from __future__ import annotations

import codecs
import warnings
from collections.abc import Callable
from typing import Any

from nbparallel.session.sink import OutputSink
from nbparallel.wire.messages import Display

KEPT_CHARACTERS = 10 << 20
"""Text of one rank that a result keeps; what is beyond it was shown but is not kept."""


class TaskOutput:
    """Output of one task.  Called from the pump's thread; read by others after the task's end."""

    def __init__(self, number: int, sink: OutputSink | None) -> None:
        self.number = number
        self._sink = sink
        self._kept = KEPT_CHARACTERS
        self._text: dict[tuple[int, str], list[str]] = {}
        self._sizes: dict[tuple[int, str], int] = {}
        self._displays: dict[int, list[dict[str, Any]]] = {}

    def stream(self, rank: int, name: str, text: str) -> None:
        """Take text of a rank."""
        key = (rank, name)
        size = self._sizes.get(key, 0)
        if size < self._kept:
            self._text.setdefault(key, []).append(text)
            self._sizes[key] = size + len(text)
        if self._sink is not None:
            sink = self._sink
            self._pass_on(lambda: sink.stream(rank, name, text))

    def display(self, rank: int, message: Display) -> None:
        """Take a rich output of a rank."""
        if message.kind != "clear" and self._kept:
            self._displays.setdefault(rank, []).append(message.data)
        sink = self._sink
        if sink is None:
            return
        data, metadata = message.data, message.metadata
        if message.kind == "clear":
            self._pass_on(lambda: sink.clear(rank, bool(metadata.get("wait"))))
        elif message.kind == "result":
            self._pass_on(lambda: sink.result(rank, data, metadata))
        else:
            update = message.kind == "update"
            self._pass_on(lambda: sink.display(rank, data, metadata, message.transient, update))

    def note(self, text: str) -> None:
        """Take a line of ours."""
        if self._sink is not None:
            sink = self._sink
            self._pass_on(lambda: sink.note(text))

    def forget(self) -> None:
        """Keep nothing from now on: the result has it, and late output is only passed on."""
        self._kept = 0
        self._text, self._displays = {}, {}

    def finish(self) -> None:
        """All ranks have ended the task."""
        if self._sink is not None:
            self._pass_on(self._sink.finish)

    def _pass_on(self, call: Callable[[], None]) -> None:
        try:
            call()
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
        return "".join(self._text.get((rank, name), ()))

    def displays(self, rank: int) -> tuple[dict[str, Any], ...]:
        """Return a rank's mime bundles."""
        return tuple(self._displays.get(rank, ()))


class Decoder:
    """Bytes of one pipe as text; what is no UTF-8 comes out backslash-escaped."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def feed(self, data: bytes, *, final: bool = False) -> str:
        """Return the text of `data`, keeping an unfinished character for the next time."""
        return self._decoder.decode(data, final)
