"""Segments of a session: the process that made each, its holders, and the notebook's names in it.

There are three sources: this process knows its own and the fetched segments, the supervisor the holders of
registered ones, and each rank reports what it made at the end of a task.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbparallel import sharing
from nbparallel.errors import grouped, rank_list
from nbparallel.session.names.delivery import PREDEFINED_NAMES
from nbparallel.session.names.free_names import is_ipythons
from nbparallel.session.processes.rank_handle import RankHandle
from nbparallel.sharing import SegmentStatistics, Store
from nbparallel.sharing.memory.memory_limits import limits
from nbparallel.sharing.strategies.named_files import DIRECTORY
from nbparallel.transfer.variable_info import describe_variable, has_memory
from nbparallel.wire.inspection import LedgerRow, NamespaceReport, Origin, VariableInfo
from nbparallel.wire.messages import RankSegment
from nbparallel.wire.segments import creator_of
from nbparallel.wire.system import file_system_room

# Names of a session: the notebook's variables and those of all ranks, compared.


@dataclass(frozen=True, slots=True)
class NameStatistics:
    """One name, wherever it is."""

    name: str
    """The name."""
    how: str
    """``shared``, ``copied``, ``own`` (assigned by the ranks), ``differs``, or ``notebook only``."""
    notebook: VariableInfo | None
    """In the notebook; None: it has no such name."""
    ranks: Mapping[int, VariableInfo]
    """On the ranks that answered and have it."""
    view_of: str
    """The notebook's name for shared memory that the ranks' own arrays are parts of; or empty."""
    outdated: bool
    """Whether the notebook's name is bound to other memory by now; the next cell that uses it sends that."""
    hides: str
    """What the name of ranks hides: ``the predefined``, ``the notebook's``, or nothing."""


@dataclass(frozen=True, slots=True)
class SessionNames:
    """All names of a session at one moment."""

    names: tuple[NameStatistics, ...]
    """In alphabetical order."""
    answered: tuple[int, ...]
    """Ranks that replied."""
    busy: tuple[int, ...]
    """Ranks that were running a task, and were not asked."""
    dead: tuple[int, ...]
    """Ranks whose process has ended."""
    silent: Mapping[int, str]
    """Ranks without a reply -> the reason, if known."""
    left_out: int
    """Number of names of ranks that were left out, because there are too many."""


def compare(
    namespace: Mapping[str, Any],
    hidden: Mapping[str, Any],
    store: Store,
    handles: Sequence[RankHandle],
    reports: Mapping[int, NamespaceReport],
) -> SessionNames:
    """Compare the notebook's names with the reports of the ranks.

    Parameters
    ----------
    namespace : mapping
        The notebook's.
    hidden : mapping
        Names in it that are not the user's, with their values, as ``shell.user_ns_hidden``.
    reports : mapping
        Rank -> its reply.
    """
    known = {
        rank: {s.name: s for s in answer.names} for rank, answer in reports.items() if not answer.problem
    }
    dead = tuple(handle.rank for handle in handles if not handle.alive)
    busy = tuple(h.rank for h in handles if h.busy and h.rank not in (*reports, *dead))
    silent = {
        handle.rank: reports[handle.rank].problem if handle.rank in reports else ""
        for handle in handles
        if handle.rank not in (*known, *busy, *dead)
    }
    return SessionNames(
        names=compare_names(namespace, hidden, store, known),
        answered=tuple(sorted(known)),
        busy=busy,
        dead=dead,
        silent=silent,
        left_out=sum(answer.left_out for answer in reports.values()),
    )


def compare_names(
    namespace: Mapping[str, Any],
    hidden: Mapping[str, Any],
    store: Store,
    known: Mapping[int, Mapping[str, VariableInfo]],
) -> tuple[NameStatistics, ...]:
    """Compare the notebook's names with what each rank has by each name, as far as that is known."""
    here = {
        name: describe_variable(name, value, store)
        for name, value in list(namespace.items())
        if _is_users(name, value, hidden)
    }
    everything = sorted({*here, *(name for names in known.values() for name in names)})
    return tuple(
        _compared(name, here, {rank: names[name] for rank, names in known.items() if name in names})
        for name in everything
    )


