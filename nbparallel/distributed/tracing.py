"""The tracer of a rank's statements and operations: when they began and ended, for the timeline of its cell.

A traced operation runs behind a function that the tracer puts into the communicator's own attributes, where
Python looks before it looks at the class.  Tracing one costs a microsecond, a third of a small all_reduce.
So after `SHORT` short operations in a statement the functions of the fastest operations are removed::

    statement begins     install: each call of all_reduce, … is traced
    SHORT short calls    remove: calls run the class's methods, without any cost, and are only counted
    a wait that sleeps   traced by `RankContext.wait` itself; install for the next AFTER_A_WAIT calls
    next statement       install
    cell ends            remove all

An ``if`` in every operation instead was measured (decision 16).  The last `KEPT` operations are kept.
Off by default: a rank of a session enables it (`Communicator.record`).
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from nbparallel.distributed.collectives.collectives import GroupCollectives
from nbparallel.distributed.collectives.group_state import GroupState
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.wire.timeline import Noted, RankTimeline, pack

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
    methods : mapping
        The operations to trace, by name.
    attributes : dict
        The attributes of the object whose methods they are; traced operations are put there.
    world : GroupCollectives
        Those of all ranks.
    """

    def __init__(
        self,
        methods: Mapping[str, Callable[..., Any]],
        attributes: dict[str, Any],
        context: RankContext,
        world: GroupCollectives,
    ) -> None:
        self._context, self._waiter, self._world = context, context.waiter, world
        self._attributes = attributes
        self.state: GroupState | None = None
        """The group of the operation that runs, unless it takes a fast path (`OperationBase._run`)."""
        self._noted: deque[Noted] = deque(maxlen=KEPT)
        traced = {name: self._traced(name, method) for name, method in methods.items()}
        self._quick = {name: traced.pop(name) for name in QUICK}
        self._others = traced
        self._statements: deque[tuple[int, int]] = deque(maxlen=KEPT_STATEMENTS)
        self._count = self._short = self._operations = self._unseen = 0
        self._left_at = -1  # context.operations when the functions were removed
        self._began_ns = self._ended_ns = 0
        self._inside, self._awaited = False, -1

    # -- cells -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a cell."""
        self._noted.clear()
        self._statements.clear()
        self._count = self._unseen = 0
        self._left_at = -1
        self._inside, self._awaited = False, -1
        self._short = SHORT
        self._operations = self._context.operations
        self._attributes.update(self._quick)
        self._attributes.update(self._others)
        self._began_ns = _clock()

    def at_line(self, line: int) -> None:
        """Record the beginning of a statement."""
        self._statements.append((line, _clock()))
        self._install(SHORT)

    def end(self) -> None:
        """Stop tracing until the next cell."""
        self._ended_ns = _clock()
        if self._left_at >= 0:
            self._unseen += self._context.operations - self._left_at
            self._left_at = -1
        for name in (*self._quick, *self._others):
            self._attributes.pop(name, None)

    def take(self) -> RankTimeline:
        """Return the notes on the cell that has ended."""
        context, noted = self._context, self._noted
        full = self._count > len(noted)
        return pack(
            context.rank,
            os.getpid(),
            self._began_ns,
            self._ended_ns,
            noted_from_ns=noted[0][2] if full else self._began_ns,
            operations=max(context.operations - self._operations, len(noted)),
            omitted=self._unseen + self._count - len(noted),
            noted=self._settled(),
            statements=tuple(self._statements),
        )

    def close(self) -> None:
        """Release the methods."""
        self._quick.clear()
        self._others.clear()
        self._attributes = {}

    # -- operations ------------------------------------------------------------------------------------

    def waited(self, wait: WaitRecord, peer: int) -> None:
        """Trace a wait in which this rank was about to sleep; `peer` has ended it, if it is not -1."""
        if self._inside:
            self._awaited = peer
            return
        now = _clock()
        begin = wait.began_ns
        self._count += 1
        self._noted.append(
            (wait.operation.name, wait.line, begin, now, now - begin, 0, wait.peer, peer, 0, _WORLD, False)
        )
        self._install(AFTER_A_WAIT)

    def _install(self, short: int) -> None:
        """Trace at least `short` more short operations."""
        self._short = max(self._short, short)
        if self._left_at >= 0:
            self._unseen += self._context.operations - self._left_at
            self._left_at = -1
            self._attributes.update(self._quick)

    def _remove(self) -> None:
        self._left_at = self._context.operations
        for name in self._quick:
            self._attributes.pop(name, None)

    def _traced(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return an operation that is traced: it only stores, and `take` interprets what it stored."""
        context, waiter, protocol, noted = self._context, self._waiter, self._world.protocol, self._noted
        place, keyword = _peer_argument(method)
        quick = name in QUICK

        def recorded(*args: Any, **options: Any) -> Any:
            if self._inside:  # an operation that is made of others counts once
                return method(*args, **options)
            self._inside, self._awaited, self.state = True, -1, None
            former, waited, nbytes, failed = protocol.number, waiter.wait_ns, context.nbytes, True
            begin = _clock()
            try:
                value = method(*args, **options)
                failed = False
            finally:
                end = _clock()
                self._inside = False
                peer = args[place] if 0 <= place < len(args) else options.get(keyword) if options else None
                number, group = self._met(former)
                noted.append(
                    (
                        name, context.call_site.line(), begin, end, waiter.wait_ns - waited,
                        context.nbytes - nbytes, peer if type(peer) is int else -1, self._awaited,
                        number, group, failed,
                    )
                )  # fmt: skip
                self._count += 1
            if quick and end - begin < SHORT_NS:
                self._short -= 1
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
            known, slept = peer if 0 <= peer < size else -1, min(waited, end - begin)
            yield name, line, begin, end, slept, nbytes, known, awaited, number, group, failed


def inspect_parameters(operations: Iterable[Callable[..., Any]]) -> None:
    """Inspect the operations' parameters, before this process is forked or its first cell begins."""
    for operation in operations:
        _peer_parameter(operation)


def _peer_argument(method: Callable[..., Any]) -> tuple[int, str]:
    """Return position and keyword of an operation's root or other rank; (-1, "") if it has none."""
    place, name = _peer_parameter(getattr(method, "__func__", method))
    return (place - 1 if place > 0 and hasattr(method, "__func__") else place), name


@functools.cache
def _peer_parameter(function: Callable[..., Any]) -> tuple[int, str]:
    for place, name in enumerate(inspect.signature(function).parameters):
        if name in ("dst", "src"):
            return place, name
    return -1, ""
