"""Matching of messages and receives: unexpected messages, posted receives, and receives that wait.

A message that arrives goes to the first posted receive that it matches (`irecv`); else it is unexpected, and
stays so until a receive asks for it.  Messages of one source and tag are matched in the order they were sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nbparallel.distributed.point_to_point.packing import INTRODUCTION
from nbparallel.distributed.point_to_point.ring import Envelope, RingReader
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.distributed.work import Work
from nbparallel.errors import DeadlockError, NbParallelError, rank_list
from nbparallel.wire.control import Operation

Form = Callable[[Envelope], tuple[Any, tuple[int, ...]] | None]


class UnexpectedMessages:
    """The queue of messages that have arrived at one rank and were not received, for each source.

    A message can be received in a later cell than it was sent in, so it is reported at the end of the second
    cell (or the third, if it arrived after the end of the first).
    """

    def __init__(self, rings: Sequence[RingReader]) -> None:
        self._rings = rings
        self.queues: list[deque[Envelope]] = [deque() for _ in rings]
        self.introductions: dict[tuple[int, int], bytes] = {}
        """Handles of groups' slot areas, by the sender and the word of the group."""
        self.newest = [0] * len(rings)
        """The highest number of a message of each source that was received."""
        self.last_source = -1
        self._earlier = [0] * len(rings)
        """The last message of each source that had arrived when the last cell ended."""
        self._reported = [0] * len(rings)

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
        else:
            self.queues[message.source].append(message)

    def _order(self) -> Sequence[int]:
        """Return all sources, beginning behind the one received from last: no source starves."""
        n, last = len(self._rings), self.last_source
        return [(last + 1 + i) % n for i in range(n)]

    def received(self, message: Envelope) -> None:
        """Remove a message that was received, and acknowledge it to its sender."""
        source = message.source
        queue = self.queues[source]
        queue.remove(message)
        all_up_to = queue[0].number - 1 if queue else self._rings[source].number
        newest = self.newest[source] = max(self.newest[source], message.number)
        self.last_source = source
        self._rings[source].acknowledge(all_up_to, newest)

    def tags_of(self, sources: Sequence[int]) -> str:
        """Return a remark on what has arrived from some ranks with other tags; empty: nothing has."""
        tags = sorted({(r, m.tag) for r in sources for m in self.queues[r]})
        if not tags:
            return ""
        found = ", ".join(f"tag {tag} from rank {source}" for source, tag in tags[:8])
        return f" (what has arrived: {found})"

    def end_cell(self, form: Form) -> list[str]:
        """Return a sentence on the messages that are left from earlier cells, for each kind of message.

        Parameters
        ----------
        form : callable
            Returns dtype and shape of a message, None for what is no array.
        """
        left: dict[tuple[int, int, int, str], list[Envelope]] = {}
        for message in self:
            source = message.source
            if self._reported[source] < message.number <= self._earlier[source]:
                key = source, message.tag, message.group, _described(form(message))
                left.setdefault(key, []).append(message)
        self._reported, self._earlier = self._earlier, [ring.number for ring in self._rings]
        return [_sentence(*key, messages) for key, messages in left.items()]

    def clear(self) -> None:
        """Drop all messages."""
        for queue in self.queues:
            queue.clear()


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
        self.satisfied = only.has_message if only is not None else self._has_any
        """Whether any message has arrived from the sources; it need not match."""

    def __str__(self) -> str:
        return f"recv(src={self.src}{f', tag={self.tag}' if self.tag else ''})"

    def _has_any(self) -> bool:
        return any(ring.has_message() for ring in self._rings)

    def check_source(self) -> None:
        """Raise if this rank would wait for itself; with a time-out the wait ends, and is no deadlock."""
        rank = self._context.rank
        if self.peers == [rank] and self.deadline_ns is None:
            raise self._context.mark_failed(
                DeadlockError(
                    f"deadlock: rank {rank} waits in {self} on line {self.line} for itself and has sent "
                    "itself nothing that matches" + self._unexpected.tags_of([rank])
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
        participants = self._context.cell.ranks
        absent = [r for r in finished if r not in participants]
        left = [r for r in finished if r in participants]
        parts = [f"{rank_list(left)} finished the cell without sending it"] if left else []
        if absent:
            parts.append(f"{rank_list(absent)} {'is' if len(absent) == 1 else 'are'} not in this cell")
        return DeadlockError(
            f"deadlock: rank {self._context.rank} waits in {self} on line {self.line}, and "
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


class PostedReceives:
    """Posted receives: those of one rank that have not been matched yet, in the order of their calls.

    A message goes to the first of them that it matches, and to a blocking `recv` only if it matches none.

    Parameters
    ----------
    unexpected : UnexpectedMessages
        The messages that have arrived and were not received.
    serve : callable
        Completes a receive with a message, or with an error.
    """

    def __init__(self, unexpected: UnexpectedMessages, serve: Callable[[Receive, Envelope], None]) -> None:
        self._unexpected, self._serve = unexpected, serve
        self._receives: list[Receive] = []

    def __bool__(self) -> bool:
        return bool(self._receives)

    def add(self, receive: Receive) -> None:
        """Post a receive."""
        self._receives.append(receive)

    def match(self) -> None:
        """Complete every receive whose message has arrived."""
        if not self._receives:
            return
        for receive in list(self._receives):
            message = next(filter(receive.matches, self._unexpected), None)
            if message is not None:
                self._receives.remove(receive)
                self._serve(receive, message)

    def drop(self) -> None:
        """End all with the cell."""
        for receive in self._receives:
            receive.work.drop()
        self._receives.clear()


def _described(form: tuple[Any, tuple[int, ...]] | None) -> str:
    return "no array" if form is None else f"{form[0]} {form[1]}"


def _sentence(source: int, tag: int, group: int, described: str, messages: Sequence[Envelope]) -> str:
    line = f"on line {messages[0].line} " if messages[0].line else ""
    many, were, them = ("a message", "was", "it")
    if len(messages) > 1:
        many, were, them = (f"{len(messages)} messages", "were", "them")
    what, call = (f"{described}, tag {tag}", f", tag={tag}") if tag else (described, "")
    if group:
        what, call = f"{what}, in a group", f"{call}, group=…"
    return (
        f"{many} from rank {source} ({what}), sent {line}in an earlier cell, {were} not received: "
        f"recv(src={source}{call}) still takes {them}"
    )
