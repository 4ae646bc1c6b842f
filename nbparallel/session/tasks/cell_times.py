"""Cell times: where each rank's time in a cell has gone, while it runs and when it has ended.

This is the only place that computes it.  Panel, timeline, status and statistics show what it returns::

    while a rank runs its part   TimingRecord and state slot, which the rank writes        times_now
    when it has reported         RankTimeline, with the same counters at the rank's end    times_of

A rank's time begins for all ranks when the cell is sent.
"""

from __future__ import annotations

from nbparallel.session.results import RankTimes
from nbparallel.wire.control import ControlView, SlotRecord, State
from nbparallel.wire.control_layout import OPERATION_BITS
from nbparallel.wire.timeline import RankTimeline

ENDED = (State.FINISHED, State.FAILED)
_TRIES = 4


def times_of(notes: RankTimeline, began_ns: int) -> RankTimes:
    """Return the times of a rank that has ended a cell, which began at `began_ns`."""
    whole = max(0, notes.ended_ns - began_ns)
    return _times(whole, notes.wait_ns, notes.moving_ns, whole, notes.operations)


def times_now(
    control: ControlView, rank: int, task: int, began_ns: int, now: int, *, died: bool = False
) -> RankTimes:
    """Return the times of a rank in a cell so far, as far as it has published them.

    Parameters
    ----------
    now : int
        The time, by `time.monotonic_ns`; of a rank that `died`, when it did.
    """
    slot = control.read_slot(rank)
    timing = control.read_timing(rank)
    for _ in range(_TRIES):
        again = control.read_slot(rank)
        if again.version == slot.version:
            break
        slot, timing = again, control.read_timing(rank)
    ended = slot.readable and slot.cell == task and slot.state in ENDED
    whole = max(0, (slot.since_ns if ended else now) - began_ns)
    finished = whole if ended or died else 0
    if timing.cell != task:  # it has not begun
        return _times(whole, 0, 0, finished, 0)
    waiting, moving = timing.wait_ns, timing.moving_ns
    if not ended:
        waits_since = max(slot.since_ns, timing.as_of_ns) if is_waiting(slot, task) else now
        waiting += now - waits_since
        if timing.begin_ns:
            inside = timing.as_of_ns > timing.begin_ns + OPERATION_BITS
            moving += waits_since - timing.begin_ns - (timing.operation_wait_ns if inside else 0)
    return _times(whole, waiting, moving, finished, None if timing.uncounted else timing.operations)


def is_waiting(slot: SlotRecord, task: int) -> bool:
    """Whether a rank waits in an operation of a cell."""
    return slot.readable and slot.cell == task and slot.state is State.WAITING


def _times(whole: int, waiting: int, moving: int, finished: int, operations: int | None) -> RankTimes:
    """Return the parts of a rank's whole time: what is neither waiting nor moving is computing."""
    waiting = min(max(0, waiting), whole)
    moving = min(max(0, moving), whole - waiting)
    return RankTimes(whole - waiting - moving, waiting, moving, finished, operations)
