"""A profile: where the time of a cell has gone, by line and rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Self

from nbparallel.distributed.tracing.profiling.line_log import LineLog
from nbparallel.errors import rank_list
from nbparallel.errors.text.escaping import visible
from nbparallel.wire.units import seconds_text

WIDTH = 24
"""Letters of the longest bar."""
LETTERS = {"computing": "█", "waiting": "·", "moving": "▒"}
UNEVEN = 1.2
"""Ranks are named where the slowest takes so many times what the fastest does."""
LITTLE = 0.005
"""Share of the time below which a line has no figures."""
GAP = 4
"""Lines without time that are shown, in a row; of more, none is."""


@dataclass(frozen=True, slots=True)
class LineTimes:
    """Where the time of one line has gone on one rank, in seconds."""

    computing: float = 0.0
    """Neither waiting nor moving: also what sleeps, or reads a file."""
    waiting: float = 0.0
    """In operations, until other ranks came."""
    moving: float = 0.0
    """The rest of operations."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.computing + self.waiting + self.moving


_NONE = LineTimes()


@dataclass(frozen=True, slots=True)
class ProfiledLine:
    """One line with its time on each rank."""

    file: str
    """Empty: the cell that ran; else ``In[2]``, or a file's name."""
    line: int
    """Its number there, as the gutter counts it."""
    code: str
    """Its text."""
    ranks: Mapping[int, LineTimes]
    """By rank; each of the profile has an entry."""

    @property
    def mean(self) -> LineTimes:
        """Its time, averaged over the ranks."""
        count = len(self.ranks) or 1
        each = self.ranks.values()
        return LineTimes(*(sum(part) / count for part in zip(*map(_parts, each), strict=True)))

    @property
    def fastest(self) -> int:
        """The rank that took least time for it."""
        return min(self.ranks, key=lambda rank: self.ranks[rank].seconds)

    @property
    def slowest(self) -> int:
        """The rank that took most time for it."""
        return max(self.ranks, key=lambda rank: self.ranks[rank].seconds)

    @property
    def uneven(self) -> bool:
        """Whether the slowest rank takes clearly longer than the fastest one."""
        return self.ranks[self.slowest].seconds > UNEVEN * self.ranks[self.fastest].seconds


