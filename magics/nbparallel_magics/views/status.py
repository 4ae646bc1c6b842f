"""What magics show as tables: ranks, segments, hosts, names, and the notebook's own processes."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from nbparallel.errors import grouped, rank_list
from nbparallel.errors.text.table import SHOWN, Table, bar
from nbparallel.wire.segments import creator_of
from nbparallel.wire.units import size_column, size_text, time_column

if TYPE_CHECKING:
    from nbparallel.multiprocessing.household import HouseholdReport
    from nbparallel.session.monitoring.activity import RankActivity, SessionStatistics
    from nbparallel.session.monitoring.segments import NameStatistics, SessionNames, SharedSegment

# ``%parallel_segments``: every segment of the session.

MOST = 50
"""Rows of the table; ``--all`` and `Session.statistics` have all."""


def segments_table(seen: SessionStatistics, names: SessionNames, *, internals: bool = False) -> Table:
    """Return a row for each segment of a session, the largest first, and below them the sums.

    `names` has those on idle ranks.  What each rank has by itself under one name is one row, unless ids and
    phases are wanted (`internals`).
    """
    from nbparallel.session.monitoring.segments import NO_NAME, names_text  # not when the extension is loaded

    of_ranks = _names_of_ranks(names)
    strategies, makers = ({getattr(s, what) for s in seen.segments} for what in ("strategy", "maker"))
    groups: dict[tuple[str, ...], list[SharedSegment]] = {}
    for record in seen.segments:
        own = not internals and [f"rank {rank}" for rank in record.ranks] == [record.maker]
        row = (
            names_text([*record.names, *of_ranks.get(record.segment, ())]),
            record.host,
            "" if own and not record.notebook else record.users,
            "no process" if record.read_only else "all" if record.writable else record.maker,
            (record.strategy or "?") * (internals or len(strategies) > 1),
            ("itself" if own else record.maker) * (internals or len(makers) > 1),
            record.phase * internals,
            f"{record.segment & (1 << 64) - 1:#x}" * internals,
        )
        groups.setdefault(row, []).append(record)
    most = len(groups) if internals else MOST
    found = sorted(groups.items(), key=lambda group: -_nbytes(group[1]))
    unit, texts = size_column([_nbytes(records) for _, records in found])
    rows = [
        (
            f"{name} in {len(records)} segments" if len(records) > 1 else name,
            host,
            text,
            bar(_nbytes(records) / (_nbytes(found[0][1]) or 1)),
            users or rank_list(rank for record in records for rank in record.ranks),
            *rest,
        )
        for ((name, host, users, *rest), records), text in zip(found[:most], texts, strict=False)
    ]
    notes = [] if internals else [f"all {name}" for name in strategies if len(strategies) == 1]
    notes += [] if internals else [f"made by {maker}" for maker in makers if len(makers) == 1]
    if seen.free_nbytes is not None:
        notes.append(f"{size_text(seen.free_nbytes)} more would fit")
    if seen.pooled_nbytes:
        notes.append(f"{size_text(seen.pooled_nbytes)} kept for the next arrays")
    cut = len(found) > most
    rest = [record for _, records in found[SHOWN:] for record in records]
    return Table(
        f"shared memory: {total(seen)}",
        ("array", "host", unit, "size", "used by", "may write", "strategy", "made by", "phase", "segment"),
        rows,
        "\n".join(_foot(seen, no_name=NO_NAME if any(row[0].startswith(NO_NAME) for row in rows) else "")),
        " · ".join(notes),
        (
            f"{len(found) - SHOWN:,} more, {size_text(_nbytes(rest))}"
            + f", the largest {most - SHOWN} here" * cut
        )
        * (len(rows) > SHOWN),
    ).without_empty_columns()


def _nbytes(records: Sequence[SharedSegment]) -> int:
    return sum(record.nbytes for record in records)


def _names_of_ranks(names: SessionNames) -> dict[int, list[str]]:
    """Return the names of memory in each segment that is no array of this notebook's, with the ranks."""
    from nbparallel.wire.inspection import Origin

    found: dict[int, list[str]] = {}
    for record in names.names:
        places = grouped(
            (seen.segment, rank)
            for rank, seen in record.ranks.items()
            if seen.origin is not Origin.SHARED and seen.segment
        )
        for segment, ranks in places.items():
            other = creator_of(segment) == 0 or len(ranks) > 1
            found.setdefault(segment, []).append(record.name + f" ({rank_list(ranks)})" * other)
    return found


def _foot(seen: SessionStatistics, *, no_name: str) -> Iterator[str]:
    if no_name:
        yield (
            f"{no_name}: the data of a copied object, an array in a list or an object, or what operations "
            "between ranks work in"
        )
    if not seen.ledger_answered:
        yield "the supervisor did not answer within a second: the list of users is not complete"


def total(seen: SessionStatistics) -> str:
    """Return how much is shared, in how many segments."""
    from nbparallel.sharing.arrays import segments_text

    return f"{size_text(seen.shared_nbytes)} in {segments_text(seen.shared_segments)}"


# ``%parallel_cluster``: the hosts of a session on a cluster, as a table.


def hosts_table(hosts: Mapping[str, range], activity: Sequence[RankActivity] = ()) -> Table:
    """Return a row for each host with its ranks; `activity`: what these do, if they run."""
    count = sum(map(len, hosts.values()))
    unseen = {rank.host: rank.operation for rank in activity if rank.state == "unseen"}
    rows = [(host, rank_list(ranks).partition(" ")[2], unseen.get(host, "")) for host, ranks in hosts.items()]
    size = f"{count} rank{'s' * (count != 1)} on {len(hosts)} host{'s' * (len(hosts) != 1)}"
    foot = "-r @name runs a cell on the ranks of one host"
    return Table(size, ("host", "ranks", "problem"), rows, foot).without_empty_columns()


