"""Search for races in the logs of all ranks of a checked cell."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import or_

from nbparallel.distributed.races.access_log import POSSIBLE, READ, WRITE, AccessLog, ArrayName, Site
from nbparallel.distributed.races.array_names import ArrayNames, Place
from nbparallel.distributed.races.byte_sets import ByteSet, Overlap
from nbparallel.distributed.races.walk import MOST_MEETINGS, Conflict, Walk, join_logs
from nbparallel.errors import grouped, rank_list
from nbparallel.errors.text.escaping import escape_html, visible

MOST_SHOWN = 5
"""Races of a report."""


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
        counts = Counter(
            "harmless race" if race.harmless else "data race" if race.certain else "possible race"
            for race in self.races
        )
        parts = [f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items()]
        if not parts and not self.accesses:  # an error came first, or all arrays are private
            return "no race: no access to shared arrays was seen"
        return ", ".join(parts) or f"no race among {self.accesses:,} access{'es' * (self.accesses != 1)}"

    def lines(self) -> list[str]:
        """Return what stands below the title."""
        lines = [str(race) for race in self.races[:MOST_SHOWN]]
        if len(self.races) > MOST_SHOWN:
            lines.append(f"and {len(self.races) - MOST_SHOWN} more")
        return [*lines, *(f"not checked: {text}" for text in self.not_checked)]

    def __str__(self) -> str:
        return visible("\n".join([self.title, *self.lines()]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{escape_html(line)}</li>" for line in self.lines())
        items = re.sub(r"`([^`]*)`", r"<code>\1</code>", items)
        return f"<p><b>{escape_html(self.title)}</b></p>" + (f"<ul>{items}</ul>" if items else "")


BOTH = READ | WRITE
_VERBS = {READ: ("read", "read"), WRITE: ("wrote", "written"), BOTH: ("read and wrote", "read and written")}

OWN_PART = "have each rank write its own part: `dist.local_slice`"
BARRIER = "`barrier()` between them"
IF_IN_ORDER = f"{BARRIER} if one is to come first, else "


def line_text(site: Site) -> str:
    """Name a line, and its cell if it is another one."""
    line = f"line {site.line}" if site.line else "a line that is not known"
    return f"{line} of {site.label}" if site.label else line


def verb(kinds: Collection[int]) -> str:
    """Return what accesses did."""
    surely = _bits(kind for kind in kinds if not kind & POSSIBLE)
    possibly = _bits(kind for kind in kinds if kind & POSSIBLE) & ~surely
    parts = [_VERBS[surely][0]] if surely else []
    parts += [f"may have {_VERBS[possibly][1]}"] if possibly else []
    return " and ".join(parts)


def door_text(site: Site, kinds: Iterable[int]) -> str:
    """Return through which function it may have happened."""
    if not site.door:
        return ""
    return f" (passed to `{site.door}`{', which may write' * any(kind & WRITE for kind in kinds)})"


def advice_for(
    place: Place, first: int, second: int, *, same_line: bool, same_elements: bool, is_mutual: bool = False
) -> str:
    """Return what to do if two lines, or one on several ranks, read and write what they have in common.

    `is_mutual`: ranks have written what they have read, as where each takes the next number and counts on.
    """
    is_one = "[" in place.indices and ":" not in place.indices
    lock = f'`with dist.lock("{place.array or "name"}"):` around'
    if same_line:
        if first == second == WRITE:
            return OWN_PART
        if not first == second == BOTH:
            return "have all ranks read first, then `barrier()`, then write; or write into a second array"
        if not same_elements:
            return f"{OWN_PART}; or {lock} it"
        if is_one:
            return f"{lock} it, or add up your own and `all_reduce`"
        return (
            "if it is to be done once, each rank its own part (`dist.local_slice`), or a second array; "
            f"if all are to add to it, {lock} it, or `all_reduce`"
        )
    if is_mutual and is_one and not first & second & WRITE:
        return f"{IF_IN_ORDER}{lock} both together"
    if first == second == BOTH:
        return f"{IF_IN_ORDER * (not is_one)}{lock} each of the two"
    return f"{IF_IN_ORDER}{OWN_PART}" if first & second & WRITE else BARRIER


def joined(parts: Sequence[str]) -> str:
    """Return parts of a sentence as a list in words."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