@dataclass(frozen=True, slots=True, repr=False)
class Profile:
    """Where the time of a cell has gone, by line and rank."""

    lines: tuple[ProfiledLine, ...]
    """Those that took time, by file and line."""
    ranks: Mapping[int, LineTimes]
    """The whole of each rank, with what no line has."""
    texts: Mapping[str, tuple[str, ...]]
    """The source of each file."""
    remarks: tuple[str, ...] = ()
    """What was not seen."""

    @classmethod
    def of(cls, logs: Iterable[LineLog], lost: Collection[int]) -> Self:
        """Return the profile that ranks have reported."""
        found: dict[tuple[str, int], dict[int, LineTimes]] = {}
        texts: dict[str, tuple[str, ...]] = {}
        whole: dict[int, LineTimes] = {}
        remarks: dict[str, list[int]] = {}
        for log in sorted(logs, key=attrgetter("rank")):
            texts |= dict(log.texts.values())
            if log.remark:
                remarks.setdefault(log.remark, []).append(log.rank)
            sums = [0, 0, 0]
            for filename, line, *times in log.lines:
                sums = [a + b for a, b in zip(sums, times, strict=True)]
                if filename:
                    found.setdefault((log.texts[filename][0], line), {})[log.rank] = _times(*times)
            whole[log.rank] = _times(*sums)
        lines = tuple(
            ProfiledLine(
                file, line, _line(texts[file], line), {rank: times.get(rank, _NONE) for rank in whole}
            )
            for (file, line), times in sorted(found.items())
        )
        said = [f"{rank_list(ranks)}: {remark}" for remark, ranks in remarks.items()]
        if lost:
            said.append(f"what {rank_list(lost)} did was lost")
        return cls(lines, whole, texts, tuple(said))

    @property
    def longest(self) -> ProfiledLine | None:
        """The line that took most time, of all ranks together; None if none took any."""
        return max(self.lines, key=lambda line: line.mean.seconds, default=None)

    @property
    def seconds(self) -> float:
        """The time of all lines and what lies between them, averaged over the ranks."""
        return sum(times.seconds for times in self.ranks.values()) / (len(self.ranks) or 1)

    @property
    def title(self) -> str:
        """The line that takes most, in a sentence."""
        line = self.longest
        if line is None or not self.seconds:
            return "no line took any time"
        mean = line.mean
        share = f"{mean.seconds / self.seconds:.0%}".replace("%", " %")
        kind = max(LETTERS, key=lambda kind: getattr(mean, kind))
        where = f"line {line.line}{f' of {line.file}' * bool(line.file)}"
        said = f"{share} of the time is {where}, mostly {kind}"
        if line.uneven:
            times = [seconds_text(line.ranks[rank].seconds) for rank in (line.fastest, line.slowest)]
            said += f": {times[1]} on rank {line.slowest}, {times[0]} on rank {line.fastest}"
        return said

    @property
    def subtitle(self) -> str:
        """Which ranks, and for how long."""
        return f"{rank_list(self.ranks)}, {seconds_text(self.seconds)} each"

    def shown(self) -> Iterator[tuple[str, list[tuple[int, str, ProfiledLine | None]]]]:
        """Yield the lines of each file that are shown: those with time, and what lies between; 0: a gap."""
        for file in dict.fromkeys(line.file for line in self.lines):
            known = {line.line: line for line in self.lines if line.file == file}
            text = self.texts.get(file, ())
            first, last = (min(known), max(known)) if file else (1, max(len(text), max(known)))
            rows: list[tuple[int, str, ProfiledLine | None]] = []
            empty: list[tuple[int, str, ProfiledLine | None]] = []
            for number in range(first, last + 1):
                row = number, _line(text, number), known.get(number)
                if row[2] is None:
                    empty.append(row)
                    continue
                rows += empty if len(empty) <= GAP else [(0, "", None)]
                rows.append(row)
                empty = []
            yield file, rows if len(empty) > GAP else rows + empty

    def figures(self, line: ProfiledLine | None) -> tuple[str, str, str]:
        """Return the average time of a line, and if they differ its fastest and its slowest rank."""
        if line is None or line.mean.seconds < LITTLE * self.seconds:
            return "", "", ""
        ends = (line.fastest, line.slowest) if line.uneven else ()
        times = [f"{seconds_text(line.ranks[rank].seconds)} rank {rank}" for rank in ends] or ["", ""]
        return seconds_text(line.mean.seconds), times[0], times[1]

    def __str__(self) -> str:
        most = max((line.mean.seconds for line in self.lines), default=0.0) or 1.0
        parts = [self.title, self.subtitle, "   ".join(f"{LETTERS[kind]} {kind}" for kind in LETTERS)]
        for file, rows in self.shown():
            table = [("", f"{file}" or "", "mean", "fastest", "slowest", "")]
            for number, code, line in rows:
                drawn = "" if line is None else _bar(line.mean, most)
                table.append((str(number or "⋮"), drawn, *self.figures(line), code))
            widths = [max(len(row[i]) for row in table) for i in range(6)]
            for number_, bar, *figures, code in table:
                right = "  ".join(text.rjust(width) for text, width in zip(figures, widths[2:5], strict=True))
                parts.append(
                    f"{number_:>{widths[0]}} {bar:<{max(WIDTH, widths[1])}} {right}  {code}".rstrip()
                )
        return "\n".join(visible(part) for part in (*parts, *self.remarks))

    __repr__ = __str__


def _parts(times: LineTimes) -> tuple[float, float, float]:
    return times.computing, times.waiting, times.moving


def _times(whole: int, waiting: int, moving: int) -> LineTimes:
    """Return times in seconds; the counters of operations may run ahead of the clock of lines."""
    return LineTimes(max(0, whole - waiting - moving) / 1e9, max(0, waiting) / 1e9, max(0, moving) / 1e9)


def _line(text: tuple[str, ...], number: int) -> str:
    return text[number - 1].rstrip() if 0 < number <= len(text) else ""


def _bar(times: LineTimes, most: float) -> str:
    drawn, done = "", 0.0
    for kind, letter in LETTERS.items():
        done += getattr(times, kind)
        drawn += letter * (round(WIDTH * done / most) - len(drawn))
    return drawn
