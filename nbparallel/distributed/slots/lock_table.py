"""Locks between ranks: Lamport's bakery, in words of which each has one writer.

Each rank has a table of the locks that it holds or waits for, in the control segment.  To get a lock::

    write the name and the ticket DRAWING into a free entry     fence
    ticket = 1 + the largest ticket of that name                write it; wakes ranks that wait for it
    while an entry of that name comes before mine               DRAWING, a smaller ticket, or the same and a
        wait for the last of these ranks                        lower rank
    mark the entry as held

    to release it: ticket = 0                                   wakes the rank behind

No word is written by two ranks, so that a rank that dies at any point leaves nothing that must be repaired:
its entries count no more once its death is recorded (L. Lamport, "A new solution of Dijkstra's concurrent
programming problem", Communications of the ACM 17, 1974).  Ranks get a lock in the order in which they drew
their tickets, and each waits for the one before it alone, so that a release wakes one rank.

As with robust mutexes (pthread_mutexattr_setrobust(3)) the next holder learns that the last one died with the
lock held, and what it protects may be half changed.  It records that it has learned so in an entry of its
own, and the session carries what no rank has learned over into the next epoch.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence

from nbparallel.distributed.runtime.failures import repeat_until_done
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.errors import CollectiveTimeoutError, DeadlockError, NbParallelError
from nbparallel.wire.control import ControlView, Operation
from nbparallel.wire.control_layout import (
    ABANDONED,
    DEATH,
    DRAWING,
    LOCK_ENTRIES,
    LOCK_ENTRY,
    LOCK_HELD,
    LOCK_NAME,
    LOCK_NOTE,
    LOCK_REPORTED,
    LOCK_TICKET,
    LOCKS,
    SLOT_AREA,
    AbandonedLock,
    LockRecord,
)

OtherTable = tuple[int, int, int]
"""Another rank, the first word of its table, and the word of its death."""
TOKENS = itertools.count(1)
"""Numbers of calls that take a lock, in this process."""
_FREE, _KEPT = 0, -1
"""In place of a name's word: the entry is not used; it records an abandoned lock until the epoch ends."""


