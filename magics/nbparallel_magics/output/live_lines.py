"""The lines that ranks draw again and again, as progress bars do: kept as they are now, shown in place."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from nbparallel.errors import rank_list
from nbparallel_magics.output.layout import Arrival, Progress, Text, as_items
from nbparallel_magics.output.screen import Screen, ScreenLine

INTERVAL = 0.2
"""Seconds between two states that are shown."""
CHEAP_LINES = 16
"""With more lines the states come less often, so that as much is shown in a second."""
NO_RANK = -1
"""In the place of a rank: a line of our own."""
LINES_OF_A_RANK = 3
"""Shown while the cell runs: bars inside each other, and some that have ended."""


class LiveLines:
    """The screens of those streams of ranks that move the cursor; not thread-safe, its owner holds a lock.

    Parameters
    ----------
    in_place : bool
        Whether a line can be shown while it changes; if not it is text as soon as it has ended.
    """

    def __init__(self, *, in_place: bool) -> None:
        self._in_place = in_place
        self._screens: dict[tuple[int, str], Screen] = {}
        self._ended: dict[int, deque[ScreenLine]] = {}
        self._changed = False
        self._next = 0.0

    def has(self, rank: int, name: str) -> bool:
        """Whether the next text of a stream has to be drawn."""
        return (rank, name) in self._screens

    def feed(self, rank: int, name: str, text: str) -> list[Arrival]:
        """Draw text; return the lines that it has made the first to be drawn again."""
        screen = self._screens.setdefault((rank, name), Screen())
        lines = screen.feed(text)
        self._changed = True
        return [(rank, Progress(name, line)) for line in lines] if self._in_place else []

    def settle(self) -> list[tuple[int, Text]]:
        """Return the lines that are ordinary text, and cannot change any more."""
        found = []
        for (rank, name), screen in list(self._screens.items()):
            lines = screen.settle()
            found += self._take(rank, name, lines)
            self._changed = self._changed or bool(lines)
            if screen.is_idle:
                del self._screens[rank, name]
        return found

    def end(self) -> list[tuple[int, Text]]:
        """End all lines; return those that are ordinary text."""
        found = []
        for (rank, name), screen in self._screens.items():
            lines, begun = screen.end()
            found += self._take(rank, name, lines)
            if begun:
                found.append((rank, Text(name, begun)))
        self._screens, self._ended, self._changed = {}, {}, False
        return found

    def drop(self, rank: int) -> None:
        """Forget what a rank has drawn."""
        self._screens = {key: screen for key, screen in self._screens.items() if key[0] != rank}
        self._changed = self._ended.pop(rank, None) is not None or self._changed

    @property
    def are_due(self) -> bool:
        """Whether something is to be shown, or could be settled soon."""
        return self._changed or any(not screen.is_settled for screen in self._screens.values())

    def next_state(self, *, again: bool) -> str | None:
        """Return the lines as they are now; None if they are not due.  `again`: what was shown is gone."""
        now = time.monotonic()
        if not (again or (self._changed and now >= self._next)):
            return None
        lines: dict[int, list[ScreenLine]] = {rank: list(ended) for rank, ended in self._ended.items()}
        for (rank, _), screen in self._screens.items():
            lines.setdefault(rank, []).extend(screen.live)
        shown = [(rank, line.text) for rank in sorted(lines) for line in lines[rank][-LINES_OF_A_RANK:]]
        self._changed = False
        self._next = now + INTERVAL * max(1.0, len(shown) / CHEAP_LINES)
        return _labelled(shown)

    def _take(self, rank: int, name: str, lines: Iterable[ScreenLine]) -> list[tuple[int, Text]]:
        texts = []
        for line in lines:
            if line.redrawn and self._in_place:
                self._ended.setdefault(rank, deque(maxlen=LINES_OF_A_RANK)).append(line)
            else:
                texts.append((rank, Text(name, f"{line.text}\n")))
        return texts


def last_state(arrivals: Iterable[Arrival]) -> str:
    """Return all lines that were drawn again, as they are in the end."""
    lines = as_items((rank, item) for rank, item in arrivals if isinstance(item, Progress))
    texts = [(rank, item.text.rstrip("\n")) for rank, item in lines if isinstance(item, Text)]
    return _labelled(sorted(texts, key=lambda line: line[0]))


def _labelled(lines: Iterable[tuple[int, str]]) -> str:
    labels = ((rank_list((rank,)) if rank != NO_RANK else "nbparallel", text) for rank, text in lines)
    return "\n".join(f"[{label}] {text}" for label, text in labels)
