"""The tracer of a rank's statements and operations: when they began and ended, for the timeline of its cell.

The tracer is one of the communicator's `Observers`.  Tracing an operation costs a microsecond, a third of a
small all_reduce.  So after `SHORT` short operations in a statement the fastest ones are observed no more::

    statement begins     observe: each call of all_reduce, … is traced
    SHORT short calls    remove: calls run the class's methods, without any cost, and are only counted
    a wait that sleeps   traced by `RankContext.wait` itself; observe the next AFTER_A_WAIT calls
    next statement       observe
    cell ends            nothing is traced until the next one begins

An ``if`` in every operation instead was measured (decision 16).  The last `KEPT` operations are kept.
Off by default: a rank of a session enables it (`Communicator.record`).

What the tracer counts it publishes in the control segment (`TimingRecord`) when an operation begins and
ends, for readers while the cell runs.  Calls without the tracer are counted by what
`RankContext.operations` has grown by between two traced ones, each as long as the traced short ones of the
statement were on average, and all no longer than the time between: else a cell of nothing but small
operations would seem to compute.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nbparallel.distributed.collectives.group_collectives import GroupCollectives, GroupState
from nbparallel.distributed.runtime.observers import Observers
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.wire.control_layout import (
    OPERATION_BITS,
    OPERATION_ENDED,
    TIMING_INSIDE,
    TIMING_MOVING,
    TIMING_OPERATIONS,
    TIMING_UNCOUNTED,
    Operation,
)

if TYPE_CHECKING:
    from nbparallel.wire.messages import Noted, RankTimeline

KEPT = 2000
"""Operations of one cell that are kept, the last ones; 50 bytes each on their way."""
KEPT_STATEMENTS = 1000
SHORT = 100
"""Short operations that each statement of a cell has noted one by one: 0.1 ms in all."""
SHORT_NS = 50_000
"""An operation that takes longer is always noted: what noting costs is a fiftieth of it."""
AFTER_A_WAIT = 4
"""Operations to note after a sleep of at least a tenth of a millisecond."""
QUICK = ("all_reduce", "barrier", "broadcast", "send", "recv")
_clock = time.monotonic_ns
_WORLD: tuple[int, ...] = ()


class OperationTracer:
    """Traces the operations of one rank, from `begin` to `end` of each cell.

    Parameters
    ----------
    operations : iterable of str
        Those to trace.
    observers : Observers
        Of the object whose methods they are.
    world : GroupCollectives
        Those of all ranks.
    """

    def __init__(
        self,
        operations: Iterable[str],
        observers: Observers,
        context: RankContext,
        world: GroupCollectives,
    ) -> None:
        self._context, self._waiter, self._world = context, context.waiter, world
        self._words, self._timing = context.words, context.timing
        self._observers = observers
        self.state: GroupState | None = None
        """The group of the operation that runs, unless it takes a fast path (`OperationBase._run`)."""
        self._noted: deque[Noted] = deque(maxlen=KEPT)
        self._calls: dict[str, Callable[..., Any]] = {}
        """What traces operations, by name."""
        self._statements: deque[tuple[int, int]] = deque(maxlen=KEPT_STATEMENTS)
        self._traced_count = self._unseen = self._waits = self._short = 0
        self._counted_at = self._counted_ns = 0
        """`RankContext.operations`, and the time without waits, when `_unseen` was right."""
        self._removed = False
        self._began_ns = self._ended_ns = self._moving_ns = self._wait_ns = 0
        self._short_count = self._short_ns = 0  # of short operations of the statement that were traced
        self._inside, self._awaited = True, -1  # no cell runs
        observers.add(self, operations, inside=True)

    # -- cells -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a cell."""
        self._noted.clear()
        self._statements.clear()
        self._traced_count = self._unseen = self._waits = self._moving_ns = self._context.private_nbytes = 0
        self._renew()
        self._inside, self._awaited = False, -1
        self._began_ns = _clock()

    @property
    def moving_ns(self) -> int:
        """How long this rank has been in operations of this cell until now, waits excluded."""
        return self._moving_ns if self._context.operations == self._counted_at else self.count()

    def at_line(self, line: int) -> None:
        """Record the beginning of a statement."""
        self._statements.append((line, _clock()))
        self._renew()

    def end(self) -> None:
        """Stop tracing until the next cell."""
        self._ended_ns, self._wait_ns = _clock(), self._context.wait_ns
        self._renew()
        self._inside = True
        self._words[self._timing + TIMING_INSIDE] = 0

    def take(self) -> RankTimeline:
        """Return the notes on the cell that has ended."""
        from nbparallel.wire.messages import RankTimeline  # no script needs it

        noted, operations = self._noted, self._traced_count + self._unseen
        return RankTimeline(
            self._context.rank,
            os.getpid(),
            self._began_ns,
            self._ended_ns,
            noted_from_ns=noted[0][2] if self._traced_count + self._waits > len(noted) else self._began_ns,
            operations=operations,
            omitted=max(0, operations - len(noted)),
            wait_ns=self._wait_ns,
            moving_ns=self._moving_ns,
            noted=tuple(self._settled()),
            statements=tuple(self._statements),
            private_nbytes=self._context.private_nbytes,
        )

    def close(self) -> None:
        """Have all operations run as if there were no tracer."""
        self._observers.remove(self)
        self._calls.clear()

    # -- operations ------------------------------------------------------------------------------------

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return an operation that is traced; made once, since the quickest ones come and go."""
        traced = self._calls.get(name)  # of the class's method: no observer is further inside
        if traced is None:
            traced = self._calls[name] = self._traced(name, call)
        return traced

    def waited(self, wait: WaitRecord, peer: int) -> None:
        """Trace a wait in which this rank was about to sleep; `peer` has ended it, if it is not -1."""
        if self._inside:
            self._awaited = peer
            return
        now = _clock()
        begin = wait.began_ns
        self._waits += 1
        self._noted.append(
            (wait.operation.name, wait.line, begin, now, now - begin, 0, wait.peer, peer, 0, _WORLD, False)
        )
        self._install(AFTER_A_WAIT)

    def _install(self, short: int) -> None:
        """Trace at least `short` more short operations."""
        self._short = max(self._short, short)
        if self._removed:
            self._removed = False
            self._observers.add(self, QUICK, inside=True)

    def _remove(self) -> None:
        self._removed = True
        self._words[self._timing + TIMING_UNCOUNTED] = 1
        self._observers.remove(self, QUICK)

    def _renew(self) -> None:
        """Trace short operations anew, after those until now were counted."""
        self._install(SHORT)
        self.count()
        self._short_count = self._short_ns = 0

    def count(self) -> int:
        """Count what was called without the tracer until now, and publish it; return the time in operations.

        Waits are no part of it.  In an operation, or where no cell runs, nothing was called.
        """
        words, timing, called = self._words, self._timing, self._context.operations
        now = _clock() - self._waiter.wait_ns
        unseen = 0 if self._inside else called - self._counted_at
        estimate = min(unseen * self._short_ns // max(1, self._short_count), now - self._counted_ns)
        moving = max(0, self._moving_ns) + max(0, estimate)  # a wait inside of a wait counts twice
        self._unseen, self._moving_ns = self._unseen + unseen, moving
        self._counted_at, self._counted_ns = called, now
        words[timing + TIMING_MOVING] = moving
        words[timing + TIMING_OPERATIONS] = self._traced_count + self._unseen
        words[timing + TIMING_UNCOUNTED] = self._removed
        return moving

    def _traced(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return an operation that is traced: it only stores, and `take` interprets what it stored."""
        context, waiter, protocol, noted = self._context, self._waiter, self._world.protocol, self._noted
        place, keyword = peer_argument(method)
        quick, code = name in QUICK, operation_of(name).value
        words, timing, time_bits = self._words, self._timing, ~OPERATION_BITS
        inside, counted, moving = (
            timing + word for word in (TIMING_INSIDE, TIMING_OPERATIONS, TIMING_MOVING)
        )

        def recorded(*args: Any, **options: Any) -> Any:
            if self._inside:  # an operation that is made of others counts once
                return method(*args, **options)
            if context.operations != self._counted_at:
                self.count()
            self._inside, self._awaited, self.state = True, -1, None
            former, waited, nbytes, failed = protocol.number, waiter.wait_ns, context.nbytes, True
            context.former_wait_ns = waited
            begin = _clock()
            words[inside] = begin & time_bits | code
            try:
                value = method(*args, **options)
                failed = False
            finally:
                end = _clock()
                words[inside] = end | OPERATION_ENDED
                self._inside = False
                slept = waiter.wait_ns - waited
                peer = args[place] if 0 <= place < len(args) else options.get(keyword) if options else None
                number, group = self._met(former)
                noted.append(
                    (
                        name, context.call_site.line(), begin, end, slept,
                        context.nbytes - nbytes, peer if type(peer) is int else -1, self._awaited,
                        number, group, failed,
                    )
                )  # fmt: skip
                self._traced_count += 1
                self._moving_ns += end - begin - slept
                words[counted] = self._traced_count + self._unseen
                self._counted_at, self._counted_ns = context.operations, end - waiter.wait_ns
                if slept:
                    context.write_timing()
            if end - begin >= SHORT_NS:
                words[moving] = max(0, self._moving_ns)
            elif quick:
                self._short -= 1
                if self._short < SHORT // 2:  # caches are warm
                    self._short_count += 1
                    self._short_ns += end - begin - slept
                if self._short <= 0:
                    self._remove()
            return value

        return recorded

    def _met(self, former: int) -> tuple[int, tuple[int, ...]]:
        """Return which collective of its group the operation was, and the group's members (none: all)."""
        state = self.state
        if state is not None and state.word:
            return 0 if state.collectives is None else state.collectives.protocol.number, state.ranks
        number = self._world.protocol.number
        return (0 if number == former else number), _WORLD

    def _settled(self) -> Iterator[Noted]:
        """Yield what was noted, checked: users pass what they like as a rank."""
        size = self._context.world_size
        for name, line, begin, end, waited, nbytes, peer, awaited, number, group, failed in self._noted:
            yield (
                name, line, begin, end, min(waited, end - begin), nbytes, peer if 0 <= peer < size else -1,
                awaited, number, group, failed,
            )  # fmt: skip


def operation_of(name: str) -> Operation:
    """Return the operation of the control segment that a method is: ``all_gather_object`` an all_gather."""
    return max(
        (operation for operation in Operation if operation.name in name),
        key=lambda operation: len(operation.name),
        default=Operation.none,
    )


def peer_argument(method: Any) -> tuple[int, str]:
    """Return position and keyword of an operation's root or other rank; (-1, "") if it has none."""
    code = method.__func__.__code__  # `inspect.signature` would take each rank milliseconds
    parameters = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    return next(((i, name) for i, name in enumerate(parameters) if name in ("dst", "src")), (-1, ""))