def _is_users(name: str, value: Any, hidden: Mapping[str, Any]) -> bool:
    return not (
        name.startswith("_")
        or is_ipythons(name)
        or issubclass(type(value), types.ModuleType)
        or (name in hidden and hidden[name] is value)
    )


def _compared(
    name: str, here: Mapping[str, VariableInfo], ranks: Mapping[int, VariableInfo]
) -> NameStatistics:
    mine, theirs = here.get(name), list(ranks.values())
    outdated = any(s.origin is Origin.SHARED and not _same_memory(s, mine) for s in theirs)
    if not theirs:
        how = "notebook only"
    elif len({(s.looks, s.origin) for s in theirs}) > 1:
        how = "differs"
    else:
        how = theirs[0].origin.value
    views = {_owner_of(s, here) for s in theirs if s.origin is Origin.OWN}
    view_of = views.pop() if len(views) == 1 else ""
    own = any(s.origin is Origin.OWN for s in theirs)
    hides = "the predefined" if theirs and name in PREDEFINED_NAMES else ""
    hides = hides or ("the notebook's" if own and mine is not None else "")
    return NameStatistics(name, how, mine, dict(sorted(ranks.items())), view_of, outdated, hides)


def _same_memory(one: VariableInfo, other: VariableInfo | None) -> bool:
    return other is not None and (one.segment, one.start, one.stop, one.form) == (
        other.segment,
        other.start,
        other.stop,
        other.form,
    )


def _owner_of(part: VariableInfo, here: Mapping[str, VariableInfo]) -> str:
    """Return the notebook's largest array that holds all bytes of a rank's own one, or an empty string."""
    owners = [
        (whole.stop - whole.start, whole.name)
        for whole in here.values()
        if part.segment
        and whole.segment == part.segment
        and whole.start <= part.start
        and part.stop <= whole.stop
    ]
    return max(owners)[1] if owners else ""


NOTEBOOK = "notebook"
ENDED = "ended rank"
NO_NAME = "no name"
_NAMES = 4
"""Names that are shown of one segment."""


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """One segment of a session at one moment."""

    segment: int
    """Its id."""
    strategy: str
    """Name of the sharing strategy that made it; empty if unknown."""
    nbytes: int
    """Size of the memory in bytes."""
    phase: str
    """``live``, or ``released``: other processes than its maker hold it."""
    maker: str
    """``notebook``, ``rank 2``, ``ended rank``, or ``host b``, where it was sent as the notebook's."""
    ranks: tuple[int, ...]
    """Ranks that have it, ascending."""
    notebook: bool
    """Whether the notebook has it."""
    writable: bool
    """Whether every process of the session may write to it."""
    read_only: bool
    """Whether no process may: a file that the notebook opened for reading only."""
    names: tuple[str, ...]
    """The notebook's names of arrays in it, views included, sorted."""
    host: str = ""
    """The host whose memory it is; empty: this machine's."""

    @property
    def users(self) -> str:
        """Which processes use it: ``notebook, ranks 0-3``."""
        return ", ".join([NOTEBOOK] * self.notebook + [rank_list(self.ranks)] * bool(self.ranks))


@dataclass(frozen=True, slots=True)
class SharedTotals:
    """The shared memory of a session, in sums."""

    segments: int
    """Segments in use that notebook and ranks made; a rank's as of the end of its last task."""
    nbytes: int
    """Their bytes."""
    pooled_nbytes: int
    """Memory that is kept for the next arrays, in bytes."""
    by_rank: Mapping[int, int]
    """Bytes of the segments that each rank made."""


def sum_up(
    own: Iterable[SegmentStatistics], handles: Iterable[RankHandle], released: Iterable[RankSegment]
) -> SharedTotals:
    """Return the sums; `released`: what ranks report and no process holds any more (`released_since`)."""
    own, gone = list(own), list(released)
    alive = [handle for handle in handles if handle.alive]
    made = [segment.nbytes for segment in own if segment.own and segment.phase != "pooled"]
    by_rank = {
        handle.rank: handle.memory.nbytes
        - sum(segment.nbytes for segment in gone if creator_of(segment.segment) == handle.client)
        for handle in alive
    }
    return SharedTotals(
        segments=len(made) + sum(handle.memory.count for handle in alive) - len(gone),
        nbytes=sum(made) + sum(by_rank.values()),
        pooled_nbytes=sum(segment.nbytes for segment in own if segment.phase == "pooled")
        + sum(handle.memory.pooled_nbytes for handle in alive),
        by_rank=by_rank,
    )


