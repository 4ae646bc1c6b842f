"""What a panel says: the course of a cell, as samples show it, and what stands out of it, in a sentence."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nbparallel.distributed.tracing.profiling.profile import WORTH
from nbparallel.errors import LEFT_OUT, rank_list
from nbparallel.session.monitoring.activity import RankActivity, SessionActivity
from nbparallel.wire.units import seconds_text, size_text
from nbparallel_widgets.timeline_view import stands_out

MOST_SAMPLES = 120
"""When there are more, each second one goes: the cell is kept whole, at half the resolution."""
SENTENCE_SECONDS = 1.0
"""How long a sentence about a cell that runs stays at least, so that it can be read."""


_NOTHING = RankActivity(-1, 0, "starting", "", 0, (), 0.0, 0.0, 0.0, 0)
"""What a rank has done before the first sample."""


class Stretch(NamedTuple):
    """What one rank did between two samples."""

    begin: float
    end: float
    computing: float
    """Of that time, as the next two."""
    waiting: float
    moving: float
    items: int
    """Items that it ended."""

    @classmethod
    def between(
        cls, earlier: Sequence[Stretch], before: RankActivity, now: RankActivity, end: float
    ) -> Stretch:
        """Return what follows earlier ones: what was done between two samples."""
        return cls(
            earlier[-1].end if earlier else 0.0,
            end,
            max(0.0, now.computing - before.computing),
            max(0.0, now.waiting - before.waiting),
            max(0.0, now.moving - before.moving),
            now.items - before.items,
        )


@dataclass(slots=True)
class Course:
    """The cell that runs, or ran last; `add` what is seen of it, from one thread at a time."""

    began_ns: int = 0
    """When the cell was sent, of which no two cells have the same."""
    awaited: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Rank -> seconds that others have waited for it."""
    slowest: tuple[float, int] = (0.0, -1)
    """Seconds of the item that took longest, as far as that was seen, and its index."""
    lines: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How often a rank computed in a statement, by its first line, and on a line of it; 0: unknown."""
    _samples: list[tuple[float, dict[int, RankActivity]]] = field(default_factory=list)
    _fixed: dict[int, tuple[list[Stretch], RankActivity, int]] = field(default_factory=dict)
    """Rank -> what will not change of its stretches, up to which sample, and how many samples that are."""
    _unassigned: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Rank -> seconds that it waited for ranks that were not seen yet."""
    _items: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    """Rank -> the item that it has, and when that was seen first and last."""
    _spacing: float = 0.0
    _sentence: tuple[str, float] = ("", 0.0)

    def add(self, activity: SessionActivity) -> None:
        """Record what ranks do now; nothing while they get ready for the next cell."""
        if activity.phase in ("none", "starting", "moving"):
            return
        if activity.began_ns != self.began_ns:
            self.__init__(activity.began_ns)  # type: ignore[misc]
        before = self._samples[-1][1] if self._samples else {}
        sample = {rank.rank: rank for rank in activity.ranks}
        for rank in activity.ranks:
            old = before[rank.rank].waiting if rank.rank in before else 0.0
            self._assign(rank, max(0.0, rank.waiting - old), activity.culprits)
            self._time_item(rank, activity.seconds)
            self.lines[rank.line, rank.inside] += 1
        while self._samples and activity.seconds <= self._samples[-1][0]:
            self._samples.pop()  # a cell ends when its last rank has ended it, which is noticed later
            self._fixed.clear()
        if len(self._samples) > 1 and activity.seconds < self._samples[-2][0] + self._spacing:
            self._samples.pop()  # the newest is kept until it is old enough
        self._samples.append((activity.seconds, sample))
        if len(self._samples) > MOST_SAMPLES:
            del self._samples[1:-1:2]
            self._fixed.clear()
            self._spacing = activity.seconds / len(self._samples)

    @property
    def started(self) -> bool:
        """Whether anything was seen."""
        return bool(self._samples)

    def _assign(self, rank: RankActivity, waited: float, culprits: tuple[int, ...]) -> None:
        """Count a wait for the ranks that all others wait for; one that is over was as the next one is."""
        self._unassigned[rank.rank] += waited
        roots = [other for other in rank.waits_for if other in culprits] or culprits
        if rank.state == "waiting" and roots:
            seconds = self._unassigned.pop(rank.rank)
            for root in roots:
                self.awaited[root] += seconds / len(roots)

    def _time_item(self, rank: RankActivity, now: float) -> None:
        item, since, last = self._items.pop(rank.rank, (-1, now, now))
        same = rank.item == item and rank.state == "computing"
        if item >= 0:  # the item before, which ended since the last look; or still
            ended = now if same else (last + min(now, rank.finished or now)) / 2
            self.slowest = max(self.slowest, (ended - since, item))
        if rank.item >= 0 and rank.state == "computing":
            self._items[rank.rank] = rank.item, since if same else now, now

    def item_seconds(self, rank: int, now: float) -> float:
        """Return for how long a rank has had its item."""
        return now - self._items[rank][1] if rank in self._items else 0.0

    def stretches(self, rank: int) -> list[Stretch]:
        """Return what a rank did, in order."""
        fixed, before, seen = self._fixed.get(rank, ([], _NOTHING, 0))
        for end, sample in self._samples[seen:-1]:
            now = sample.get(rank)
            # how long many short operations have waited is known later: then this is not final
            if now is not None and now.operations is not None and end:
                fixed.append(Stretch.between(fixed, before, now, end))
                before = now
        self._fixed[rank] = fixed, before, max(0, len(self._samples) - 1)
        for end, sample in self._samples[-1:]:
            if rank in sample and end > (fixed[-1].end if fixed else 0.0):
                newest = Stretch.between(fixed, before, sample[rank], end)
                until = newest.begin + newest.computing + newest.waiting + newest.moving
                return [*fixed, newest._replace(end=min(end, until))]  # it may have ended
        return fixed

    def steady(self, sentence: str, activity: SessionActivity) -> str:
        """Return a sentence, or the one before as long as it has stood for less than a second."""
        old, since = self._sentence
        now = time.monotonic()
        counts = activity.phase != "running" or activity.items  # a count is read at a glance
        if counts or not old or now - since >= SENTENCE_SECONDS:
            self._sentence = (sentence, since if sentence == old else now)
        return self._sentence[0]