MOST_ALIKE = 2
"""Further places of a race that are named."""
_Side = dict[int, set[int]]
"""Of each rank, the kinds of its accesses."""


@dataclass(slots=True)
class _Group:
    """What a line, or two, did at one place."""

    place: Place
    start: int
    """Its first byte."""
    sides: dict[Site, _Side] = field(default_factory=dict)
    parts: dict[Site, set[Place]] = field(default_factory=dict)
    """What each line has touched altogether."""

    @property
    def ranks(self) -> set[int]:
        """All that met there."""
        return set().union(*self.sides.values())


@dataclass(slots=True)
class _Fold:
    """All that a line, or two, did to an array without an order."""

    certain: bool
    harmless: bool = True
    comparable: bool = True
    complete: bool = True
    """All places are in `groups`."""
    groups: dict[Place, _Group] = field(default_factory=dict)


def fold_conflicts(
    conflicts: Iterable[Conflict], ranks: Sequence[int], names: ArrayNames
) -> tuple[Race, ...]:
    """Return the races: certain ones first, then possible ones, then harmless ones.

    Parameters
    ----------
    conflicts : iterable of Conflict
        Ranks in them are places in the sequence below.
    ranks : sequence of int
        Their numbers.
    names : ArrayNames
        Of shared arrays.
    """
    folds: dict[tuple[object, ...], _Fold] = {}

    @cache
    def whole(segment: int, touched: ByteSet) -> Place:
        return names.place_of(segment, Overlap(touched.start, touched.stop), touched)

    for conflict in conflicts:
        sites = frozenset((conflict.first.site, conflict.second.site))
        for meeting in conflict.meetings.values():
            place = names.place_of(conflict.segment, meeting.overlap, meeting.first, meeting.second)
            array = place.array or names.part_of(conflict.segment, meeting.overlap.start)
            fold = folds.setdefault(
                (conflict.segment, array, sites, conflict.certain), _Fold(conflict.certain)
            )
            fold.harmless &= conflict.harmless
            fold.complete &= len(conflict.meetings) < MOST_MEETINGS
            fold.comparable &= meeting.overlap.certain
            group = fold.groups.setdefault(place, _Group(place, meeting.overlap.start))
            for line, touched in ((conflict.first, meeting.first), (conflict.second, meeting.second)):
                group.sides.setdefault(line.site, {}).setdefault(ranks[line.rank], set()).add(line.kind)
                group.parts.setdefault(line.site, set()).add(whole(conflict.segment, touched))
    known = {(*key[:2], _lines(fold)) for key, fold in folds.items() if fold.certain}
    races = [
        _race(fold) for key, fold in folds.items() if fold.certain or (*key[:2], _lines(fold)) not in known
    ]
    return tuple(sorted(races, key=lambda race: (race.harmless, not race.certain)))


def _lines(fold: _Fold) -> frozenset[tuple[str, int]]:
    group = next(iter(fold.groups.values()))  # the sites of all are the same
    return frozenset((site.label, site.line) for site in group.sides)


def _race(fold: _Fold) -> Race:
    group, *others = sorted(fold.groups.values(), key=lambda group: group.start)
    sides = {site: _merged(one.sides[site] for one in fold.groups.values()) for site in group.sides}
    done = {site: set().union(*side.values()) for site, side in sides.items()}
    # the line that wrote comes first; if both did, the earlier one
    first, *rest = sorted(sides, key=lambda site: (not _bits(done[site]) & WRITE, site))
    second = rest[0] if rest else first
    sentence = _sentence(fold, group, first, second)
    if others:
        sentence += f" Likewise {_alike(others, complete=fold.complete)}."
    readers = group.sides[second].keys()
    advice = advice_for(
        group.place,
        *_group_kinds(group, first, second),
        same_line=first[:2] == second[:2],
        same_elements={group.place} == set().union(*group.parts.values()),
        is_mutual=len(group.sides[first]) > 1 and group.sides[first].keys() <= readers,
    )
    if not fold.certain and any(kind & POSSIBLE and kind & WRITE for kind in set().union(*done.values())):
        advice += "; if what it was passed to only reads, pass a copy"
    return Race(
        array=group.place.array,
        indices=group.place.indices,
        lines=(first.line, second.line),
        cells=(first.label, second.label),
        ranks=(tuple(sorted(sides[first])), tuple(sorted(sides[second]))),
        kinds=(verb(done[first]), verb(done[second])),
        certain=fold.certain,
        harmless=fold.harmless,
        sentence=sentence,
        advice="harmless, one rank is enough" if fold.harmless else advice,
    )


