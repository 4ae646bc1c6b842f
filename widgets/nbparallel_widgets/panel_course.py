"""What the ranks did since a cell began, as a panel saw it: samples in order, and which held them up."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nbparallel.session.monitoring.activity import RankActivity, SessionActivity

MOST_SAMPLES = 120
"""When there are more, each second one goes: the cell is kept whole, at half the resolution."""
SENTENCE_SECONDS = 1.0
"""How long a sentence about a cell that runs stays at least, so that it can be read."""


class RankSample(NamedTuple):
    """What one rank has done since the cell began, in seconds."""

    computing: float
    waiting: float
    moving: float
    items: int
    """Items that it has done."""
    known: bool
    """Whether this is final: how long many short operations have waited is known later."""

    @classmethod
    def of(cls, rank: RankActivity) -> RankSample:
        """Return what it has done until now."""
        return cls(rank.computing, rank.waiting, rank.moving, rank.items, rank.operations is not None)


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
    def between(cls, earlier: Sequence[Stretch], before: RankSample, now: RankSample, end: float) -> Stretch:
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
    _samples: list[tuple[float, dict[int, RankSample]]] = field(default_factory=list)
    _fixed: dict[int, tuple[list[Stretch], RankSample, int]] = field(default_factory=dict)
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
        sample = {rank.rank: RankSample.of(rank) for rank in activity.ranks}
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
        fixed, before, seen = self._fixed.get(rank, ([], RankSample(0.0, 0.0, 0.0, 0, True), 0))
        for end, sample in self._samples[seen:-1]:
            now = sample.get(rank)
            if now is not None and now.known and end:
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
