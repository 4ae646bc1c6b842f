"""Matching of messages and receives: unexpected messages, posted receives, and receives that wait.

A message that arrives goes to the first posted receive that it matches (`irecv`); else it is unexpected, and
stays so until a receive asks for it.  Messages of one source and tag are matched in the order they were sent.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from nbparallel.distributed.point_to_point.packing import INTRODUCTION, Envelope, RingReader
from nbparallel.distributed.runtime.call_site import receive_text
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.distributed.work import Work
from nbparallel.errors import CollectiveTimeoutError, NbParallelError, rank_list
from nbparallel.wire.control import Operation

Late: TypeAlias = CollectiveTimeoutError | None
"""Why a message that has arrived cannot be received yet; None: it can."""

if TYPE_CHECKING:
    from nbparallel.wire.inspection import SentMessage

    Counts = tuple[tuple[SentMessage, int], ...]
    """Messages, and how many there are of each."""


class UnexpectedMessages:
    """The queue of messages that have arrived at one rank and were not received, for each source.

    Parameters
    ----------
    rank : int
        The rank that receives.
    rings : sequence of RingReader
        Its rings, one for each source.
    """

    def __init__(self, rank: int, rings: Sequence[RingReader]) -> None:
        self._rank, self._rings = rank, rings
        self.queues: list[deque[Envelope]] = [deque() for _ in rings]
        self.count = 0
        """How many messages are in all queues."""
        self.introductions: dict[tuple[int, int], bytes] = {}
        """Handles of groups' slot areas, by the sender and the word of the group."""
        self.newest = [0] * len(rings)
        """The highest number of a message of each source that was received."""
        self.last_source = -1
        self._late: Counter[SentMessage] = Counter()
        """Messages of earlier cells that were received in this one."""

    def __iter__(self) -> Iterator[Envelope]:
        return (message for queue in self.queues for message in queue)

    def find(self, src: int | None, tag: int, group: int) -> Envelope | None:
        """Return the first message that matches; it stays in the queue until it was received."""
        for source in self._order() if src is None else (src,):
            for message in self.queues[source]:
                if message.tag == tag and message.group == group:
                    return message
            ring = self._rings[source]
            while ring.has_message():
                message = ring.take()
                self._add(message)
                if message.tag == tag and message.group == group:
                    return message
        return None

    def take_in(self, source: int) -> None:
        """Move everything that has arrived from a rank out of its ring."""
        ring = self._rings[source]
        while ring.has_message():
            self._add(ring.take())

    def _add(self, message: Envelope) -> None:
        if message.kind == INTRODUCTION:
            self.introductions[message.source, message.group] = bytes(message.body)
            self._acknowledge(message.source)
        else:
            self.queues[message.source].append(message)
            self.count += 1

    def _order(self) -> Sequence[int]:
        """Return all sources, beginning behind the one received from last: no source starves."""
        n, last = len(self._rings), self.last_source
        return [(last + 1 + i) % n for i in range(n)]

    def received(self, message: Envelope) -> None:
        """Remove a message that was received, and acknowledge it to its sender."""
        self.last_source = message.source
        if message.cell:
            self._late[self._described(message)] += 1
        self._remove(message)

    def _remove(self, message: Envelope) -> None:
        source = message.source
        self.queues[source].remove(message)
        self.count -= 1
        self.newest[source] = max(self.newest[source], message.number)
        self._acknowledge(source)

    def _acknowledge(self, source: int) -> None:
        queue, ring = self.queues[source], self._rings[source]
        ring.acknowledge(queue[0].number - 1 if queue else ring.number, self.newest[source])

    def tags_of(self, sources: Sequence[int]) -> str:
        """Return a remark on what has arrived from some ranks with other tags; empty: nothing has."""
        tags = sorted({(r, m.tag, m.cell) for r in sources for m in self.queues[r]})
        if not tags:
            return ""
        found = ", ".join(
            f"tag {tag} from rank {source}{f' of {cell}' if cell else ''}" for source, tag, cell in tags[:8]
        )
        return f" (what has arrived: {found})"

    def settle(self, source: int, position: int, cell: str, drop: Callable[[Envelope], None]) -> None:
        """Settle what a rank has sent before a position of its ring, in the cell that has ended.

        Parameters
        ----------
        cell : str
            The messages stay as those of this cell; empty: they are dropped.
        drop : callable
            Called with each message before it is dropped.
        """
        ring = self._rings[source]
        while ring.has_message_before(position):
            self._add(ring.take())
        for message in [m for m in self.queues[source] if not m.cell]:
            if cell:
                message.cell = cell
            else:
                drop(message)
                self._remove(message)

    def report(self) -> tuple[Counts, Counts]:
        """Return what was not received, and what was of earlier cells, with how many there are of each."""
        from nbparallel.wire.inspection import is_users  # few cells leave any

        late, self._late = self._late, Counter()
        queued = Counter(self._described(m) for m in self if is_users(m.group))
        return tuple(queued.items()), tuple(late.items())

    def _described(self, m: Envelope) -> SentMessage:
        from nbparallel.wire.inspection import SentMessage

        return SentMessage(m.source, self._rank, m.tag, m.line, bool(m.group), m.cell)