_TIMES = ("computing", "waiting", "moving")


def status_table(seen: SessionStatistics) -> Table:
    """Return a row for each rank, and below them what is shared, of how much."""
    from nbparallel.wire.messages import MOST_FRAME_NBYTES  # a third of the time of `%load_ext`

    ranks = seen.ranks
    states = Counter(rank.state for rank in ranks)
    took_part = [any(getattr(rank, kind) for kind in _TIMES) for rank in ranks]
    columns = {
        "rank": [str(rank.rank) for rank in ranks],
        "host": [rank.host for rank in ranks],
        "state": [rank.state * (len(states) > 1) for rank in ranks],
        "in": [f"{r.operation}, line {r.line}" if r.operation and r.line else r.operation for r in ranks],
    }
    unit, times = time_column([getattr(rank, kind) for kind in _TIMES for rank in ranks])
    for i, kind in enumerate(_TIMES):
        of_kind = times[i * len(ranks) :]
        columns[f"{kind} ({unit})"] = [t * took for t, took in zip(of_kind, took_part, strict=False)]
    columns["operations"] = [
        "" if rank.operations is None else f"{rank.operations:,}" * took
        for rank, took in zip(ranks, took_part, strict=True)
    ]
    for what, sizes in (
        ("own memory", [rank.private_nbytes for rank in ranks]),
        ("shared pages", [rank.mapped_nbytes for rank in ranks]),
    ):
        unit, texts = size_column(sizes)
        columns[f"{what} ({unit})"] = [t * bool(r.pid) for t, r in zip(texts, ranks, strict=True)]
    columns["threads"] = [str(rank.threads) * bool(rank.pid) for rank in ranks]
    columns["pid"] = [str(rank.pid or "") for rank in ranks]
    where = " on each host" * any(rank.host for rank in ranks)
    room = "" if seen.free_nbytes is None else f", {size_text(seen.free_nbytes)} more would fit{where}"
    kept = (
        f"; frames of failed cells, for %debug, hold {size_text(seen.frames_nbytes)}: each rank's at most "
        f"{size_text(MOST_FRAME_NBYTES)}, until its next cell"
    ) * bool(seen.frames_nbytes)
    many = f"{len(ranks)} rank{'s' * (len(ranks) != 1)}"
    return Table(
        f"{many}: {', '.join(f'{n} {state}' if n < len(ranks) else state for state, n in states.items())}",
        tuple(columns),
        list(zip(*columns.values(), strict=True)),
        f"shared memory ({seen.strategy}): {total(seen)}{room}; open files of the notebook: "
        f"{seen.descriptors} of {seen.descriptor_limit}{kept}",
        f"started by {seen.start_method}" + "; times and operations are of the last cell" * any(took_part),
        f"{len(ranks) - SHOWN} more ranks" * (len(ranks) > SHOWN),
    ).without_empty_columns()


# ``%parallel_who``: the names of the notebook and of all ranks, in groups.

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
    unit, sizes = size_column([sum(map(_nbytes_of, groups[how])) for how in order])
    rows = [
        (how, str(len(groups[how])), _listed(groups[how], every), size if size != "0" else "")
        for how, size in zip(order, sizes, strict=True)
    ]
    count = sum(bool(record.ranks) for record in seen.names)
    names = f"{count} name{'s' * (count != 1)}"
    title = f"{names} on {rank_list(seen.answered)}" if seen.answered else "no rank answered"
    head = ("how", "names", "which", unit)
    return Table(title, head, rows, "\n".join(_remarks(seen))).without_empty_columns()


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


def _nbytes_of(record: NameStatistics) -> int:
    """Return the bytes of a name's arrays: shared memory counts once."""
    return sum({(s.segment or -rank - 1, s.start): s.nbytes for rank, s in record.ranks.items()}.values())


def _remarks(seen: SessionNames) -> Iterator[str]:
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


# Processes that the notebook has started by `nbparallel.multiprocessing`, and memory of their messages.

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
    names, pids, count = _child_names(), _pids(report), len(report.processes)
    rows = [
        (
            str(process.pid),
            names.get(process.pid, ""),
            _state(process.pid),
            pids.get(process.parent, ""),
            "yes" if process.daemon else "",
            _held(report, process.client),
        )
        for process in report.processes[:MOST]
    ]
    foot = [f"… and {count - MOST:,} more"] if count > MOST else []
    if waiting := [row for row in report.segments if row.messages]:
        held = size_text(sum(row.nbytes for row in waiting))
        foot.append(
            f"messages that no process has received yet hold {held} in {len(waiting)} "
            f"segment{'s' * (len(waiting) != 1)}: %parallel_segments lists them"
        )
    return Table(
        f"{count} process{'es' * (count != 1)} of nbparallel.multiprocessing",
        ("pid", "name", "state", "started by", "ends with it", "shared memory that it uses"),
        rows,
        "\n".join(foot),
    ).without_empty_columns()


def own_segments_table(report: HouseholdReport) -> Table:
    """Return a row for each segment of these processes, the largest first, for ``%parallel_segments``."""
    pids = _pids(report)
    used = sorted((row for row in report.segments if row.holders or row.messages), key=lambda r: -r.nbytes)
    unit, sizes = size_column([row.nbytes for row in used[:MOST]])
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
        f"… and {len(used) - MOST:,} smaller ones" if len(used) > MOST else "",
    ).without_empty_columns()


def _child_names() -> dict[int, str]:
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
