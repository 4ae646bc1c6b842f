"""Messages of a kernel and the outcome of a cell: frozen records that tests read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelMessage:
    """One message of the kernel on iopub."""

    seconds: float
    """When it arrived, by `time.monotonic`."""
    kind: str
    """As the protocol has it: ``stream``, ``display_data``, ``status`` …"""
    parent: str
    """Id of the request that it says it belongs to."""
    content: Mapping[str, Any]
    """The message's content as it came."""

    @property
    def is_note(self) -> bool:
        """Whether it shows lines of the library's own, which HTML shows muted."""
        plain = self.content["data"].get("text/plain", "") if self.kind == "display_data" else ""
        return plain.startswith("[nbparallel] ")

    @property
    def printed(self) -> str:
        """What it prints: text of a stream, or notes."""
        if self.kind == "stream":
            return str(self.content["text"])
        return f"{self.content['data']['text/plain']}\n" if self.is_note else ""


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """What came of one cell."""

    status: str
    """``ok``, ``error``, ``aborted``, or ``died``: the kernel's process ended in it."""
    messages: tuple[KernelMessage, ...]
    """Every message whose parent is this cell, in order of arrival."""
    started: float
    """When it was sent, by `time.monotonic`."""
    seconds: float
    """From sending it to its end."""
    execution_count: int | None = None
    """The number in ``In [n]``."""
    ename: str = ""
    """Class of the exception; empty if there was none."""
    evalue: str = ""
    """Its text."""
    traceback: str = ""
    """The whole traceback as the front end would show it, with colours."""

    def stream(self, name: str = "stdout") -> str:
        """Return the text of one stream; stdout has the library's notes."""
        return "".join(m.printed for m in self.messages if m.content.get("name", "stdout") == name)

    @property
    def stdout(self) -> str:
        """What the cell printed."""
        return self.stream("stdout")

    @property
    def stderr(self) -> str:
        """What the cell printed as errors."""
        return self.stream("stderr")

    @property
    def displays(self) -> tuple[Mapping[str, Any], ...]:
        """Mime bundles that were displayed, updates not applied."""
        return tuple(m.content["data"] for m in self._of("display_data") if not m.is_note)

    @property
    def result(self) -> str:
        """The last expression's plain text; empty if there was none."""
        return "".join(m.content["data"].get("text/plain", "") for m in self._of("execute_result"))

    @property
    def text(self) -> str:
        """All that it showed, without colours."""
        shown = [str(display.get("text/plain", "")) for display in self.displays]
        lines = [self.stdout, self.stderr, self.result, self.traceback, *shown]
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(lines))

    def _of(self, kind: str) -> list[KernelMessage]:
        return [message for message in self.messages if message.kind == kind]