class MatchRequest:
    """A receive that waits for a message, as its wait and its errors need it.

    Parameters
    ----------
    src : int or None
        The source; None: any of `sources`, by default of all ranks.
    """

    def __init__(
        self,
        context: RankContext,
        unexpected: UnexpectedMessages,
        rings: Sequence[RingReader],
        src: int | None,
        tag: int,
        line: int,
        deadline_ns: int | None,
        sources: Sequence[int] = (),
    ) -> None:
        self._context, self._unexpected = context, unexpected
        self.src, self.tag, self.line, self.deadline_ns = src, tag, line, deadline_ns
        others = [r for r in sources or range(context.world_size) if r != context.rank]
        self.peers = (others or [context.rank]) if src is None else [src]
        self._rings = [rings[r] for r in self.peers]
        only = self._rings[0] if len(self._rings) == 1 else None
        self.satisfied = (
            only.has_message if only is not None else lambda: any(ring.has_message() for ring in self._rings)
        )
        """Whether any message has arrived from the sources; it need not match."""

    def __str__(self) -> str:
        return receive_text("recv", self.src, self.tag)

    def check_source(self) -> None:
        """Raise if this rank would wait for itself; with a time-out the wait ends, and is no deadlock."""
        rank = self._context.rank
        if self.peers == [rank] and self.deadline_ns is None:
            place = self._context.call_site.place(self.line)
            raise self._context.mark_failed(
                self._context.deadlock(
                    f"rank {rank} waits in {self}{place} for itself and has sent itself nothing "
                    "that matches" + self._unexpected.tags_of([rank])
                )
            )

    def wait_record(self) -> WaitRecord:
        """Return the record of a wait that begins now."""
        return WaitRecord(
            Operation.recv, self._awaited, self.explain, self.line, any_source=self.src is None,
            peer=-1 if self.src is None else self.src, tag=self.tag, deadline_ns=self.deadline_ns,
        )  # fmt: skip

    def _awaited(self) -> list[int]:
        return [] if self.satisfied() else self.peers

    def explain(self, finished: list[int]) -> NbParallelError:
        """Return the error about sources that left the cell without sending."""
        participants, place = self._context.cell.ranks, self._context.call_site.place(self.line)
        absent = [r for r in finished if r not in participants]
        left = [r for r in finished if r in participants]
        parts = [f"{rank_list(left)} finished the cell without sending it"] if left else []
        if absent:
            parts.append(f"{rank_list(absent)} {'is' if len(absent) == 1 else 'are'} not in this cell")
        return self._context.deadlock(
            f"rank {self._context.rank} waits in {self}{place}, and "
            + " and ".join(parts)
            + self._unexpected.tags_of(self.peers)
        )


@dataclass(slots=True)
class Receive:
    """One receive that was posted."""

    work: Work
    tensor: Any
    """What the user passed to be filled, and returns."""
    buffer: AnyArray | None
    """The same, as a plain array."""
    src: int | None
    tag: int
    group: int
    sources: tuple[int, ...]
    """The ranks that None stands for."""

    def matches(self, message: Envelope) -> bool:
        """Whether a message is for it."""
        mine = message.source in self.sources if self.src is None else message.source == self.src
        return mine and message.tag == self.tag and message.group == self.group