# What stands out, from sums since the cell began.

_ABSENT = re.compile(rf"ranks? (\d[-\d, ]*) (?={LEFT_OUT} )")
"""Begins the error about ranks that left a call out."""
LONGEST = 160
"""Characters of an error in a title; a deadlock of many ranks has more."""
GETTING_READY = ("none", "starting", "moving")


def verdict(activity: SessionActivity, course: Course) -> str:
    """Return what stands out: ``rank 2 holds the others up: they wait for it 66 % of their time``."""
    match activity.phase:
        case "none":
            return f"{ranks_text(activity.ranks)}: no cell has run yet"
        case "starting":
            count = activity.starting_ranks
            return f"starting {count} rank{'s' * (count != 1)}"
        case "moving":
            size = size_text(activity.moving_nbytes)
            return f"moving {size} of `{activity.moving_name}` into shared memory"
        case "interrupted":
            return "interrupted"
        case "failed":
            return _failed(activity)
    if failed := [rank for rank in activity.ranks if took_part(rank) and rank.state in ("failed", "dead")]:
        return _ended_badly(failed[0])
    running = activity.phase == "running"
    if activity.items:
        done = sum(rank.items for rank in activity.ranks)
        return f"{done:,}" + f" of {activity.items:,}" * (activity.items > 0) + " items done"
    waiting, whole = _waiting(activity.ranks), _whole(activity.ranks)
    if (rank := held_up_by(activity, course)) >= 0:
        others = [other for other in activity.ranks if other.rank != rank]
        share = min(_awaited(activity, course)[rank], _waiting(others)) / (_whole(others) or 1)
        what = "holds the others up: they wait" if running else "held the others up: they waited"
        return f"rank {rank} {what} for it {share:.0%} of their time".replace("%", " %")
    if whole and waiting >= WORTH * whole:
        verb = "is" if running else "was"
        return f"no rank stands out: {waiting / whole:.0%} of the time {verb} waiting".replace("%", " %")
    if running and any(rank.operations is None for rank in activity.ranks if took_part(rank)):
        return "the ranks call many short operations; how long they wait is known later"
    if running:
        return "the ranks compute" if whole else "the cell begins"
    return "finished" + (
        f": {waiting / whole:.0%} of the time was waiting".replace("%", " %") if whole else ""
    )


def held_up_by(activity: SessionActivity, course: Course) -> int:
    """Return the rank that others waited for in more than half of all their waiting; -1: none stands out."""
    return stands_out(_awaited(activity, course), _waiting(activity.ranks), _whole(activity.ranks))


def _awaited(activity: SessionActivity, course: Course) -> dict[int, float]:
    """Return for how long each rank was waited for: as the ranks noted it, or as it was seen."""
    noted = {rank: sum(row[rank] for row in activity.waited) for rank in range(len(activity.waited))}
    seen = course.awaited if course.began_ns == activity.began_ns else {}
    return noted if sum(noted.values()) > _waiting(activity.ranks) / 2 else dict(seen)


