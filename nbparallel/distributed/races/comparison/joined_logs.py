"""Logs of ranks, put together: the parts of each rank's log in one, and sites under common numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from nbparallel.distributed.races.access_log import (
    WRITE,
    AccessLog,
    Acquire,
    ArrayName,
    BroadcastArray,
    MemoryAccess,
    Publish,
    Site,
)


@dataclass(slots=True)
class RankLog:
    """All that one rank has recorded in a cell."""

    rank: int
    events: list[Publish | Acquire] = field(default_factory=list)
    accesses: list[MemoryAccess] = field(default_factory=list)
    """In the order of their intervals; a site is the number that `JoinedLogs` gives it."""
    names: dict[ArrayName, None] = field(default_factory=dict)
    count: int = 0
    broadcasts: list[BroadcastArray] = field(default_factory=list)


class JoinedLogs:
    """Logs of a cell.

    Attributes
    ----------
    ranks : list of RankLog
        Ascending.
    sites : list of Site
        Of all ranks, each once.
    contended : set of int
        Segments that several ranks have touched, one of which has written: elsewhere there is no race.
    """

    def __init__(self, logs: Iterable[AccessLog]) -> None:
        self.sites: list[Site] = []
        self._numbers: dict[Site, int] = {}
        found: dict[int, RankLog] = {}
        for log in sorted(logs, key=lambda log: (log.rank, log.first_event)):
            self._add(found.setdefault(log.rank, RankLog(log.rank)), log)
        self.ranks = list(found.values())
        self._fill_broadcasts()
        self.contended = self._contended()

    def _add(self, joined: RankLog, log: AccessLog) -> None:
        joined.events += log.events
        joined.names.update(dict.fromkeys(log.names))
        joined.count += log.count
        sites = [self._number(site) for site in log.sites]
        if sites == list(range(len(sites))):  # as on most ranks: they run the same lines
            joined.accesses += log.accesses
        else:
            joined.accesses += [access._replace(site=sites[access.site]) for access in log.accesses]
        joined.broadcasts += [
            one._replace(access=one.access._replace(site=sites[one.access.site])) for one in log.broadcasts
        ]

    def _fill_broadcasts(self) -> None:
        """Add the writes of broadcasts into memory that is not the root's own."""
        roots = {
            one.key: (one.access.segment, one.access.region)
            for rank in self.ranks
            for one in rank.broadcasts
            if one.is_root
        }
        for rank in self.ranks:
            filled = [
                one.access
                for one in rank.broadcasts
                if not one.is_root and roots.get(one.key) != (one.access.segment, one.access.region)
            ]
            if filled:
                rank.accesses = sorted([*rank.accesses, *filled], key=attrgetter("interval"))

    def _number(self, site: Site) -> int:
        number = self._numbers.setdefault(site, len(self.sites))
        if number == len(self.sites):
            self.sites.append(site)
        return number

    def _contended(self) -> set[int]:
        written: set[int] = set()
        ranks_of: dict[int, set[int]] = {}
        for log in self.ranks:
            touched = {(access.segment, access.kind & WRITE) for access in log.accesses}
            for segment, writes in touched:
                ranks_of.setdefault(segment, set()).add(log.rank)
                if writes:
                    written.add(segment)
        return {segment for segment in written if len(ranks_of[segment]) > 1}
