"""``%parallel_who``: one table of the names of the notebook and of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nbparallel.errors import label_of_rank, rank_list
from nbparallel.errors.text.table import Table

if TYPE_CHECKING:
    from nbparallel.session.monitoring.who import NameStatistics, SessionNames
    from nbparallel.wire.inspection import VariableInfo

_ONLY_HERE = 30
"""Names of the notebook alone that are listed."""


def who_table(seen: SessionNames) -> Table:
    """Return a row for each name that some rank has, and notes below."""
    rows = [
        (
            record.name,
            _how(record),
            record.notebook.looks if record.notebook else "",
            _on_ranks(record, seen.answered),
        )
        for record in seen.names
        if record.ranks
    ]
    names = f"{len(rows)} name{'s' * (len(rows) != 1)}"
    title = f"{names} on {rank_list(seen.answered)}" if seen.answered else "no rank answered"
    return Table(title, ("name", "how", "in the notebook", "on ranks"), rows, "\n".join(_foot(seen)))


def _on_ranks(record: NameStatistics, answered: Sequence[int]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, seen in record.ranks.items():
        groups.setdefault(_looks(seen, record), []).append(rank)
    # as a list, which would be long if it named all hosts
    everywhere = (
        label_of_rank.get()(next(iter(record.ranks)))
        and len(groups) == 1
        and len(record.ranks) == len(answered)
    )
    return "\n".join(
        f"{'these ranks' if everywhere else rank_list(ranks)}: {looks}" for looks, ranks in groups.items()
    )


def _foot(seen: SessionNames) -> Iterator[str]:
    only = [record.name for record in seen.names if not record.ranks]
    if only and seen.answered:
        more = f" and {len(only) - _ONLY_HERE} more" if len(only) > _ONLY_HERE else ""
        listed = ", ".join(only[:_ONLY_HERE])
        yield f"only in the notebook, until a cell for ranks names them: {listed}{more}"
    if seen.left_out:
        yield f"{seen.left_out:,} more names of ranks are not listed"
    if seen.busy:
        yield f"busy with a cell, and not asked: {rank_list(seen.busy)}"
    if seen.dead:
        yield f"dead, and back at the next cell without variables: {rank_list(seen.dead)}"
    problems: dict[str, list[int]] = {}
    for rank, problem in seen.silent.items():
        problems.setdefault(problem, []).append(rank)
    for problem, ranks in problems.items():
        yield f"{rank_list(ranks)} did not answer{': ' + problem if problem else ' within a second'}"


def _looks(seen: VariableInfo, record: NameStatistics) -> str:
    """Return what a rank has, compared with the notebook's as far as that is known."""
    if seen.origin == "copied" and seen.as_delivered is not None:
        changed = "" if record.notebook and record.notebook.looks == seen.looks else f"{seen.looks}, "
        return f"{changed}{'as it was sent' if seen.as_delivered else 'changed there'}"
    same = record.notebook is not None and record.notebook.looks == seen.looks and seen.origin == "shared"
    return "the same" if same else seen.looks


def _how(record: NameStatistics) -> str:
    if record.how == "shared":
        how = "shared, ranks may write" if next(iter(record.ranks.values())).writable else "shared"
    else:
        how = {"own": "made on ranks", "differs": "differs between ranks"}.get(record.how, record.how)
    if record.view_of:
        how += f", part of {record.view_of}"
    if record.hides:
        how += f", hides {record.hides}"
    if not record.outdated:
        return how
    return f"{how}, older than the notebook's" if record.notebook else f"{how}, deleted in the notebook"