def marked_ranks(activity: SessionActivity, course: Course) -> frozenset[int]:
    """Return the ranks that the sentence is about: the others wait for them, or the cell failed there."""
    if activity.phase == "failed":
        if absent := _ABSENT.match(activity.failed_between):
            named = absent[1].replace(" ", "").split(",")
            spans = (part.partition("-") for part in named)
            return frozenset(n for a, _, b in spans for n in range(int(a), int(b or a) + 1))
        return frozenset() if activity.failed_between else frozenset({activity.failed_rank} - {-1})
    if activity.phase in GETTING_READY:
        return frozenset()
    bad = {rank.rank for rank in activity.ranks if rank.state in ("failed", "dead") and took_part(rank)}
    return frozenset(bad or {held_up_by(activity, course)} - {-1})


def took_part(rank: RankActivity) -> bool:
    """Return whether the cell that runs, or ran last, is or was on this rank."""
    return rank.state not in ("idle", "starting", "unseen") or bool(
        rank.computing or rank.waiting or rank.moving or rank.finished
    )


def when(activity: SessionActivity) -> str:
    """Return which cell it is and how far it is: ``In[27] runs · 11.6 s``."""
    if activity.phase in GETTING_READY:
        return ""
    cell = f"In[{activity.number}]" if activity.number else "a call" if activity.running else "the last call"
    time = f"{activity.seconds:.1f} s" if activity.seconds >= 1 else seconds_text(activity.seconds)
    return f"{cell} runs · {time}" if activity.running else f"{cell} {activity.phase} after {time}"


def _failed(activity: SessionActivity) -> str:
    if between := activity.failed_between:
        return between[:LONGEST] + " …" * (len(between) > LONGEST)
    failed = next((rank for rank in activity.ranks if rank.rank == activity.failed_rank), None)
    if failed is None:
        return "the cell failed"
    alike = [rank for rank in activity.ranks if rank.state == "failed"]
    more = f", the first of {ranks_text(alike)} that failed" if failed in alike and len(alike) > 1 else ""
    return _ended_badly(replace(failed, line=activity.failed_line)) + more


def _ended_badly(rank: RankActivity) -> str:
    line = f" on line {rank.line}" if rank.line else ""
    if rank.state != "dead":
        return f"rank {rank.rank} failed{line}"
    how, colon, why = (rank.operation or "died").partition(":")
    return f"rank {rank.rank} {how}{line}{colon}{why}"


def _waiting(ranks: Iterable[RankActivity]) -> float:
    return sum(rank.waiting for rank in ranks)


def _whole(ranks: Iterable[RankActivity]) -> float:
    return sum(map(spent, ranks))


def spent(rank: RankActivity) -> float:
    """Return the seconds that a rank has spent in the cell."""
    return rank.computing + rank.waiting + rank.moving


def ranks_text(ranks: Iterable[RankActivity]) -> str:
    """Return their numbers: ``ranks 0-1, 3``."""
    return rank_list([rank.rank for rank in ranks])


def progress(activity: SessionActivity, course: Course) -> str:
    """Return how far a map is, and on which lines of the cell ranks are."""
    parts = []
    if activity.items:
        done = sum(rank.items for rank in activity.ranks)
        if activity.running and done and activity.items > 0:
            left = activity.seconds * (activity.items / done - 1)
            parts.append(f"about {seconds_text(max(1.0, round(left)))} left")
        seconds, item = course.slowest
        if item >= 0 and seconds >= 1:
            parts.append(f"the slowest took {seconds:.1f} s: item {item}")
    if activity.running and (bars := [rank for rank in activity.ranks if rank.step < rank.steps]):
        last = max(bars, key=lambda rank: rank.seconds_left)
        parts.append(f"step {last.step:,} of {last.steps:,} (rank {last.rank})")
        parts.append(f"about {seconds_text(max(1.0, round(last.seconds_left)))} left")
    loops = {(rank.line, rank.last_line) for rank in activity.ranks if rank.last_line > rank.line}
    if len(loops) == 1:
        parts.append("in lines {}-{}".format(*(loop := loops.pop())))
        seen = {line: count for (first, line), count in course.lines.items() if first == loop[0] and line}
        mostly = [line for line, count in seen.items() if count > sum(seen.values()) / 2]
        parts[-1] += f", mostly at line {mostly[0]}" if mostly else ""
    return " · ".join(parts)
