"""Nonblocking collectives: what ``async_op=True`` starts, and how it makes progress.

A collective is *posted* when its record lies in a slot and its rank has arrived; it is *complete* when all
members have arrived, and this rank has read their records.  Neither step blocks.  A collective that finds no
free slot is posted later.  Another collective of the same group first completes all that are pending: every
member must reach those first, so this adds no wait that could not end.

Every nonblocking collective is one exchange of records: a reduction moves all values, and each member
combines them itself.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbparallel.distributed.collectives.exchange import Exchange
from nbparallel.distributed.collectives.movements import Movement
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import copied
from nbparallel.distributed.slots.slot_protocol import SlotProtocol
from nbparallel.distributed.work import Work


@dataclass(slots=True)
class PendingOperation:
    """One collective that has begun and is not complete."""

    movement: Movement
    complete: Callable[[list[Any]], Any]
    """Returns the operation's result, from what came from each source."""
    work: Work
    filled: Any = None
    """What the user passed to be filled: it is the result instead, unless None."""
    values: Sequence[Any] = ()
    """Copies of its values: what this member takes itself."""
    record: bytes = b""
    keepalive: object = None
    """What the record refers to, to be held until it was read."""
    state: dict[str, Any] | None = None
    """Of the slot protocol when it was posted; None until there is a slot for it."""


class ProgressEngine:
    """The pending collectives of one group on this rank.

    A pending collective is an ordinary one whose state is put aside between two steps: what the slot protocol
    keeps of the collective that it is in is saved, and restored when all members have arrived.
    """

    def __init__(
        self,
        context: RankContext,
        protocol: SlotProtocol,
        exchange: Exchange,
        changed: Callable[[], None],
    ) -> None:
        self._context, self._protocol, self._exchange = context, protocol, exchange
        self._changed = changed
        self._queue: deque[PendingOperation] = deque()
        self._busy = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, pending: PendingOperation) -> None:
        """Begin a collective; its values are copied now, even if there is no slot yet."""
        pending.values = [copied(x) for x in pending.movement.values]
        pending.record, pending.keepalive, _ = self._exchange.write(pending.movement, pending.values)
        self._queue.append(pending)
        self._changed()
        self.advance()

    def advance(self) -> None:
        """Post and complete collectives as far as possible, without blocking."""
        if self._busy or not self._queue:
            return
        self._busy = True
        try:
            while self._queue:
                for pending in self._queue:
                    if pending.state is None and not self._protocol.has_free_slot():
                        break
                    if pending.state is None:
                        self._post(pending)
                first = self._queue[0]
                if first.state is None or self._protocol.missing(first.state["arrivals"]):
                    return
                self._finish(first, first.state)
        finally:
            self._busy = False

    def _post(self, pending: PendingOperation) -> None:
        """Write a record and arrive; there is a free slot."""
        context, protocol, movement = self._context, self._protocol, pending.movement
        outer = context.open  # posted while another operation waits: that one is still open afterwards
        protocol.begin(movement.operation, movement.fingerprint, pending.work.line)
        self._exchange.hold(pending.keepalive)
        protocol.put(pending.record)
        protocol.arrive()
        pending.state = protocol.state()
        context.open = outer

    @contextlib.contextmanager
    def _resumed(self, state: dict[str, Any]) -> Iterator[None]:
        """Within the context, the protocol is in a pending collective."""
        former = self._protocol.state()
        self._protocol.restore(state)
        try:
            yield
        finally:
            self._protocol.restore(former)

    def _finish(self, pending: PendingOperation, state: dict[str, Any]) -> None:
        """Complete a collective; an error of this call alone is raised by its `Work.wait`."""
        context, protocol, work = self._context, self._protocol, pending.work
        outer, context.open = context.open, state["number"]
        try:
            with self._resumed(state):
                context.waiter.fence()  # read the slots only after their arrival counters
                protocol.compare()
                _, found = self._exchange.read(pending.movement, pending.values)
                protocol.release(wake=True)
        except ValueError as error:  # overlapping memory: all members ended it, before any array was written
            work.fail(error)
        except BaseException as error:
            work.fail(error)
            raise
        else:
            try:
                value = pending.complete(found)
                work.finish(value if pending.filled is None else pending.filled)
            except Exception as error:  # noqa: BLE001 - the values of other members can raise anything when combined
                work.fail(error)
        finally:
            context.open = context.open or outer  # not 0: the collective did not come to its end
            self._queue.popleft()
            self._changed()

    def flush(self, work: Work | None = None, deadline_ns: int | None = None) -> None:
        """Block until `work` is complete, or all pending collectives."""
        while self._queue and (work is None or not work.done):
            self.advance()
            if self._queue and (work is None or not work.done):
                self._busy = True  # the wait has changed the protocol: nothing may be posted until it ends
                try:
                    self._wait_for(self._queue[0].state, deadline_ns)
                finally:
                    self._busy = False

    def _wait_for(self, state: dict[str, Any] | None, deadline_ns: int | None) -> None:
        """Wait until every member has arrived at a collective; if None, until there is a free slot."""
        protocol = self._protocol
        if state is None:
            protocol.deadline_ns = deadline_ns
            protocol.wait_for_readers(protocol.number + 1)
            return
        with self._resumed(state):
            protocol.deadline_ns = deadline_ns
            protocol.wait_for_arrivals()

    def poll(self, work: Work) -> None:
        """Advance without blocking; raises if `work` can never complete, so that no rank polls forever."""
        self.advance()
        state = self._queue[0].state if self._queue and not work.done else None
        if state is not None:
            self._context.check_peers(self._protocol.peers)
            if any(map(self._context.gone, self._protocol.missing(state["arrivals"]))):
                self.flush(work)

    def drop(self) -> None:
        """Drop all pending collectives at the end of their cell."""
        while self._queue:
            self._queue.popleft().work.drop()
        self._changed()
