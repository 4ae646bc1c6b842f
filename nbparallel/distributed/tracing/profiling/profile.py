"""A profile: where the time of a cell has gone, by line and rank."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from os.path import commonprefix
from typing import NamedTuple, Self

from nbparallel.distributed.tracing.profiling.line_log import LineLog
from nbparallel.errors import grouped, rank_list
from nbparallel.errors.text.table import Table
from nbparallel.wire.units import seconds_text

WIDTH = 24
"""Letters of the longest bar."""
LETTERS = {"computing": "█", "waiting": "·", "moving": "▒"}
UNEVEN = 1.2
"""Ranks are named where the slowest takes so many times what the fastest does."""
LITTLE = 0.005
"""Share of the time below which a line has no figures."""
WORTH = 0.1
"""Share of the ranks' time from which on something is worth a sentence."""
SHORTEST = 0.05
"""Seconds of a cell: in a shorter one nothing is worth a change."""
TELLING = 4
"""Different digits in a value: one with less (0, True, a size) may be equal on all ranks by chance."""
AROUND = 3
"""Lines without time that are shown before and after one that has."""


class LineTimes(NamedTuple):
    """Where the time of one line has gone on one rank, in seconds."""

    computing: float
    """Neither waiting nor moving: also what sleeps, or reads a file."""
    waiting: float
    """In operations, until other ranks came."""
    moving: float
    """The rest of operations."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self)

    @classmethod
    def of(cls, whole: int, waiting: int, moving: int) -> Self:
        """Return times in seconds; the counters of operations may run ahead of the clock of lines."""
        return cls(max(0, whole - waiting - moving) / 1e9, max(0, waiting) / 1e9, max(0, moving) / 1e9)


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
        return LineTimes(*(sum(part) / len(self.ranks) for part in zip(*self.ranks.values(), strict=True)))

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
    """Where the time of a cell has gone, by line and rank; printed, the code with a bar a line."""

    lines: tuple[ProfiledLine, ...]
    """Those that took time, by file and line."""
    ranks: Mapping[int, LineTimes]
    """The whole of each rank, with what no line has."""
    texts: Mapping[str, tuple[str, ...]]
    """The source of each file."""
    remarks: tuple[str, ...] = ()
    """What was not seen."""
    repeated: tuple[tuple[int, float, str], ...] = ()
    """Line, seconds and names of statements of the cell that left the same on all ranks."""

    @classmethod
    def of(cls, logs: Sequence[LineLog], lost: Collection[int]) -> Self:
        """Return the profile that ranks have reported."""
        found: dict[tuple[str, int], dict[int, LineTimes]] = {}
        files: dict[str, tuple[str, tuple[str, ...]]] = {}
        whole: dict[int, LineTimes] = {}
        logs = sorted(logs, key=attrgetter("rank"))
        for log in logs:
            files |= log.texts
            whole[log.rank] = LineTimes.of(*(sum(line[i] for line in log.lines) for i in (2, 3, 4)))
            for filename, line, *times in log.lines:
                if filename:
                    found.setdefault((filename, line), {})[log.rank] = LineTimes.of(*times)
        none = dict.fromkeys(whole, LineTimes(0.0, 0.0, 0.0))
        names = {filename: _name(filename, files) for filename in files}
        remarks = grouped((log.remark, log.rank) for log in logs).items()
        said = [f"{rank_list(ranks)}: {remark}" for remark, ranks in remarks if remark]
        return cls(
            tuple(
                ProfiledLine(names[filename], line, _line(files[filename][1], line), none | times)
                for (filename, line), times in sorted(
                    found.items(), key=lambda item: (names[item[0][0]], item[0][1])
                )
            ),
            whole,
            {names[filename]: text for filename, (_, text) in files.items()},
            (*said, *[f"what {rank_list(lost)} did was lost"] * bool(lost)),
            tuple(_repeated(logs)),
        )

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
        if line is None:
            return "no line took any time"
        share = f"{line.mean.seconds / self.seconds:.0%}".replace("%", " %")
        kind = max(LETTERS, key=lambda kind: getattr(line.mean, kind))
        said = f"{share} of the time is line {line.line}{f' of {line.file}' * bool(line.file)}, mostly {kind}"
        fastest, slowest = self.figures(line)[1:]
        return f"{said}: {slowest}, {fastest}" if slowest else said

    @property
    def subtitle(self) -> str:
        """Which ranks, and for how long."""
        return f"{rank_list(self.ranks)}, {seconds_text(self.seconds)} each"

    def foot(self) -> list[str]:
        """Return the efficiency, at most three lines of advice, and what was not seen."""
        computing = {rank: times.computing for rank, times in self.ranks.items()}
        whole = self.seconds * len(self.ranks)
        lines = [
            efficiency(list(computing.values()), max(t.seconds for t in self.ranks.values()) if whole else 0)
        ]
        if self.seconds >= SHORTEST and len(self.ranks) > 1:
            waiting = sum(times.waiting for times in self.ranks.values())
            found = [uneven_work(computing, waiting, whole)]
            for line, seconds, names in self.repeated:
                share = f"{seconds / self.seconds:.0%}".replace("%", " %")
                text = f"line {line} took {share} of the time, and all ranks have the same {names} then: "
                text += "compute it once in the notebook, or have each rank do a part (dist.shard)"
                found.append((seconds / self.seconds, text))
            found.sort(reverse=True)
            lines += [f"advice: {text}" for share, text in found[:3] if share >= WORTH]
        return [line for line in (*lines, *self.remarks) if line]

    def shown(self) -> Iterator[tuple[str, list[tuple[int, str, ProfiledLine | None]]]]:
        """Yield the lines of each file that are shown: those with time, and the code around; 0: a gap."""
        for file in dict.fromkeys(line.file for line in self.lines):
            known = {line.line: line for line in self.lines if line.file == file}
            rows: list[tuple[int, str, ProfiledLine | None]] = []
            for number in range(min(known), max(known) + 1):
                code = _line(self.texts[file], number)
                if number in known or (code and any(abs(number - each) <= AROUND for each in known)):
                    rows.append((number, code, known.get(number)))
                elif code and rows[-1][0]:
                    rows.append((0, "", None))
            yield file, rows

    def figures(self, line: ProfiledLine | None) -> tuple[str, str, str]:
        """Return the average time of a line, and if they differ its fastest and its slowest rank."""
        if line is None or line.mean.seconds < LITTLE * self.seconds:
            return "", "", ""
        ends = [
            f"{seconds_text(line.ranks[rank].seconds)} on rank {rank}" * line.uneven
            for rank in (line.fastest, line.slowest)
        ]
        return seconds_text(line.mean.seconds), ends[0], ends[1]

    def __str__(self) -> str:
        most = max((line.mean.seconds for line in self.lines), default=0.0)
        parts = [
            self.title,
            self.subtitle,
            "   ".join(f"{letter} {kind}" for kind, letter in LETTERS.items()),
        ]
        for file, rows in self.shown():
            head = "line", " " * WIDTH, f"{'average':>7}", "fastest", "slowest", file or "cell"
            table = [
                (f"{number or '⋮':>4}", _bar(line, most), f"{mean:>7}", *ends, code)
                for number, code, line in rows
                for mean, *ends in [self.figures(line)]
            ]
            parts.append(Table("", head, table).text())
        return "\n".join((*parts, *self.foot()))

    __repr__ = __str__


def efficiency(computing: Sequence[float], seconds: float) -> str:
    """Return how much of the ranks' time was computing, as the product of two shares (POP's metrics).

    Load balance is the mean computing time by the longest, communication efficiency the longest by the whole:
    https://pop-coe.eu/node/69.
    """
    if len(computing) < 2 or not seconds or not max(computing):
        return ""
    mean, most = sum(computing) / len(computing), max(computing)
    whole, balance, rest = mean / seconds, mean / most, most / seconds
    return (
        f"{whole:.0%} of the ranks' time was computing = {balance:.0%} (how evenly the work was divided) "
        f"× {rest:.0%} (what the busiest rank computed)"
    ).replace("%", " %")


def uneven_work(computing: Mapping[int, float], waiting: float, whole: float) -> tuple[float, str]:
    """Return what share of the time an even division would save, and how."""
    slowest = max(computing, key=lambda rank: computing[rank])
    most, mean = computing[slowest], sum(computing.values()) / len(computing)
    text = f"rank {slowest} computed {seconds_text(most)}, the mean is {seconds_text(mean)}: "
    text += "deal the work like cards (range(rank, n, world_size)), or let nbp.map deal it"
    return min((most - mean) * len(computing), waiting) / whole, text


def _repeated(logs: Sequence[LineLog]) -> Iterator[tuple[int, float, str]]:
    """Yield what all ranks have computed alike, as far as the beginnings and ends of values show."""
    found = [{(line, names, text): ns for line, ns, names, text in log.results} for log in logs]
    for key in found[0] if len(found) > 1 else ():
        digits = set(key[2]) & set("123456789")
        if all(key in each for each in found) and len(digits) >= TELLING and " at 0x" not in key[2]:
            yield key[0], sum(each[key] for each in found) / len(found) / 1e9, key[1]


def _name(filename: str, files: Mapping[str, tuple[str, tuple[str, ...]]]) -> str:
    """Return what a file is called; one of several with its label also by what of its path is different."""
    label = files[filename][0]
    same = [each for each in files if files[each][0] == label]
    tail = filename[commonprefix(same).rfind("/") + 1 :]  # noqa: RUF071  (cells are no paths)
    return label if len(same) == 1 else tail if tail.endswith(label) else f"{label} ({tail})"


def _line(text: tuple[str, ...], number: int) -> str:
    return text[number - 1].rstrip() if 0 < number <= len(text) else ""


def _bar(line: ProfiledLine | None, most: float) -> str:
    drawn, done = "", 0.0
    for kind, letter in LETTERS.items() if line is not None and most else ():
        done += getattr(line.mean, kind)  # type: ignore[union-attr]
        drawn += letter * (round(WIDTH * done / most) - len(drawn))
    return drawn