def memory_extent() -> tuple[int | None, int | None]:
    """Return how many bytes new arrays can still take, and all of that memory; None if unknown."""
    found = [(limit.free, limit.whole) for limit in limits()]
    if sharing.get_sharing_strategy() == "file_system" and (room := file_system_room(DIRECTORY)):
        found.append(room)
    free, whole = min(found, default=(None, None))
    return None if free is None else max(0, free), whole


def gather(
    own: Iterable[SegmentStatistics],
    ledger: Iterable[LedgerRow],
    handles: Iterable[RankHandle],
    names: Mapping[int, tuple[str, ...]],
) -> tuple[SharedSegment, ...]:
    """Combine the three sources; the largest segment first, pooled memory left out.

    Parameters
    ----------
    own : iterable of SegmentStatistics
        What this process has.
    names : mapping
        Segment id -> the notebook's names, as `names_by_segment` finds them.
    """
    here = {seen.segment: seen for seen in own if seen.phase != "pooled"}
    announced = {row.segment: row for row in ledger if row.holders or row.messages}
    alive = [handle for handle in handles if handle.alive]
    rank_of = {handle.client: handle.rank for handle in alive}
    gone = {made.segment for made in released_since(announced.values(), alive)}
    reported = {made.segment: made for handle in alive for made in handle.memory.segments}
    reported = {n: made for n, made in reported.items() if n not in gone}
    found = [
        _record(n, here.get(n) or reported.get(n), announced.get(n), rank_of, names.get(n, ()))
        for n in {**here, **announced, **reported}
    ]
    return tuple(sorted(found, key=lambda record: (-record.nbytes, record.segment)))


def released_since(ledger: Iterable[LedgerRow], handles: Iterable[RankHandle]) -> list[RankSegment]:
    """Return segments that ranks had released when they reported, and that the ledger does not hold."""
    known = {row.segment for row in ledger if row.holders or row.messages}
    reported = (made for handle in handles if handle.alive for made in handle.memory.segments)
    return [made for made in reported if made.phase != "live" and made.segment not in known]


def reports_released(handles: Iterable[RankHandle]) -> bool:
    """Return whether ranks report memory that they had released: only the ledger knows if others hold it."""
    return any(made.phase != "live" for handle in handles if handle.alive for made in handle.memory.segments)


def _record(
    segment: int,
    known: SegmentStatistics | RankSegment | None,
    row: LedgerRow | None,
    rank_of: Mapping[int, int],
    names: tuple[str, ...],
) -> SharedSegment:
    maker = creator_of(segment)
    holders = set() if row is None else set(row.holders)
    if known is not None and known.phase == "live":
        holders.add(maker if isinstance(known, RankSegment) else 0)
    size = known if known is not None else row
    return SharedSegment(
        segment=segment,
        strategy="" if known is None else known.strategy,
        nbytes=0 if size is None else size.nbytes,
        phase="live" if known is None else known.phase,
        maker=NOTEBOOK if maker == 0 else f"rank {rank_of[maker]}" if maker in rank_of else ENDED,
        ranks=tuple(sorted(rank_of[client] for client in holders if client in rank_of)),
        notebook=0 in holders,
        writable=row.writable if row is not None else known is not None and known.writable,
        read_only=isinstance(known, SegmentStatistics) and known.read_only,
        names=names,
    )


def names_by_segment(namespace: Mapping[str, Any], store: Store) -> dict[int, tuple[str, ...]]:
    """Return which names of a namespace lie in which segment; IPython's own names are left out."""
    places = [
        describe_variable(name, value, store)
        for name, value in list(namespace.items())
        if has_memory(value) and not is_ipythons(name)
    ]
    found = grouped(
        (segment, place.name)
        for place in places
        for segment in place.segments or (place.segment,) * bool(place.segment)
    )
    return {segment: tuple(sorted(names)) for segment, names in found.items()}


def names_text(names: Sequence[str]) -> str:
    """Return the names of a segment as tables show them."""
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return ", ".join(names[:_NAMES]) + more or NO_NAME