@functools.lru_cache(maxsize=1024)
def name_word(name: str) -> int:
    """Return a lock's name as a word (63 bits: two names are the same once in 2**63)."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1


class LockTable:
    """The locks of one rank in one epoch."""

    def __init__(self, context: RankContext) -> None:
        view = context.view
        self._context, self._view, self._words = context, view, context.words
        self._start = view.word(context.rank, LOCKS) + 1
        self._others: list[OtherTable] = [
            (rank, view.word(rank, LOCKS), view.word(rank, DEATH))
            for rank in range(view.world_size)
            if rank != context.rank
        ]
        self._names = [_FREE] * LOCK_ENTRIES
        """The words of the names in this rank's entries."""
        self._texts = [""] * LOCK_ENTRIES
        self._tokens = [0] * LOCK_ENTRIES
        """Of the calls that took this rank's entries; 0: none."""

    def acquire(self, name: str, deadline_ns: int | None, token: int) -> list[AbandonedLock]:
        """Wait for a lock; return what is known of holders that died with it.

        `token`, of `TOKENS`, is the number of this call: `withdraw` releases what it has taken.

        Raises
        ------
        RuntimeError
            This rank holds it already, or holds too many others.
        CollectiveTimeoutError
            The call timed out.
        DeadlockError, PeerFailedError
            As every operation.
        """
        context = self._context
        context.place.check_reach(range(context.world_size), "a lock that is taken")
        if context.forked or not context.ready:
            context.refuse(world=False)
        context.ready = False
        try:
            abandoned = self._wait_for_turn(self.take_entry(name, token), deadline_ns)
            context.operations += 1
            context.ready = True
        except BaseException as error:
            try:
                self.withdraw(token)
            finally:
                context.failed(error)
            raise
        return abandoned

    def withdraw(self, token: int) -> None:
        """Release the lock that a call took, or its place in the queue; nothing if that is not there now."""
        if token and token in self._tokens:
            self._clear_surely(self._tokens.index(token))

    def release(self, name: str) -> None:
        """Release a lock.

        Raises
        ------
        RuntimeError
            This rank does not hold it.
        """
        word, names = name_word(name), self._names
        entry = names.index(word) if word in names else -1
        if entry < 0 or not self._note(entry) & LOCK_HELD:
            raise RuntimeError(
                f"rank {self._context.rank} does not hold the lock {name!r}, so it cannot release it; a lock "
                "is released by its holder, or at the end of the holder's cell"
            )
        self._clear_surely(entry)

    def call_place(self) -> tuple[str, int]:
        """Return the file name of the cell, and its line that runs."""
        return self._context.cell.filename, self._context.call_site.line()

    def release_all(self) -> list[str]:
        """Release all locks at the end of a cell; return a sentence for each that was still held."""
        sentences = []
        for entry, word in enumerate(self._names):
            if word in (_FREE, _KEPT) or self._context.forked:
                continue
            name, note = self._texts[entry], self._note(entry)
            self.clear_entry(entry)
            if note & LOCK_HELD:
                sentences.append(
                    f"the lock {name!r}{self._context.call_site.since(note >> 2)} was not released, and is "
                    f"now, at the end of the cell; `with dist.lock({name!r}):` releases it by itself"
                )
        return sentences

    # -- this rank's entries -----------------------------------------------------------------------------

    def take_entry(self, name: str, token: int) -> int:
        """Reserve an entry for a lock; other ranks do not count it yet."""
        word, names = name_word(name), self._names
        if word in names:
            since = self._context.call_site.since(self._note(names.index(word)) >> 2)
            raise RuntimeError(
                f"this rank holds the lock {name!r} already{since}, and cannot take it twice; release it "
                "before, or use a lock of another name"
            )
        kind = _FREE if _FREE in names else _KEPT  # the next holder learns of what is overwritten again
        if kind not in names:
            raise RuntimeError(f"a rank can hold at most {LOCK_ENTRIES} locks at one time")
        entry = names.index(kind)
        self._words[self._start + entry * LOCK_ENTRY + LOCK_NOTE] = 0  # not held
        self._tokens[entry] = token  # first: whatever a signal handler raises from here on, it is withdrawn
        names[entry], self._texts[entry] = word, name
        return entry

    def _note(self, entry: int) -> int:
        return self._words[self._start + entry * LOCK_ENTRY + LOCK_NOTE]

    def _write(self, entry: int, name: int, note: int) -> int:
        """Write what an entry is for, before its ticket; returns its first word."""
        words, w = self._words, self._start + entry * LOCK_ENTRY
        words[w + LOCK_NAME], words[w + LOCK_NOTE] = name, note
        if words[self._start - 1] <= entry:
            words[self._start - 1] = entry + 1
        return w

    def clear_entry(self, entry: int) -> None:
        """Release an entry, or give its ticket up."""
        if self._context.forked:
            return  # a child that was forked with the lock held: the rank releases it
        words, start, names = self._words, self._start, self._names
        self._context.waiter.announce(words, start + entry * LOCK_ENTRY + LOCK_TICKET, 0)
        # not before: what an interrupt leaves is cleared at the end of the cell
        names[entry], self._tokens[entry] = _FREE, 0
        used = words[start - 1]
        while used and names[used - 1] == _FREE:
            used -= 1
        words[start - 1] = used

    def _clear_surely(self, entry: int) -> None:
        """Release an entry although a signal handler of the user's may raise in the middle of it."""
        try:
            self.clear_entry(entry)
        except BaseException:
            repeat_until_done(lambda: self.clear_entry(entry))
            raise

    # -- waiting -----------------------------------------------------------------------------------------

    def _wait_for_turn(self, entry: int, deadline_ns: int | None) -> list[AbandonedLock]:
        context, words, waiter, name = self._context, self._words, self._context.waiter, self._names[entry]
        line = context.call_site.line()
        w = self._write(entry, name, line << 2)
        words[w + LOCK_TICKET] = DRAWING
        waiter.fence()  # either the other ranks see this before they draw, or this rank sees their tickets
        largest = 0
        for _, start, _ in self._others:
            if words[start]:
                largest = max(largest, self._drawn(start, name))
        ticket = max(largest, DRAWING) + 1
        waiter.announce(words, w + LOCK_TICKET, ticket)
        before = self._last_before(name, ticket)
        while before is not None:
            self._wait_for(before, entry, ticket, line, deadline_ns)
            before, largest = self._last_before(name, ticket), ticket
        if not waiter.strong_order:
            waiter.fence()  # what the lock protects is read after the words above
        words[w + LOCK_NOTE] = line << 2 | LOCK_HELD
        return self._learn(name) if largest or words[ABANDONED] else []

    def _drawn(self, start: int, name: int) -> int:
        """Return the ticket of a name in another rank's table; 0: it has none."""
        words = self._words
        for w in range(start + 1, start + 1 + min(words[start], LOCK_ENTRIES) * LOCK_ENTRY, LOCK_ENTRY):
            if words[w + LOCK_NAME] == name:
                ticket = words[w + LOCK_TICKET]
                if ticket:  # else released, and another entry may have the name now
                    return ticket
        return 0

    def _comes_before(self, other: OtherTable, name: int, ticket: int) -> int:
        """Return the ticket with which a rank comes before this one's `ticket`; 0: it does not.

        A rank that died comes before no other, unless its death ends this rank's wait with an error anyway.
        """
        rank, start, death = other
        drawn = self._drawn(start, name) if self._words[start] else 0
        if not 0 < drawn <= ticket or (drawn == ticket and rank > self._context.rank):
            return 0
        cell = self._context.cell
        return 0 if self._words[death] and (cell.go_on or rank not in cell.ranks) else drawn

    def _last_before(self, name: int, ticket: int) -> OtherTable | None:
        """Return the rank that gets the lock right before this one; None: it is this rank's turn."""
        last, found = 0, None
        for other in self._others:
            drawn = self._comes_before(other, name, ticket)
            if drawn and drawn >= last:
                last, found = drawn, other
        return found

    def _wait_for(
        self, other: OtherTable, entry: int, ticket: int, line: int, deadline_ns: int | None
    ) -> None:
        """Wait until a rank has released the lock, has given it up, or has died."""
        name, text, rank = self._names[entry], self._texts[entry], other[0]

        def satisfied() -> bool:
            return not self._comes_before(other, name, ticket)

        def explain(finished: Sequence[int]) -> NbParallelError:
            return DeadlockError(f"rank {finished[0]} finished the cell without releasing the lock {text!r}")

        if self._context.waiter.spin_until(satisfied):
            return
        wait = WaitRecord(
            Operation.lock, lambda: [] if satisfied() else [rank], explain, line, robust=True, peer=rank,
            tag=name, target=ticket, deadline_ns=deadline_ns, area=text.encode(errors="replace")[:SLOT_AREA],
        )  # fmt: skip
        try:
            self._context.wait(satisfied, rank, wait)
            if not self._context.cell.go_on:
                self._context.check_peers()  # a rank that fails in the block releases the lock on its way out
        except CollectiveTimeoutError as error:
            holder = holder_of(self._view, name)
            if holder is None:
                raise
            site = self._context.call_site
            call, since = f"lock({text!r}){site.place(line)}", site.since(holder.line)
            raise CollectiveTimeoutError(f"{call}: timed out; rank {holder.rank} holds it{since}") from error

    def _learn(self, name: int) -> list[AbandonedLock]:
        """Return the holders of a lock that died with it, and record that this rank has learned so."""
        found = [lock for lock in self._view.abandoned_locks() if lock.name == name]
        for lock in found:
            if _FREE in self._names:  # else the next holder learns it too
                entry = self._names.index(_FREE)
                self._names[entry] = _KEPT
                self._write(entry, name, lock.number << 2 | LOCK_REPORTED)
        return found


def queue_of(view: ControlView, name: int) -> list[LockRecord]:
    """Return the living ranks that hold a lock or wait for it, in the order in which they get it."""
    records = [
        record
        for rank in range(view.world_size)
        for record in view.read_locks(rank)
        if record.name == name and record.ticket and not view.words[view.word(rank, DEATH)]
    ]
    return sorted(records, key=lambda record: (record.ticket, record.rank))


def holder_of(view: ControlView, name: int) -> LockRecord | None:
    """Return the entry of the rank that holds a lock, None if no living rank does."""
    return next((record for record in queue_of(view, name) if record.held), None)
