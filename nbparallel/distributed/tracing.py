"""Recorder: notes when a rank's statements and operations began and ended, for the timeline of its cell.

An operation is noted by a function that stands before it in the communicator's own attributes, where Python
looks first.  That costs a microsecond, a third of a small all_reduce.  So after `SHORT` short ones in a
statement these functions are taken away from the quickest operations, which then cost what they cost without
a recorder; they are only counted.  A wait that is long enough to sleep is always noted
(`RankContext.wait`), and
brings the functions back for a few operations.  What was noted last is kept, `KEPT` of it.

Off by default: a rank of a session switches it on (`Communicator.record`).
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from nbparallel.distributed.collectives.collectives import GroupCollectives
from nbparallel.distributed.group import GroupState
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.wire.timeline import Noted, RankTimeline, pack

if TYPE_CHECKING:
    from nbparallel.distributed.communicator import Communicator

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
OTHERS = (
    "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list",
    "reduce", "gather", "all_gather", "scatter", "reduce_scatter", "all_to_all", "monitored_barrier",
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "assert_same", "average_gradients",
)  # fmt: skip
_clock = time.monotonic_ns
_WORLD: tuple[int, ...] = ()


class OperationTracer:
    """One rank's notes on the cell that runs.

    Parameters
    ----------
    communicator : Communicator
        Whose operations are noted from `begin` to `end`.
    world : Collectives
        Those of all ranks.
    """

    def __init__(self, communicator: Communicator, context: RankContext, world: GroupCollectives) -> None:
        self._context, self._waiter, self._world = context, context.waiter, world
        self._attributes = vars(communicator)
        self.state: GroupState | None = None
        """Who met in the operation that runs, if it did not go the quickest way (`OperationBase._run`)."""
        self._noted: deque[Noted] = deque(maxlen=KEPT)
        self._quick = {name: self._before(communicator, name) for name in QUICK}
        self._others = {name: self._before(communicator, name) for name in OTHERS}
        self._statements: deque[tuple[int, int]] = deque(maxlen=KEPT_STATEMENTS)
        self._count = self._short = self._operations = self._unseen = 0
        self._left_at = -1  # member.operations when the functions were taken away
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
        """Note the beginning of a statement."""
        self._statements.append((line, _clock()))
        self._come_back(SHORT)

    def end(self) -> None:
        """Leave the operations alone until the next cell."""
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
        """Let go of the communicator."""
        self._quick.clear()
        self._others.clear()
        self._attributes = {}

    # -- operations ------------------------------------------------------------------------------------

    def waited(self, wait: WaitRecord, peer: int) -> None:
        """Note a wait in which this rank was about to sleep; `peer` has ended it, if it is not -1."""
        if self._inside:
            self._awaited = peer
            return
        now = _clock()
        begin = wait.began_ns
        self._count += 1
        self._noted.append(
            (wait.operation.name, wait.line, begin, now, now - begin, 0, wait.peer, peer, 0, _WORLD, False)
        )
        self._come_back(AFTER_A_WAIT)

    def _come_back(self, short: int) -> None:
        """Note at least `short` short operations more."""
        self._short = max(self._short, short)
        if self._left_at >= 0:
            self._unseen += self._context.operations - self._left_at
            self._left_at = -1
            self._attributes.update(self._quick)

    def _leave(self) -> None:
        self._left_at = self._context.operations
        for name in self._quick:
            self._attributes.pop(name, None)

    def _before(self, communicator: Communicator, name: str) -> Callable[..., Any]:
        """Return what stands before an operation; it only stores, and `take` makes sense of it."""
        method = getattr(communicator, name)
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
                    self._leave()
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


def study(kind: type[Communicator]) -> None:
    """Look at the operations' parameters, before this process is forked or its first cell begins."""
    for name in (*QUICK, *OTHERS):
        _peer_parameter(getattr(kind, name))


def _peer_argument(method: Callable[..., Any]) -> tuple[int, str]:
    """Return where an operation is told its root or its other rank: place and keyword; (-1, "") if never."""
    place, name = _peer_parameter(getattr(method, "__func__", method))
    return (place - 1 if place > 0 and hasattr(method, "__func__") else place), name


@functools.cache
def _peer_parameter(function: Callable[..., Any]) -> tuple[int, str]:
    for place, name in enumerate(inspect.signature(function).parameters):
        if name in ("dst", "src"):
            return place, name
    return -1, ""
