"""Collectives that were begun with ``async_op=True`` and go on later, in their order.

One is *posted* when its letter lies in a slot and its rank has arrived; it is *finished* when all have, and
this rank has taken what was for it.  Neither waits.  What finds no free slot is posted later.  Another
collective of the same group finishes all that were begun before it: every member must come to those first, so
that no wait is added that would not end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nbparallel.distributed.collectives.exchange import Exchange, Movement, Prepared
from nbparallel.distributed.slots.pending_slots import PendingSlot, PendingSlots
from nbparallel.distributed.work import Work


@dataclass(slots=True)
class PendingOperation:
    """One collective under way."""

    movement: Movement
    complete: Callable[[list[Any]], Any]
    """From what came from each source to what the operation returns."""
    work: Work
    prepared: Prepared = (b"", None)
    """Its letter, and what that refers to."""
    slot: PendingSlot | None = None
    """None until there is a slot for it."""


class ProgressEngine:
    """The collectives of one group that this rank has begun."""

    def __init__(self, pending_slots: PendingSlots, exchange: Exchange, changed: Callable[[], None]) -> None:
        self._pending_slots, self._exchange, self._changed = pending_slots, exchange, changed
        self._queue: deque[PendingOperation] = deque()
        self._busy = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, pending: PendingOperation) -> None:
        """Begin a collective: what it brings is copied now, whenever there is a slot."""
        pending.prepared = self._exchange.prepare(pending.movement)
        self._queue.append(pending)
        self._changed()
        self.advance()

    def advance(self) -> None:
        """Post and finish what can be, without waiting."""
        if self._busy or not self._queue:
            return
        self._busy = True
        try:
            while self._queue:
                for pending in self._queue:
                    if pending.slot is None and self._pending_slots.has_slot():
                        pending.slot = self._exchange.post(
                            pending.movement, pending.prepared, pending.work.line
                        )
                    if pending.slot is None:
                        break
                first = self._queue[0]
                if first.slot is None or not self._pending_slots.has_arrived(first.slot):
                    return
                self._finish(first, first.slot)
        finally:
            self._busy = False

    def _finish(self, pending: PendingOperation, slot: PendingSlot) -> None:
        """Take and complete; what is wrong with this call alone is raised when it is waited for."""
        work = pending.work
        try:
            found = self._exchange.collect(pending.movement, slot)
        except ValueError as error:  # overlapping memory: all members ended it, before anything was written
            work.fail(error)
        except BaseException as error:
            work.fail(error)
            raise
        else:
            try:
                work.finish(pending.complete(found))
            except Exception as error:  # noqa: BLE001 - whatever the values of others raise when combined
                work.fail(error)
        finally:
            self._queue.popleft()
            self._changed()

    def flush(self, work: Work | None = None, deadline_ns: int | None = None) -> None:
        """Wait until `work` is finished, or everything."""
        while self._queue and (work is None or not work.done):
            self.advance()
            if self._queue and (work is None or not work.done):
                self._busy = True  # what waits here has changed the meeting: nothing may be posted meanwhile
                try:
                    self._pending_slots.wait_for(self._queue[0].slot, deadline_ns)
                finally:
                    self._busy = False

    def look(self, work: Work) -> None:
        """Go on without waiting; raises if `work` can never be finished, so that nobody asks for ever."""
        self.advance()
        first = self._queue[0] if self._queue and not work.done else None
        if first is not None and first.slot is not None and self._pending_slots.is_hopeless(first.slot):
            self.flush(work)

    def drop(self) -> None:
        """End everything with its cell."""
        while self._queue:
            self._queue.popleft().work.drop()
        self._changed()
