"""Layout of the output of several ranks: blocks, their order, their labels.

Pure functions from the output of ranks to labelled pieces.  A piece is shown under one label.
Equal text of several ranks becomes one piece; what all of them printed first is one piece even if they
went on differently.  Values of last expressions come after everything else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from nbparallel.errors import rank_list
from nbparallel_magics.output.screen import Screen, ScreenLine, moves_cursor


@dataclass(frozen=True, slots=True)
class Text:
    """Text of one stream."""

    name: str
    """``stdout`` or ``stderr``."""
    text: str


@dataclass(frozen=True, slots=True)
class Rich:
    """A rich display, or the value of a last expression."""

    data: dict[str, Any]
    """The mime bundle."""
    metadata: dict[str, Any]
    transient: dict[str, Any]
    """Holds ``display_id``, if the display can be updated."""
    is_value: bool = False
    """Whether it is shown as ``Out[rank 0]:``."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A line that is drawn again and again, as progress bars do; it goes on changing."""

    name: str
    """``stdout`` or ``stderr``."""
    line: ScreenLine

    def as_text(self) -> Text | None:
        """Return what it holds now, None if that is nothing."""
        text = self.line.text
        return Text(self.name, f"{text}\n") if text.strip() else None


Item = Text | Rich
Arrival = tuple[int, Text | Rich | Progress]
"""What a rank showed: (rank, item)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Output under one label."""

    ranks: tuple[int, ...]
    """Ascending; empty for a note of our own."""
    item: Item
    tidy: bool = True
    """False if a line behind its label went on over several lines: it came that way."""

    @property
    def label(self) -> str:
        """Return ``[ranks 0-3]``, or ``Out[rank 2]:`` for a value."""
        ranks = rank_list(self.ranks)
        return f"Out[{ranks}]:" if isinstance(self.item, Rich) and self.item.is_value else f"[{ranks}]"


def as_items(arrivals: Iterable[Arrival]) -> list[tuple[int, Item]]:
    """Return what arrived, lines that may change as they are now."""
    now = ((rank, item.as_text() if isinstance(item, Progress) else item) for rank, item in arrivals)
    return [(rank, item) for rank, item in now if item is not None]


def merged(items: Iterable[Item]) -> list[Item]:
    """Join neighbouring text of one stream: output comes in pieces of any size."""
    runs: list[tuple[str, list[str]] | Rich] = []
    for item in items:
        if isinstance(item, Rich):
            runs.append(item)
        elif runs and isinstance(runs[-1], tuple) and runs[-1][0] == item.name:
            runs[-1][1].append(item.text)
        else:
            runs.append((item.name, [item.text]))
    return [run if isinstance(run, Rich) else Text(run[0], "".join(run[1])) for run in runs]


def arrange(arrivals: Iterable[Arrival]) -> list[Piece]:
    """Return the pieces in rank order, equal ones folded, values last."""
    by_rank: dict[int, list[Item]] = {}
    for rank, item in as_items(arrivals):
        by_rank.setdefault(rank, []).append(item)
    outputs = {rank: merged(items) for rank, items in by_rank.items()}
    bodies = {rank: [i for i in outputs[rank] if not is_value(i)] for rank in sorted(outputs)}
    values = {rank: [i for i in outputs[rank] if is_value(i)] for rank in sorted(outputs)}
    bodies = {rank: body for rank, body in bodies.items() if body}
    pieces = []
    common = _common_start(list(bodies.values()))
    if common is not None:
        pieces.append(Piece(tuple(bodies), common))
        bodies = {rank: _without_start(body, len(common.text)) for rank, body in bodies.items()}
    return [*pieces, *_fold(bodies), *_fold(values)]


def in_arrival_order(arrivals: Iterable[Arrival]) -> list[Piece]:
    """Return the pieces as they came: one for each run of one rank's text."""
    runs = groupby(as_items(arrivals), key=lambda arrival: arrival[0])
    return [Piece((rank,), item) for rank, run in runs for item in merged(item for _, item in run)]


def beginning(item: Item, characters: int) -> Item:
    """Return what is shown of an item that is too long: the start of its text."""
    if isinstance(item, Text):
        return Text(item.name, item.text[:characters] + "\n")
    text = str(item.data.get("text/plain", ""))
    data = {"text/plain": text if len(text) <= characters else f"{text[:characters]} …"}
    return Rich(data, {}, item.transient, is_value=item.is_value)


def is_value(item: object) -> bool:
    """Whether an item is the value of a last expression."""
    return isinstance(item, Rich) and item.is_value


def _common_start(bodies: Sequence[Sequence[Item]]) -> Text | None:
    """Return the whole lines that every rank printed first, if there are two ranks and they differ later."""
    first = [body[0] for body in bodies]
    texts = [item.text for item in first if isinstance(item, Text)]
    if len(texts) < 2 or len(texts) < len(bodies) or all(_key(body) == _key(bodies[0]) for body in bodies):
        return None
    name = first[0].name if isinstance(first[0], Text) else ""
    if any(isinstance(item, Text) and item.name != name for item in first):
        return None
    shortest, longest = min(texts), max(texts)  # the ends of the alphabet share what all share
    length = next(
        (i for i, (a, b) in enumerate(zip(shortest, longest, strict=False)) if a != b), len(shortest)
    )
    end = shortest.rfind("\n", 0, length) + 1
    return Text(name, shortest[:end]) if end else None


def _without_start(body: Sequence[Item], length: int) -> list[Item]:
    first = body[0]
    rest = list(body[1:])
    if isinstance(first, Text) and len(first.text) > length:
        rest.insert(0, Text(first.name, first.text[length:]))
    return rest


def _fold(bodies: Mapping[int, Sequence[Item]]) -> list[Piece]:
    groups: dict[str, list[int]] = {}
    for rank, body in bodies.items():
        if body:
            groups.setdefault(_key(body) or f"rank {rank}", []).append(rank)
    return [Piece(tuple(ranks), item) for ranks in groups.values() for item in bodies[ranks[0]]]


def _key(body: Iterable[Item]) -> str:
    """Say what a person would see: stdout and stderr each as a whole, for their order may differ by chance.

    Empty if there is a display that can be updated later: it stays this rank's own.
    """
    parts: list[Any] = []
    out = err = ""
    for item in body:
        if isinstance(item, Text):
            out, err = (out + item.text, err) if item.name == "stdout" else (out, err + item.text)
        elif item.transient.get("display_id") is not None:
            return ""
        else:
            parts += [out, err, sorted(item.data.items()), sorted(item.metadata.items())]
            out = err = ""
    return repr([*parts, out, err])


def fits_behind_label(text: str) -> bool:
    """Whether text may stand on the label's own line: one line, and nothing that moves the cursor back."""
    return "\n" not in text[:-1] and not moves_cursor(text)


# The lines that ranks draw again and again, as progress bars do: kept as they are now, shown in place.

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
