"""``%parallel_who``: the names of the notebook and of all ranks, in groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from nbparallel.errors import grouped, rank_list
from nbparallel.errors.text.table import Table
from nbparallel.wire.units import size_column

if TYPE_CHECKING:
    from nbparallel.session.monitoring.segments import NameStatistics, SessionNames

_LISTED = 30
"""Names of a group that are listed, runs of numbered names as one; ``--all`` lists all."""
_RUN = 4
"""Numbered names that look alike are a run from so many on."""
_ORIGINS = {"own": "made there", "copied": "copied", "shared": "shared"}
_LONG_NUMBER = re.compile(r"\d{5,}")
_ORDER = ("differs", "shared, all", "shared, ranks", "shared", "copied", "made", "only")
"""How groups begin, in their order."""


def who_table(seen: SessionNames, *, every: bool = False) -> Table:
    """Return a row for each group of names, and notes below; `every`: with each name."""
    groups = grouped(
        (_how(record, seen.answered), record) for record in seen.names if record.ranks or seen.answered
    )
    order = sorted(groups, key=lambda how: ([how.startswith(word) for word in _ORDER].index(True), how))
    unit, sizes = size_column([sum(map(_nbytes, groups[how])) for how in order])
    rows = [
        (how, str(len(groups[how])), _listed(groups[how], every), size if size != "0" else "")
        for how, size in zip(order, sizes, strict=True)
    ]
    count = sum(bool(record.ranks) for record in seen.names)
    names = f"{count} name{'s' * (count != 1)}"
    title = f"{names} on {rank_list(seen.answered)}" if seen.answered else "no rank answered"
    head = ("how", "names", "which", unit)
    return Table(title, head, rows, "\n".join(_foot(seen))).without_empty_columns()


def _how(record: NameStatistics, answered: Sequence[int]) -> str:
    """Return what is said of a name; equal words make a group."""
    if not record.ranks:
        return "only in the notebook"
    first = next(iter(record.ranks.values()))
    if record.how == "differs":
        how = "differs between ranks"
    elif record.how == "shared":
        how = "shared, all may write" if first.writable else "shared, ranks read"
    elif record.how == "copied":
        changed = [rank for rank, info in record.ranks.items() if info.as_delivered is False]
        how = f"copied, changed on {rank_list(changed)}" if changed else "copied"
    else:
        how = "made on ranks" + f", hides {record.hides}" * bool(record.hides)
    if record.outdated:
        how = "shared, older than the notebook's" if record.notebook else "shared, deleted in the notebook"
    if tuple(record.ranks) != tuple(answered):
        how += f", only on {rank_list(record.ranks)}"
    return how


def _listed(records: Sequence[NameStatistics], every: bool) -> str:
    """Return names with what they are; those with one number after another in one."""
    items: list[str] = []
    ordered = sorted(records, key=lambda record: _natural(record.name))
    for _, some in groupby(ordered, key=lambda r: (_natural(r.name)[0], re.sub(r"\d+", "", _looks(r)))):
        named = [f"{record.name} {_looks(record)}".rstrip() for record in some]
        items += named if len(named) < _RUN or every else [f"{named[0]} … {named[-1]}"]
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED and not every else ""
    return ", ".join(items[: None if every else _LISTED]) + more


def _natural(name: str) -> tuple[str, int]:
    digits = re.search(r"\d*$", name)
    number = digits[0] if digits else ""
    return name.removesuffix(number), int(number or -1)


def _looks(record: NameStatistics) -> str:
    """Return what a name is: on the ranks, and in the notebook where that differs."""
    here = record.notebook
    groups: dict[str, list[int]] = {}
    for rank, info in record.ranks.items():
        looks = _LONG_NUMBER.sub(lambda found: f"{int(found[0]):_}".replace("_", "\u202f"), info.looks)
        origin = f", {_ORIGINS[info.origin]}" * (len({i.origin for i in record.ranks.values()}) > 1)
        groups.setdefault(looks.removeprefix("ndarray ") + origin, []).append(rank)
    if len(groups) > 1:
        return f"({'; '.join(f'{rank_list(ranks)}: {looks}' for looks, ranks in groups.items())})"
    looks = next(iter(groups), "")
    part = f", part of {record.view_of}" * bool(record.view_of)
    other = here is not None and any(
        record.how == "own" or info.looks != here.looks for info in record.ranks.values()
    )
    return f"{looks}{part}{f' (here {here.looks})' if here is not None and other else ''}"


def _nbytes(record: NameStatistics) -> int:
    """Return the bytes of a name's arrays: shared memory counts once."""
    return sum({(s.segment or -rank - 1, s.start): s.nbytes for rank, s in record.ranks.items()}.values())


def _foot(seen: SessionNames) -> Iterator[str]:
    if any(not record.ranks for record in seen.names) and seen.answered:
        yield "only in the notebook: until a cell for ranks names them"
    if seen.left_out:
        yield f"{seen.left_out:,} more names of ranks are not listed"
    if seen.busy:
        yield f"busy with a cell, and not asked: {rank_list(seen.busy)}"
    if seen.dead:
        yield f"dead, and back at the next cell without variables: {rank_list(seen.dead)}"
    for problem, ranks in grouped((problem, rank) for rank, problem in seen.silent.items()).items():
        yield f"{rank_list(ranks)} did not answer{': ' + problem if problem else ' within a second'}"
