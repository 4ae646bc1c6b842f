"""A page that the output of cells is shown on, for tests."""
# ruff: noqa: D102 - the methods of Page are those of Publisher

from __future__ import annotations

import time
from typing import Any


class Page:
    """A publisher that keeps what a reader would see."""

    separate_streams = True

    def __init__(self, *, can_clear: bool = True, can_live: bool = True, renders_again: bool = True) -> None:
        self.can_clear, self.can_live, self.renders_again = can_clear, can_live, renders_again
        self.lives: list[str] = []
        self.shown: list[Any] = []
        self.clears = 0
        self.published = 0
        self.times: list[float] = []

    def stream(self, name: str, text: str) -> None:
        self.times.append(time.monotonic())
        self.published += len(text)
        if self.shown and self.shown[-1][0] == name:
            self.shown[-1] = (name, self.shown[-1][1] + text)
        else:
            self.shown.append((name, text))

    def note(self, text: str) -> None:
        self.stream("stdout", text)

    def display(self, data: Any, metadata: Any, transient: Any) -> None:
        self.shown.append(("display", data, transient))

    def update(self, data: Any, metadata: Any, transient: Any) -> None:
        self.shown = [
            ("display", data, transient) if s[0] == "display" and s[2] == transient else s for s in self.shown
        ]

    def live(self, text: str, *, last: bool) -> None:
        self.lives.append(text)
        self.shown = [("kept" if last else "live", text) if s[0] == "live" else s for s in self.shown]
        if all(s != ("kept" if last else "live", text) for s in self.shown):
            self.shown.append(("kept" if last else "live", text))

    def clear(self, *, then_more: bool) -> None:
        self.clears += 1
        self.shown = []

    @property
    def text(self) -> str:
        """The text of both streams, and of the lines that change."""
        ends = {"live": "\n", "kept": "\n"}
        return "".join("<display>\n" if s[0] == "display" else s[1] + ends.get(s[0], "") for s in self.shown)
