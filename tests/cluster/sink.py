"""A sink that keeps what arrives."""

from __future__ import annotations

from typing import Any


class Sink:
    """Keeps what arrives, as `OutputSink` describes it."""

    # ruff: noqa: D102

    def __init__(self) -> None:
        self.texts: list[tuple[int, str, str]] = []
        self.shown: list[tuple[int, str]] = []
        self.notes: list[str] = []

    def stream(self, rank: int, name: str, text: str) -> None:
        self.texts.append((rank, name, text))

    def display(self, rank: int, data: Any, metadata: Any, transient: Any, update: bool) -> None:
        self.shown.append((rank, "display"))

    def result(self, rank: int, data: Any, metadata: Any) -> None:
        self.shown.append((rank, data["text/plain"]))

    def clear(self, rank: int, wait: bool) -> None:
        self.shown.append((rank, "clear"))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finish(self) -> None:
        self.texts.append((-1, "finish", ""))
