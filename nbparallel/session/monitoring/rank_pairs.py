"""Rank pairs: how long each rank waited for which other one in a cell, and how many bytes went there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nbparallel.session.monitoring.timeline import awaited_spans
from nbparallel.session.results import CellRecord
from nbparallel.wire.timeline import OperationSpan

_SENDS = ("send", "isend")
_TAKES = ("recv", "irecv", "barrier", "monitored_barrier")
"""Operations without bytes of their own: the sender's count."""
_TO_ROOT, _FROM_ROOT, _TO_ALL = ("reduce", "gather"), ("broadcast",), ("all_reduce",)


class PairTotals(NamedTuple):
    """Two square tables over the ranks; an empty one is not known."""

    waited: tuple[tuple[float, ...], ...]
    """Row i, column j: seconds that rank i waited for rank j."""
    moved: tuple[tuple[int, ...], ...]
    """Row i, column j: bytes of rank i that operations brought to rank j."""


def pair_totals(record: CellRecord, world_size: int) -> PairTotals:
    """Return which rank waited for which in a cell, and what went where.

    Waits are those that were noted, as in the timeline.  Bytes are known if every operation that moved any
    was noted, and shows where they went: messages, `broadcast`, `reduce`, `gather` and `all_reduce`.
    """
    spans = awaited_spans(record)
    waited = [[0.0] * world_size for _ in range(world_size)]
    moved = [[0] * world_size for _ in range(world_size)]
    known = not any(notes.omitted for notes in record.ranks.values()) and not record.died
    for rank, operations in spans.items():
        for span in operations:
            if span.wait_ns and 0 <= span.awaited < world_size:
                waited[rank][span.awaited] += span.wait_ns / 1e9
        known = known and _add_bytes(moved, rank, operations, sorted(record.ranks))
    table = tuple(tuple(row) for row in moved) if known else ()
    return PairTotals(tuple(tuple(row) for row in waited), table)


def _add_bytes(
    moved: Sequence[list[int]], rank: int, spans: Iterable[OperationSpan], world: Sequence[int]
) -> bool:
    """Add what went out from one rank; return whether all of it is known."""
    for span in spans:
        if not span.nbytes or span.name in _TAKES or span.failed:
            continue
        members = span.group or tuple(world)
        root = span.peer if span.peer >= 0 else members[0]
        if span.name in _SENDS:
            targets: Iterable[int] = (span.peer,)
        elif span.name in _TO_ROOT:
            targets = () if rank == root else (root,)
        elif span.name in _FROM_ROOT:
            targets = members if rank == root else ()
        elif span.name in _TO_ALL:
            targets = members
        else:
            return False
        for target in targets:
            if target != rank or span.name in _SENDS:
                moved[rank][target] += span.nbytes
    return True