def _merged(sides: Iterable[_Side]) -> _Side:
    found: defaultdict[int, set[int]] = defaultdict(set)
    for side in sides:
        for rank, kinds in side.items():
            found[rank] |= kinds
    return found


def _bits(kinds: Iterable[int]) -> int:
    """Return what accesses of some kinds did."""
    return reduce(or_, kinds, 0) & BOTH


def _group_kinds(group: _Group, first: Site, second: Site) -> tuple[int, int]:
    """Return what two lines did; of one line, what the rank did that did most, and the one that did least."""
    if first[:2] != second[:2]:
        return _bits(set().union(*group.sides[first].values())), _bits(
            set().union(*group.sides[second].values())
        )
    done = sorted(map(_bits, _merged(group.sides.values()).values()))
    return done[-1], done[0]


def _sentence(fold: _Fold, group: _Group, first: Site, second: Site) -> str:
    """Return what happened at one place."""
    if fold.harmless:
        return f"{group.place}: {rank_list(group.ranks)} each stored the same number on {line_text(first)}."
    doing = _on_one_line(group, first) if first == second else _on_two_lines(group, (first, second))
    them = "them" if len(group.ranks) > 2 or doing.startswith("ranks") else "the two"
    text = f"{group.place}: {doing}, and nothing orders {them}."
    if not fold.comparable:
        text += " Whether they touched the same elements was too hard to find out."
    return text


def _on_one_line(group: _Group, site: Site) -> str:
    alike = grouped((frozenset(done), rank) for rank, done in group.sides[site].items())
    where = f"on {line_text(site)}{door_text(site, frozenset().union(*alike))}"
    if len(alike) == 1:
        ((kinds, ranks),) = alike.items()
        return f"{rank_list(ranks)} each {verb(kinds)} it {where}"
    order = sorted(alike, key=lambda kinds: (not _bits(kinds) & WRITE, min(alike[kinds])))
    return f"{joined([f'{rank_list(alike[kinds])} {verb(kinds)} it' for kinds in order])} {where}"


def _on_two_lines(group: _Group, sites: tuple[Site, Site]) -> str:
    parts = []
    for site in sites:
        side, touched = group.sides[site], group.parts[site]
        kinds = frozenset().union(*side.values())
        what = "it"
        if len(side) == 1 and len(touched) == 1:
            (place,) = touched
            if place != group.place and place.array and place.is_exact:
                what = str(place)
        parts.append(f"{rank_list(side)} {verb(kinds)} {what} on {line_text(site)}{door_text(site, kinds)}")
    return ", ".join(parts)


def _alike(others: Sequence[_Group], *, complete: bool) -> str:
    named = [f"{group.place} ({rank_list(group.ranks)})" for group in others[:MOST_ALIKE]]
    more = len(others) - len(named)
    if not complete:
        named.append("many more places")
    elif more:
        named.append(f"{more} more place{'s' * (more > 1)}")
    return joined(named)


def compare(
    logs: Iterable[AccessLog], names: Iterable[ArrayName] = (), lost: Collection[int] = ()
) -> RaceReport:
    """Return the data races of a cell.

    Parameters
    ----------
    logs : iterable of AccessLog
        Of all ranks, in any order; a rank can have several, one continuing the other.
    names : iterable of ArrayName
        The notebook's names; they are preferred to those of the ranks.
    lost : collection of int
        Ranks whose logs do not reach to the end of the cell.
    """
    joined_logs = join_logs(logs)
    array_names = ArrayNames(names, joined_logs)
    walk = Walk(joined_logs, array_names.part_of)
    walk.run()
    return RaceReport(
        races=fold_conflicts(walk.conflicts.values(), [log.rank for log in joined_logs], array_names),
        accesses=sum(log.total for log in joined_logs),
        not_checked=(
            *[f"what {rank_list(lost)} did: {'its' if len(lost) == 1 else 'their'} log was lost"]
            * bool(lost),
            *(["the rest of the cell, because too many accesses are in no order"] * walk.is_cut_short),
        ),
    )
