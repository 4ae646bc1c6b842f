"""Vector clocks of a checked cell: which intervals of other ranks come before what a rank does.

The clock of a rank holds, for each rank, how many of its intervals lie before: 3 stands for the intervals
0, 1 and 2.  A rank publishes its clock under a key; a rank that acquires the key takes the larger counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from nbparallel.distributed.races.access_log import Acquire, Key, Publish

Events = Sequence[Publish | Acquire]
"""Of one rank, in program order."""


class VectorClocks:
    """Passes through the events of all ranks, each after what it depends on.

    Parameters
    ----------
    events : sequence of Events
        Of each rank; below, a rank is its place in this sequence.

    Attributes
    ----------
    clocks : list of lists of int
        Of each rank, in the interval that `intervals` has yielded last for it.
    """

    def __init__(self, events: Sequence[Events]) -> None:
        self.clocks = [[0] * len(events) for _ in events]
        self._events = events
        self._position = [0] * len(events)
        self._nothing = (0,) * len(events)
        self._published: dict[Key, tuple[int, ...]] = {}
        self._joined: dict[tuple[Key, ...], tuple[int, ...]] = {}
        self._expected = _published_keys(events)
        self._before_turn = _previous_releases(events, self._expected)
        self._waiting: defaultdict[Key, list[int]] = defaultdict(list)
        self._ready: list[int] = []

    def intervals(self) -> Iterator[tuple[int, int]]:
        """Yield all intervals, each after those that come before it: the rank, and the interval's number."""
        position = self._position
        for rank in range(len(self._events)):
            yield rank, 0
        self._ready = list(range(len(self._events)))[::-1]
        while self._ready or self._release_one():
            rank = self._ready.pop()
            events = self._events[rank]
            while position[rank] < len(events) and self._apply(rank, events[position[rank]]):
                position[rank] += 1
                yield rank, position[rank]

    def _apply(self, rank: int, event: Publish | Acquire) -> bool:
        """Apply an event; return False if it must wait for another rank, which then makes this one ready."""
        if isinstance(event, Publish):
            snapshot = self.clocks[rank].copy()
            snapshot[rank] = self._position[rank] + 1
            earlier = self._published.get(event.key)
            if earlier is not None:
                snapshot = list(map(max, snapshot, earlier))
            self._published[event.key] = tuple(snapshot)
            self._ready += self._waiting.pop(event.key, ())
            return True
        joined = self._joined.get(event.keys)
        if joined is None:
            for key in event.keys:
                key = self._before_turn.get(key, key)
                if key in self._expected and key not in self._published:
                    self._waiting[key].append(rank)
                    return False
            joined = self._join(event.keys)
        self.clocks[rank][:] = map(max, self.clocks[rank], joined)
        return True

    def _join(self, keys: tuple[Key, ...]) -> tuple[int, ...]:
        """Return what is before a rank that acquires keys, all of which are published or never will be."""
        before = self._before_turn
        found = [self._published.get(before.get(key, key), self._nothing) for key in keys]
        joined = tuple(map(max, self._nothing, *found))
        if len(keys) > 1:  # a collective: its members acquire the same keys
            self._joined[keys] = joined
        return joined

    def _release_one(self) -> bool:
        """Pass one event that waits for itself: logs that contradict each other must not end the search."""
        for rank, events in enumerate(self._events):
            event = events[self._position[rank]] if self._position[rank] < len(events) else None
            if isinstance(event, Acquire):
                for waiting in self._waiting.values():
                    waiting[:] = [other for other in waiting if other != rank]
                self._expected -= {self._before_turn.get(key, key) for key in event.keys}
                self._ready.append(rank)
                return True
        return False


def _published_keys(events: Sequence[Events]) -> set[Key]:
    return {event.key for own in events for event in own if isinstance(event, Publish)}


def _previous_releases(events: Sequence[Events], published: set[Key]) -> Mapping[Key, Key]:
    """Return for each turn of a lock the release that it comes after.

    A turn's key is ``("turn", "lock", name, rank, number, time in ns)``, that of its release ``("lock", name,
    rank, number)``.  A turn without a release, of a rank that died, is passed over: what came before it comes
    before the next one, too.  Number 0 releases what an earlier cell has acquired.
    """
    turns: defaultdict[Key, list[tuple[int, Key, Key]]] = defaultdict(list)
    for own in events:
        for event in own:
            if isinstance(event, Acquire):
                for key in event.keys:
                    if key[:1] == ("turn",):
                        turns[key[1:3]].append((key[5], key, key[1:5]))
    earlier = {key[:2]: key for key in published if key[:1] == ("lock",) and key[3] == 0} if turns else {}
    before: dict[Key, Key] = {}
    for lock, found in turns.items():
        found.sort(key=lambda turn: turn[0])
        previous = earlier.get(lock)
        for _, key, release in found:
            if previous is not None:
                before[key] = previous
            if release in published:
                previous = release
    return before
