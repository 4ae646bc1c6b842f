"""Processes that the notebook has started by `nbparallel.multiprocessing`, and memory of their messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from nbparallel.errors.text.table import Table
from nbparallel.wire.units import size_column, size_text

if TYPE_CHECKING:
    from nbparallel.multiprocessing.household import HouseholdReport

SHOWN = 50
"""Rows of a table."""
NOTEBOOK = 0
"""The notebook's client number."""
ENDED = "has ended"
"""The state of a process whose end the supervisor has not read yet, or whose memory a child holds."""


def household_report() -> HouseholdReport | None:
    """Return what the supervisor of these processes knows; None if the notebook has started none."""
    if "nbparallel.multiprocessing.household" not in sys.modules:
        return None
    from nbparallel.multiprocessing import household

    report = household.report()
    return None if report is None else _without_ended(report)


def _without_ended(report: HouseholdReport) -> HouseholdReport:
    """Leave out processes that have ended, hold nothing and have started none: soon they are not there."""
    counted = {client for row in report.segments for client in row.holders}
    counted |= {process.parent for process in report.processes}
    processes = tuple(p for p in report.processes if p.client in counted or _state(p.pid) != ENDED)
    return replace(report, processes=processes)


def processes_table(report: HouseholdReport) -> Table:
    """Return a row for each process, for ``%parallel_status``, and below them what messages hold."""
    names, pids, count = _names(), _pids(report), len(report.processes)
    rows = [
        (
            str(process.pid),
            names.get(process.pid, ""),
            _state(process.pid),
            pids.get(process.parent, ""),
            "yes" if process.daemon else "",
            _held(report, process.client),
        )
        for process in report.processes[:SHOWN]
    ]
    foot = [f"… and {count - SHOWN:,} more"] if count > SHOWN else []
    return Table(
        f"{count} process{'es' * (count != 1)} of nbparallel.multiprocessing",
        ("pid", "name", "state", "started by", "ends with it", "shared memory that it uses"),
        rows,
        "\n".join([*foot, *_in_flight(report)]),
    ).without_empty_columns()


def own_segments_table(report: HouseholdReport) -> Table:
    """Return a row for each segment of these processes, the largest first, for ``%parallel_segments``."""
    pids = _pids(report)
    used = sorted((row for row in report.segments if row.holders or row.messages), key=lambda r: -r.nbytes)
    unit, sizes = size_column([row.nbytes for row in used[:SHOWN]])
    rows = [
        (
            f"{row.segment:#x}",
            size,
            ", ".join(pids.get(client, "a process that has ended") for client in row.holders),
            str(row.messages) if row.messages else "",
        )
        for row, size in zip(used, sizes, strict=False)
    ]
    total = size_text(sum(row.nbytes for row in used))
    return Table(
        f"shared memory of processes of nbparallel.multiprocessing: {total} in {len(used)} "
        f"segment{'s' * (len(used) != 1)}",
        ("segment", unit, "used by", "messages in flight"),
        rows,
        f"… and {len(used) - SHOWN:,} smaller ones" if len(used) > SHOWN else "",
    ).without_empty_columns()


def _names() -> dict[int, str]:
    """Return the names of the notebook's own children."""
    from multiprocessing import process

    return {child.pid: child.name for child in process.active_children() if child.pid}


def _pids(report: HouseholdReport) -> dict[int, str]:
    return {NOTEBOOK: "notebook", **{process.client: str(process.pid) for process in report.processes}}


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ENDED
    return {"R": "computing", "T": "stopped", "t": "in a debugger", "Z": ENDED}.get(letter, "waiting")


def _held(report: HouseholdReport, client: int) -> str:
    held = [row.nbytes for row in report.segments if client in row.holders]
    return f"{size_text(sum(held))} in {len(held)} segment{'s' * (len(held) != 1)}" if held else ""


def _in_flight(report: HouseholdReport) -> Iterator[str]:
    waiting = [row for row in report.segments if row.messages]
    if waiting:
        yield (
            f"messages that no process has received yet hold {size_text(sum(row.nbytes for row in waiting))} "
            f"in {len(waiting)} segment{'s' * (len(waiting) != 1)}: %parallel_segments lists them"
        )
