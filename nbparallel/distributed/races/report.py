"""Search for races in the logs of all ranks of a checked cell."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from nbparallel.distributed.races.access_log import POSSIBLE, READ, WRITE, AccessLog, ArrayName, Site
from nbparallel.distributed.races.array_names import ArrayNames, Place
from nbparallel.distributed.races.byte_sets import Overlap
from nbparallel.distributed.races.walk import MOST_MEETINGS, Conflict, JoinedLogs, Walk
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


Kinds = frozenset[int]
"""Of one rank's accesses, as the log has them."""
BOTH = READ | WRITE
_VERBS = {READ: ("read", "read"), WRITE: ("wrote", "written"), BOTH: ("read and wrote", "read and written")}

LOCK = '`with dist.lock("{name}"):` around it, or add up your own and `all_reduce`'
ONCE_OR_ADD = (
    "if it is to be done once, each rank its own part (`dist.local_slice`), or a second array; "
    'if all are to add to it, `with dist.lock("{name}"):` around it, or `all_reduce`'
)
LOCKS = '`with dist.lock("{name}"):` around each of the two'
BARRIER_OR_ONE_LOCK = (
    '`barrier()` between them if one is to come first, else `with dist.lock("{name}"):` around both together'
)
BARRIER_OR_LOCKS = f"`barrier()` between them if one is to come first, else {LOCKS}"
OWN_PART = "have each rank write its own part: `dist.local_slice`"
OWN_PART_OR_LOCK = OWN_PART + '; or `with dist.lock("{name}"):` around it'
BARRIER = "`barrier()` between them"
BARRIER_OR_OWN_PART = f"{BARRIER} if one is to come first, else {OWN_PART}"
READ_FIRST = "have all ranks read first, then `barrier()`, then write; or write into a second array"
A_COPY = "; if what it was passed to only reads, pass a copy"
ONE_RANK = "harmless, one rank is enough"


def ranks_text(ranks: Iterable[int]) -> str:
    """Name ranks.

    >>> ranks_text([0]), ranks_text([0, 1]), ranks_text([0, 1, 2, 5])
    ('rank 0', 'ranks 0 and 1', 'ranks 0-2 and 5')
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    parts: list[str] = []
    for span in spans:
        parts += [f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span)
    if len(parts) == 1:
        return f"rank{'s' * ('-' in parts[0])} {parts[0]}"
    return f"ranks {', '.join(parts[:-1])} and {parts[-1]}"


def line_text(site: Site) -> str:
    """Name a line, and its cell if it is another one."""
    line = f"line {site.line}" if site.line else "a line that is not known"
    return f"{line} of {site.label}" if site.label else line


def verb(kinds: Iterable[int]) -> str:
    """Return what accesses did."""
    surely = possibly = 0
    for kind in kinds:
        if kind & POSSIBLE:
            possibly |= kind & BOTH
        else:
            surely |= kind & BOTH
    possibly &= ~surely
    parts = [_VERBS[surely][0]] if surely else []
    parts += [f"may have {_VERBS[possibly][1]}"] if possibly else []
    return " and ".join(parts)


def door_text(site: Site, kinds: Iterable[int]) -> str:
    """Return through which function it may have happened."""
    if not site.door:
        return ""
    return f" (passed to `{site.door}`{', which may write' * any(kind & WRITE for kind in kinds)})"


def advice_for(
    array: str, indices: str, *done: int, same_line: bool, same_elements: bool, is_mutual: bool = False
) -> str:
    """Return what to do if two lines, or one on several ranks, read and write what they have in common.

    `is_mutual`: ranks have written what they have read, as where each takes the next number and counts on.
    """
    is_one = "[" in indices and ":" not in indices
    if is_mutual and is_one and not same_line and not all(kinds & WRITE for kinds in done):
        return BARRIER_OR_ONE_LOCK.format(name=array or "name")
    advice = _advice(*done, same_line=same_line, same_elements=same_elements, is_one=is_one)
    return advice.format(name=array or "name")


def _advice(first: int, second: int, *, same_line: bool, same_elements: bool, is_one: bool) -> str:
    if not same_line:
        if first == second == BOTH:
            return LOCKS if is_one else BARRIER_OR_LOCKS
        return BARRIER_OR_OWN_PART if first & second & WRITE else BARRIER
    if first == second == WRITE:
        return OWN_PART
    if first == second == BOTH:
        if not same_elements:
            return OWN_PART_OR_LOCK
        return LOCK if is_one else ONCE_OR_ADD
    return READ_FIRST


def joined(parts: Sequence[str]) -> str:
    """Return parts of a sentence as a list in words."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


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


MOST_NAMES = 3
"""Arrays of one segment that are named."""


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
    found = JoinedLogs(logs)
    array_names = ArrayNames(names, found.ranks)
    walk = Walk(found.ranks, found.contended, array_names.part_of)
    walk.run()
    numbers = [log.rank for log in found.ranks]
    return RaceReport(
        races=fold_conflicts(walk.conflicts.values(), numbers, found.sites, array_names),
        accesses=sum(log.count for log in found.ranks),
        not_checked=(
            *_lost(lost),
            *_incomplete(walk.incomplete, array_names),
            *(["the rest of the cell, because too many accesses are in no order"] * walk.is_cut_short),
        ),
    )


def _lost(ranks: Collection[int]) -> list[str]:
    its = "its" if len(ranks) == 1 else "their"
    return [f"what {ranks_text(ranks)} did: {its} log was lost"] if ranks else []


def _incomplete(segments: Iterable[int], names: ArrayNames) -> list[str]:
    """Return a line for each segment with too many irregular accesses."""
    lines = []
    for segment in sorted(segments):
        arrays = [f"`{array.name}`" for array in names.touching(segment, 0, 1 << 62)][:MOST_NAMES]
        where = " or ".join(arrays) or "a shared array without a name"
        lines.append(f"some pairs of accesses to {where}, because too many touch scattered elements")
    return lines
