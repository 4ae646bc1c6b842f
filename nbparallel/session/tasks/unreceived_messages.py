"""Messages that a cell has left: what ranks sent in it and no rank received, reported, then dropped or kept.

When the last rank has ended a cell, nothing moves in the rings any more.  What is left lies in two places: in
a ring, which the kernel reads, and in the queue of its receiver, which the rank reports with its outcome.
Ranks that have sent nothing report nothing, and then nothing is read.  A rank is sent how far in its rings
the cell reaches, and drops or keeps what lies before: whatever another rank has sent since lies behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

from nbparallel.errors import rank_list
from nbparallel.session.processes.rank_pool import RankPool
from nbparallel.session.tasks.task_run import TaskRun
from nbparallel.wire.control import ControlView
from nbparallel.wire.control_layout import RECORD, RECORD_ALIGN
from nbparallel.wire.frames import Kind
from nbparallel.wire.inspection import MessageReport, SentMessage
from nbparallel.wire.messages import CellTask, MessageSettlement, ScriptTask

MOST_LISTED = 4
"""Pairs of ranks that a line lists."""
Messages = Mapping[SentMessage, int]
"""How many there are of each kind."""
Pair = tuple[int, int]
"""Source and destination."""


class UnreceivedMessages:
    """The messages that are left when a cell ends, for one session."""

    def __init__(self) -> None:
        self._control: ControlView | None = None
        self._settled: dict[Pair, int] = {}
        """Up to where rings were read: a rank may not have taken out yet what it is to keep."""
        self._kept: dict[int, Counter[SentMessage]] = {}
        """What stays, by destination."""

    def begin(self, control: ControlView) -> list[str]:
        """Begin a task in an epoch; returns a line on messages that were lost with the last one."""
        if control is self._control:
            return []
        self._control = control
        self._settled.clear()
        lost = sum(self._kept.values(), Counter())
        self._kept.clear()
        if not lost:
            return []
        return [
            f"{_count(lost)} of earlier cells {_were(lost)} dropped, because a cell failed or the ranks "
            f"changed: {_listed(lost)}"
        ]

    def end(self, run: TaskRun, *, failed: bool, keep: bool) -> list[str]:
        """Settle what a task has left, when all of its ranks have ended it; returns lines for the user.

        Parameters
        ----------
        failed : bool
            What the task has left ends with its epoch.
        keep : bool
            Messages stay for later cells, also those to ranks that took part.
        """
        reports = {r: o.messages for r, o in run.outcomes.items() if o.messages is not None}
        if not reports and not self._kept:
            return []
        for rank in run.outcomes:
            self._kept.pop(rank, None)
            queued = reports[rank].queued if rank in reports else ()
            if kept := {message: count for message, count in queued if message.cell}:
                self._kept[rank] = Counter(kept)
        late = {message: count for report in reports.values() for message, count in report.late}
        notes = [f"{_count(late)} of earlier cells {_were(late)} received: {_listed(late)}"] if late else []
        left = Counter() if failed else self._left(run.control, reports)
        if not left:
            return notes
        dropped = {m: n for m, n in left.items() if m.destination in run.handles and not keep}
        staying = {m: n for m, n in left.items() if m not in dropped}
        cell = f"In[{run.task.execution_count}]" if isinstance(run.task, CellTask) else "an earlier call"
        label = next((report.label for report in reports.values()), "")
        self.settle(run.pool, run.control, cell, label, dropped, staying)
        return [*notes, *_lines(dropped, staying, run, label)]

    def _left(self, control: ControlView, reports: Mapping[int, MessageReport]) -> Counter[SentMessage]:
        """Return what the task has left in queues and rings."""
        left: Counter[SentMessage] = Counter()
        for rank, report in reports.items():
            left.update({message: count for message, count in report.queued if not message.cell})
            for destination in report.destinations:
                left.update(in_ring(control, rank, destination, self._settled.get((rank, destination), 0)))
        return left

    def settle(
        self,
        pool: RankPool,
        control: ControlView,
        cell: str,
        label: str,
        dropped: Messages,
        kept: Messages,
    ) -> None:
        """Send ranks what becomes of messages, those of `dropped` and `kept`."""
        words, layout = control.words, control.layout
        for message, count in kept.items():
            stays = self._kept.setdefault(message.destination, Counter())
            stays[_of_cell(message, cell)] += count
        pairs = {(m.source, m.destination) for m in (*dropped, *kept)}
        ends = {pair: words[layout.tail_word(*pair)] for pair in pairs}
        self._settled.update(ends)
        staying = {(m.source, m.destination) for stays in self._kept.values() for m in stays}
        gone = {(m.source, m.destination) for m in dropped}
        listed = _listed(dropped, label)
        remark = f"; when {cell} ended, {_count(dropped)} {_were(dropped)} dropped: {listed}"
        to_drop, to_keep = _by_destination(gone), _by_destination(pairs - gone)
        released = _by_destination({(destination, source) for source, destination in gone - staying})
        for rank, handle in zip(pool.ranks, pool.handles, strict=True):
            settlement = MessageSettlement(
                cell,
                tuple((source, ends[source, rank]) for source in to_drop.get(rank, ())),
                tuple((source, ends[source, rank]) for source in to_keep.get(rank, ())),
                tuple(released.get(rank, ())),
                remark if dropped else "",
            )
            if dropped or settlement.kept:
                handle.send(Kind.SETTLE_MESSAGES, settlement, epoch=pool.epoch)


def in_ring(control: ControlView, source: int, destination: int, start: int = 0) -> Iterator[SentMessage]:
    """Yield the messages that lie in a ring behind the position `start`, while no rank uses it."""
    words, layout = control.words, control.layout
    capacity, begin = layout.ring_capacity, layout.ring_byte(source, destination)
    position = max(start, words[layout.head_word(source, destination)])
    while position < words[layout.tail_word(source, destination)]:
        offset = position % capacity
        head = bytes(control.octets[begin + offset : begin + min(offset + RECORD.size, capacity)])
        head += bytes(control.octets[begin : begin + RECORD.size - len(head)])
        length, _, _, tag, line, group = RECORD.unpack(head)
        if length < RECORD.size:
            return  # damaged: the rank that takes it reports that
        if tag >= 0:
            yield SentMessage(source, destination, tag, line, bool(group))
        position += (length + RECORD_ALIGN - 1) & -RECORD_ALIGN


def _by_destination(pairs: Iterable[Pair]) -> dict[int, list[int]]:
    """Return the sources for each destination."""
    sources: dict[int, list[int]] = {}
    for source, destination in pairs:
        sources.setdefault(destination, []).append(source)
    return sources


def _of_cell(m: SentMessage, cell: str) -> SentMessage:
    return SentMessage(m.source, m.destination, m.tag, m.line, m.in_group, cell)


def _lines(dropped: Messages, kept: Messages, run: TaskRun, label: str) -> Iterator[str]:
    """Yield a line on what was dropped, on what stays, and on what waits for ranks that took no part."""
    task, absent = run.task, {m: n for m, n in kept.items() if m.destination not in run.handles}
    if dropped:
        what = "cell" if isinstance(task, CellTask) else "script" if isinstance(task, ScriptTask) else "call"
        how = "; Session(keep_messages=True) keeps messages for later ones"
        if run.request.options.execution_count is not None:
            how = "; %config NbParallel.keep_messages = True keeps messages for later cells"
        yield (
            f"{_count(dropped)} {_were(dropped)} not received, and dropped at the end of the {what}: "
            f"{_listed(dropped, label)}{'' if what == 'script' else how}"
        )
    if len(kept) > len(absent):
        present = {m: n for m, n in kept.items() if m not in absent}
        yield (
            f"{_count(present)} {_were(present)} not received, and kept for later cells: "
            f"{_listed(present, label)}"
        )
    if absent:
        stay = "stays" if sum(absent.values()) == 1 else "stay"
        receivers = rank_list({m.destination for m in absent})
        yield f"{_count(absent)} {stay} for {receivers}, not in this cell: {_listed(absent, label)}"


def _count(messages: Messages) -> str:
    count = sum(messages.values())
    return "1 message" if count == 1 else f"{count} messages"


def _were(messages: Messages) -> str:
    return "was" if sum(messages.values()) == 1 else "were"


def _listed(messages: Messages, label: str = "") -> str:
    """Return ``rank 0 to rank 1, rank 1 to rank 2 (line 3, tag 5); …``; `label`: the file of the lines."""
    listed = sorted(messages, key=lambda m: (_place(m), m.source, m.destination))
    parts = []
    for place, alike in groupby(listed[:MOST_LISTED], _place):
        pairs = [
            f"rank {m.source} to rank {m.destination}{f' {messages[m]} times' if messages[m] > 1 else ''}"
            for m in alike
        ]
        cell, line, tag, in_group = place
        of = f" of {cell or label}" if cell or label else ""
        where = f"line {line or '?'}{of}, tag {tag}"
        parts.append(f"{', '.join(pairs)} ({where}{', in a group' if in_group else ''})")
    more = len(listed) - MOST_LISTED
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")


def _place(m: SentMessage) -> tuple[str, int, int, bool]:
    return m.cell, m.line, m.tag, m.in_group
