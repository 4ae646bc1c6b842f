"""Folding: what pairs of ranks have met at becomes one race for each array and pair of lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nbparallel.distributed.races.access_log import POSSIBLE, WRITE, Site
from nbparallel.distributed.races.comparison.array_names import ArrayNames, Place
from nbparallel.distributed.races.comparison.overlap import Overlap
from nbparallel.distributed.races.comparison.race_report import Race
from nbparallel.distributed.races.comparison.sentences import (
    A_COPY,
    BOTH,
    ONE_RANK,
    advice_for,
    door_text,
    joined,
    line_text,
    ranks_text,
    verb,
)
from nbparallel.distributed.races.comparison.walk import MOST_MEETINGS, Conflict

MOST_ALIKE = 2
"""Further places of a race that are named."""
_Side = dict[int, set[int]]
"""Of each rank, the kinds of its accesses."""


@dataclass(slots=True)
class _Group:
    """What two lines did at one place."""

    place: Place
    start: int
    """Its first byte."""
    sides: tuple[_Side, _Side] = field(default_factory=lambda: ({}, {}))
    parts: tuple[set[Place], set[Place]] = field(default_factory=lambda: (set(), set()))
    """What each line has touched altogether."""

    @property
    def ranks(self) -> set[int]:
        """All that met there."""
        return {*self.sides[0], *self.sides[1]}

    def turned(self) -> _Group:
        """Return the same with the second line first."""
        return _Group(self.place, self.start, self.sides[::-1], self.parts[::-1])


@dataclass(slots=True)
class _Fold:
    """All that two lines did to an array without an order; the first one is named first."""

    sites: tuple[Site, Site]
    certain: bool
    harmless: bool = True
    comparable: bool = True
    complete: bool = True
    """All places are in `groups`."""
    groups: dict[Place, _Group] = field(default_factory=dict)

    def turned(self) -> _Fold:
        """Return the same with the second line first."""
        groups = {place: group.turned() for place, group in self.groups.items()}
        return _Fold(self.sites[::-1], self.certain, self.harmless, self.comparable, self.complete, groups)


def fold_conflicts(
    conflicts: Iterable[Conflict], ranks: Sequence[int], sites: Sequence[Site], names: ArrayNames
) -> tuple[Race, ...]:
    """Return the races: certain ones first, then possible ones, then harmless ones.

    Parameters
    ----------
    conflicts : iterable of Conflict
        Ranks and sites in them are places in the sequences below.
    ranks : sequence of int
        Their numbers.
    sites : sequence of Site
        Lines.
    names : ArrayNames
        Of shared arrays.
    """
    folds: dict[tuple[object, ...], _Fold] = {}
    parts: dict[tuple[int, int], Place] = {}
    for conflict in conflicts:
        lines = conflict.first, conflict.second
        # which line is named first is decided when all that they did is known
        order = (1, 0) if sites[lines[0].site] > sites[lines[1].site] else (0, 1)
        first, second = (lines[side] for side in order)
        for meeting in conflict.meetings.values():
            place = names.place_of(conflict.segment, meeting.overlap, meeting.first, meeting.second)
            key = (
                conflict.segment, place.array or names.part_of(conflict.segment, meeting.overlap.start),
                first.site, second.site, conflict.certain,
            )  # fmt: skip
            fold = folds.get(key)
            if fold is None:
                fold = folds[key] = _Fold((sites[first.site], sites[second.site]), conflict.certain)
            fold.harmless &= conflict.harmless
            fold.complete &= len(conflict.meetings) < MOST_MEETINGS
            fold.comparable &= meeting.overlap.certain
            group = fold.groups.setdefault(place, _Group(place, meeting.overlap.start))
            for side, line in enumerate((first, second)):
                group.sides[side].setdefault(ranks[line.rank], set()).add(line.kind)
                touched = meeting.second if order[side] else meeting.first
                part = parts.get((conflict.segment, id(touched)))
                if part is None:
                    whole = Overlap(touched.start, touched.stop)
                    part = names.place_of(conflict.segment, whole, touched)
                    parts[conflict.segment, id(touched)] = part
                group.parts[side].add(part)
    known = {(key[:2], _lines(fold)) for key, fold in folds.items() if fold.certain}
    races = [
        _race(fold) for key, fold in folds.items() if fold.certain or (key[:2], _lines(fold)) not in known
    ]
    return tuple(sorted(races, key=lambda race: (race.harmless, not race.certain)))


def _lines(fold: _Fold) -> frozenset[tuple[str, int]]:
    return frozenset((site.label, site.line) for site in fold.sites)


def _race(fold: _Fold) -> Race:
    if _done(fold, 1) & WRITE and not _done(fold, 0) & WRITE:
        fold = fold.turned()
    first, second = fold.sites
    group, *others = sorted(fold.groups.values(), key=lambda group: group.start)
    all_sides: tuple[_Side, _Side] = ({}, {})
    for found in fold.groups.values():
        for side, ranks in enumerate(found.sides):
            for rank, kinds in ranks.items():
                all_sides[side].setdefault(rank, set()).update(kinds)
    if first == second:
        all_sides = (_merged(*all_sides),) * 2
    done = [{kind for kinds in side.values() for kind in kinds} for side in all_sides]
    sentence = _sentence(fold, group)
    if others:
        sentence += f" Likewise {_alike(others, complete=fold.complete)}."
    same_elements = {group.place} == group.parts[0] | group.parts[1]
    advice = advice_for(
        *group.place[:2],
        *_group_kinds(fold, group),
        same_line=_is_one_line(fold),
        same_elements=same_elements,
        is_mutual=len(group.sides[0]) > 1 and group.sides[0].keys() <= group.sides[1].keys(),
    )
    if not fold.certain and any(kind & POSSIBLE and kind & WRITE for kinds in done for kind in kinds):
        advice += A_COPY
    return Race(
        array=group.place.array,
        indices=group.place.indices,
        lines=(first.line, second.line),
        cells=(first.label, second.label),
        ranks=(tuple(sorted(all_sides[0])), tuple(sorted(all_sides[1]))),
        kinds=(verb(done[0]), verb(done[1])),
        certain=fold.certain,
        harmless=fold.harmless,
        sentence=sentence,
        advice=ONE_RANK if fold.harmless else advice,
    )


def _done(fold: _Fold, side: int) -> int:
    """Return what one of the lines did anywhere."""
    return _bits(kinds for group in fold.groups.values() for kinds in group.sides[side].values())


def _is_one_line(fold: _Fold) -> bool:
    return len(_lines(fold)) == 1


def _merged(one: _Side, other: _Side) -> _Side:
    return {rank: one.get(rank, set()) | other.get(rank, set()) for rank in one.keys() | other.keys()}


def _group_kinds(fold: _Fold, group: _Group) -> tuple[int, int]:
    """Return what two lines did; of one line, what the rank did that did most, and the one that did least."""
    if not _is_one_line(fold):
        first, second = (_bits(kinds for kinds in side.values()) for side in group.sides)
        return first, second
    done = sorted(_bits([kinds]) for kinds in _merged(*group.sides).values())
    return done[-1], done[0]


def _bits(kinds: Iterable[set[int]]) -> int:
    bits = 0
    for found in kinds:
        for kind in found:
            bits |= kind & BOTH
    return bits


def _sentence(fold: _Fold, group: _Group) -> str:
    """Return what happened at one place."""
    if fold.harmless:
        ranks, line = ranks_text(group.ranks), line_text(fold.sites[0])
        return f"{group.place}: {ranks} each stored the same number on {line}."
    them = "them" if len(group.ranks) > 2 else "the two"
    doing = _on_one_line(fold, group) if fold.sites[0] == fold.sites[1] else _on_two_lines(fold, group)
    if doing.startswith("ranks"):
        them = "them"
    text = f"{group.place}: {doing}, and nothing orders {them}."
    if not fold.comparable:
        text += " Whether they touched the same elements was too hard to find out."
    return text


def _on_one_line(fold: _Fold, group: _Group) -> str:
    site = fold.sites[0]
    alike: dict[frozenset[int], list[int]] = {}
    for rank, done in _merged(*group.sides).items():
        alike.setdefault(frozenset(done), []).append(rank)
    if len(alike) == 1:
        ((kinds, ranks),) = alike.items()
        return f"{ranks_text(ranks)} each {verb(kinds)} it on {line_text(site)}{door_text(site, kinds)}"
    order = sorted(alike, key=lambda kinds: (not any(kind & WRITE for kind in kinds), min(alike[kinds])))
    parts = [f"{ranks_text(alike[kinds])} {verb(kinds)} it" for kinds in order]
    return f"{joined(parts)} on {line_text(site)}{door_text(site, frozenset().union(*alike))}"


def _on_two_lines(fold: _Fold, group: _Group) -> str:
    parts = []
    for site, side, touched in zip(fold.sites, group.sides, group.parts, strict=True):
        kinds = frozenset().union(*side.values())
        what = "it"
        if len(side) == 1 and len(touched) == 1:
            (place,) = touched
            if place != group.place and place.array and place.is_exact:
                what = str(place)
        parts.append(f"{ranks_text(side)} {verb(kinds)} {what} on {line_text(site)}{door_text(site, kinds)}")
    return ", ".join(parts)


def _alike(others: Sequence[_Group], *, complete: bool) -> str:
    named = [f"{group.place} ({ranks_text(group.ranks)})" for group in others[:MOST_ALIKE]]
    more = len(others) - len(named)
    if not complete:
        named.append("many more places")
    elif more:
        named.append(f"{more} more place{'s' * (more > 1)}")
    return joined(named)
