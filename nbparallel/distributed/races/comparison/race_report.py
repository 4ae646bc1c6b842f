"""Races that a checked cell had, and the report that shows them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbparallel.errors.text.escaping import escape_html, visible

MOST_SHOWN = 5
"""Races of a report, and parts that were not checked."""


@dataclass(frozen=True, slots=True)
class Race:
    """A data race: ranks touched the same elements, at least one wrote, and nothing orders them.

    `lines`, `cells`, `ranks` and `kinds` have two elements each: the first is of the line that wrote, or of
    the earlier one if both did.
    """

    array: str
    """The array's name; empty: it has none."""
    indices: str
    """What both have touched: ``grid[7]``."""
    lines: tuple[int, int]
    """In the source of `cells`; 0: unknown."""
    cells: tuple[str, str]
    """Empty: the cell that was checked; else ``In[2]``, or a file."""
    ranks: tuple[tuple[int, ...], tuple[int, ...]]
    """Ascending."""
    kinds: tuple[str, str]
    """``"read"``, ``"wrote"`` or ``"read and wrote"``; ``"may have written"`` …: C code hides it."""
    certain: bool
    """Both accesses are known exactly."""
    harmless: bool
    """All ranks wrote the same value: what the array holds then is the same in any order."""
    sentence: str
    """What happened."""
    advice: str
    """What to do."""

    def __str__(self) -> str:
        return f"{self.sentence} → {self.advice}"


@dataclass(frozen=True, slots=True, repr=False)
class RaceReport:
    """What the check of a cell has found."""

    races: tuple[Race, ...]
    """Those known exactly first, then possible ones, then harmless ones."""
    accesses: int
    """How many accesses to shared arrays were compared."""
    not_checked: tuple[str, ...] = ()
    """What was seen, but could not be compared."""

    @property
    def title(self) -> str:
        """How many races of which kind, in a line."""
        counts = {"data race": 0, "possible race": 0, "harmless race": 0}
        for race in self.races:
            counts[
                "harmless race" if race.harmless else "data race" if race.certain else "possible race"
            ] += 1
        parts = [f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items() if n]
        if not parts and not self.accesses:  # an error came first, or all arrays are private
            return "no race: no access to shared arrays was seen"
        return ", ".join(parts) or f"no race among {self.accesses:,} access{'es' * (self.accesses != 1)}"

    def lines(self) -> list[str]:
        """Return what stands below the title."""
        lines = _few([str(race) for race in self.races])
        lines += [f"not checked: {text}" for text in _few(list(self.not_checked))]
        return lines

    def __str__(self) -> str:
        return visible("\n".join([self.title, *self.lines()]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{_html(line)}</li>" for line in self.lines())
        return f"<p><b>{escape_html(self.title)}</b></p>" + (f"<ul>{items}</ul>" if items else "")


def _few(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_SHOWN
    return lines if more <= 0 else [*lines[:MOST_SHOWN], f"and {more} more"]


def _html(line: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape_html(line))
