"""Deadlock detection: waiting ranks inspect all slots, and report a deadlock only when it is certain.

A rank is *stuck* if it waits (without a deadline), what it waits for is not there, and the ranks that could
bring it are stuck themselves or have finished the cell: the largest such set, from the words alone.  A
deadlock is reported when two inspections at least 200 ms apart see the same set with the same slot versions:
a version changes with every change of state, so no rank of the set did anything in between.  Nothing depends
on time otherwise: a slow or stopped rank counts as computing unless its own slot records that it waits and
its words that its wait cannot end; and a rank clears its slot before it acts on what it waited for
(`RankContext.wait`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeAlias

from nbparallel.distributed.runtime.call_site import receive_text
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import decode_handle
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.distributed.slots.lock_table import holder_of, queue_of
from nbparallel.distributed.slots.slot_area import SlotArea, group_area
from nbparallel.errors import InvalidHandleError, SegmentLostError, rank_list
from nbparallel.wire.control import Operation, SlotRecord, State
from nbparallel.wire.control_layout import ARRIVE

FIRST_INSPECTION_NS = 200_000_000
"""Shorter waits are ordinary."""
APART_NS = 200_000_000
"""Time between the two inspections."""
Stuck: TypeAlias = "Mapping[int, tuple[SlotRecord, list[int]]]"
"""For each rank that can never go on by itself: its slot, and the ranks that it waits for."""


class DeadlockDetector:
    """One rank's search for deadlocks that it is part of."""

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def inspect(self, wait: WaitRecord) -> None:
        """Raise `DeadlockError` if this rank is part of a deadlock; called in every slice of a wait."""
        now = time.monotonic_ns()
        if (
            wait.deadline_ns is not None
            or now - wait.began_ns < FIRST_INSPECTION_NS
            or now - wait.suspected_ns < APART_NS
        ):
            return
        stuck = self.stuck_ranks()
        if self._context.rank not in stuck:
            wait.suspicion = None
            wait.suspected_ns = now
            return
        seen = {rank: (record.version, awaited) for rank, (record, awaited) in stuck.items()}
        if wait.suspicion != seen:
            wait.suspicion, wait.suspected_ns = seen, now
            return
        raise self._context.mark_failed(self._context.deadlock(self.describe(stuck)))

    def stuck_ranks(self) -> Stuck:
        """Return every rank that can never go on by itself, with its slot and the ranks it waits for."""
        context = self._context
        waiting: dict[int, tuple[SlotRecord, list[int]]] = {}
        for rank in context.cell.ranks:
            record = context.view.read_slot(rank)
            if (
                record.readable
                and record.state is State.WAITING
                and record.cell == context.cell.number
                and not record.deadline
            ):
                awaited = self._awaited_of(record)
                if awaited is not None:
                    waiting[rank] = record, awaited
        finished = {r for r in range(context.world_size) if context.gone(r)}
        while True:
            hopeless = waiting.keys() | finished
            free = [r for r, (record, awaited) in waiting.items() if not _stuck(record, awaited, hopeless)]
            if not free:
                return waiting
            for rank in free:
                del waiting[rank]

    def _awaited_of(self, record: SlotRecord) -> list[int] | None:
        """Return the ranks that the rank of `record` waits for, None if its wait can end."""
        context, me = self._context, record.rank
        view, layout, words = context.view, context.view.layout, context.view.words
        exchanges = record.peer >= 0 and not record.target and record.operation is not Operation.send
        if record.operation in (Operation.recv, Operation.new_group) or exchanges:
            sources = [record.peer] if record.peer >= 0 else [r for r in context.cell.ranks if r != me]
            if any(words[layout.tail_word(s, me)] != words[layout.head_word(s, me)] for s in sources):
                return None
            return sources
        if record.operation is Operation.send:
            if record.target:  # waits until the message was taken
                head = layout.head_word(me, record.peer)
                arrived = words[layout.tail_word(me, record.peer)] == words[head]  # else `irecv` may take it
                return [record.peer] if arrived and words[head + 2] < record.target else None
            return None  # a rank that waits makes room for others, so this ends
        if not record.target:
            return None
        if record.operation is Operation.lock:
            mine = record.target, me
            return [r.rank for r in queue_of(view, record.tag) if (r.ticket, r.rank) < mine] or None
        if record.area:
            area = self._area_of(record)
            return None if area is None else area.missing(record.target) or None
        around = context.place.around(me)
        missing = [
            r for r in around if r in context.cell.ranks and words[view.word(r, ARRIVE)] < record.target
        ]
        return missing or None

    def _area_of(self, record: SlotRecord) -> SlotArea | None:
        """Return the slot area of the group in whose collective a rank waits; it need not be this rank's."""
        context = self._context
        # another machine's memory cannot be looked at
        if not record.area or record.operation is Operation.lock or record.rank not in context.place.ranks:
            return None
        try:
            memory = context.store.attach(decode_handle(record.area), writable=False)
        except (SegmentLostError, InvalidHandleError, ValueError, EOFError, TypeError):
            return None  # torn, or gone with its maker: then nothing is known
        return group_area(memory, record.area, context.rank)

    def describe(self, stuck: Stuck) -> str:
        """Return which rank waits for which, on which line; and the cure of the commonest deadlock."""
        context, parts = self._context, []
        for rank, (record, awaited) in sorted(stuck.items()):
            area = self._area_of(record)
            group = f" of the group of {rank_list(area.ranks)}" if area is not None else ""
            holder = holder_of(context.view, record.tag) if record.operation is Operation.lock else None
            place = context.call_site.name(record.line)
            text = wait_text(record, awaited if holder is None else [], place, group)
            if holder is not None:
                text += f", which rank {holder.rank} holds{context.call_site.since(holder.line)}"
            parts.append(f"rank {rank} waits {text}")
        finished = [r for r in range(context.world_size) if r in context.cell.ranks and context.gone(r)]
        if finished:
            parts.append(f"{rank_list(finished)} finished the cell")
        receiving = (
            r.operation is Operation.recv and not r.tag and stuck.keys() >= {*on} for r, on in stuck.values()
        )
        if all(receiving):
            parts.append("all of these wait to receive: one has to send first, or each uses sendrecv")
        return "; ".join(parts)


def _stuck(record: SlotRecord, awaited: list[int], hopeless: set[int]) -> bool:
    if record.operation is Operation.recv and record.peer < 0:
        return hopeless.issuperset(awaited)
    return not hopeless.isdisjoint(awaited)


def wait_text(record: SlotRecord, awaited: list[int], place: str, group: str = "") -> str:
    """Return ``in recv(src=1) for rank 1 (line 3)``; `place` is the 3, or empty."""
    call, line = record.operation.name + group, f" (line {place})" if place else ""
    if record.operation is Operation.new_group:
        call = "in the first operation of a group"
        return f"{call} for rank {record.peer}{line}"
    if record.operation is Operation.recv:
        call = receive_text(call, None if record.peer < 0 else record.peer, record.tag)
    elif record.operation is Operation.lock:
        call += f"({record.area.decode(errors='replace')!r})"
    elif record.operation is Operation.send:
        call += f"(dst={record.peer}{f', tag={record.tag}' if record.tag else ''})"
    whom = f" for {rank_list(awaited)}" if awaited else ""
    return f"in {call}{whom}{line}"
