"""Slot protocol: a barrier in which every rank leaves a payload and a fingerprint of its call.

Every member has `GENERATIONS` slots, used in turn.  One collective::

    wait until every *done* counter has passed this slot's last use      (nearly always true)
    write payload, fingerprint and line into the slot
    arrive += 1                                      (the word that announces it; wakes waiters)
    wait until every arrive counter is as far
    compare every peer's word with mine; if one differs, all fingerprints        (on every rank alike)
    read the peers' slots
    done = number of this collective

There is no closing barrier: a rank may be writing its slot of the next collective while a slow one still
reads this one's, and the done counters keep it from overtaking the ring of slots.
Further synchronisations of the same collective only count `arrive` up.
"""

from __future__ import annotations

import time
from typing import Any

from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, SharedSpan
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.distributed.slots.mismatch import DIFFERENT, CallTable, left_inside, overlap
from nbparallel.distributed.slots.slot_area import (
    CALL,
    CONTENT,
    LINE,
    NBYTES,
    SEGMENT,
    SHARED,
    START,
    STOP,
    TEXT,
    TEXT_OFFSET,
    Fingerprint,
    SlotArea,
    SpanTable,
)
from nbparallel.wire.control import GENERATIONS, SLOT_HEADER, Operation

EARLY_NS = 100_000_000
"""How long a wait lasts before calls that differ already are reported: a complete table is better."""
_NO_FINGERPRINT = Fingerprint(0, 0, 0, b"")
_OF_A_COLLECTIVE = "number", "generation", "arrivals", "operation", "fingerprint", "line", "deadline_ns"


class SlotProtocol(CallTable):
    """One rank's side of all collectives of a group in an epoch.

    Members are counted by their group rank, but words and errors name ranks of the world.

    Attributes
    ----------
    ranks, peers : tuple of int
        The members' ranks; and without this one.
    index : int
        This rank's group rank.
    number, generation : int
        The last collective that began, and the index of its slots.
    arrivals : int
        How many synchronisations this rank has reached.
    operation, fingerprint, line, deadline_ns
        What it calls in that collective, where, and when its waits time out.
    spans : SpanTable
        Where the members' arrays lie.
    """

    def __init__(self, context: RankContext, area: SlotArea) -> None:
        super().__init__(context, area)
        self.ranks, self.index = area.ranks, area.index
        self._words, self._octets = area.words, area.octets
        self._waiter = context.waiter
        self.payload_nbytes = area.payload_nbytes
        self._arrive, self._done = area.arrive[area.index], area.done[area.index]
        slots = self._slot_words = [[start // 8 for start in slots] for slots in area.slots]
        self._mine = slots[area.index]
        self.peers = tuple(area.ranks[i] for i in area.others)
        self._peers = [
            tuple((area.ranks[i], area.arrive[i], slots[i][generation]) for i in area.others)
            for generation in range(GENERATIONS)
        ]
        """For each generation and peer: rank, arrival word, first word of its slot."""
        self._readers = [(area.ranks[i], area.done[i]) for i in area.others]
        self.arrivals = 0
        self._strong_order = context.waiter.strong_order
        self._all_done = 0
        self._written: list[Fingerprint] = [_NO_FINGERPRINT] * GENERATIONS
        self.operation, self.fingerprint, self.line = Operation.none, _NO_FINGERPRINT, 0
        self.spans = SpanTable(area)
        self._wait_began_ns = 0
        self.deadline_ns: int | None = None

    # -- begin and end ---------------------------------------------------------------------------------

    def begin(self, operation: Operation, fingerprint: Fingerprint, line: int) -> int:
        """Take this rank's next slot; returns its generation."""
        number = self.number + 1
        self.operation, self.fingerprint, self.line = operation, fingerprint, line
        if number - GENERATIONS > self._all_done:
            self.wait_for_readers(number)
        self._context.open = self.number = number
        self.generation = generation = number % GENERATIONS
        # fault: enter
        return generation

    def exchange_inline(
        self,
        operation: Operation,
        fingerprint: Fingerprint,
        line: int,
        x: AnyArray,
        span: SharedSpan | None,
        views: list[AnyArray],
    ) -> bool:
        """Begin, write `x` into this rank's slot, arrive and wait; whether all words are equal.

        The same as `begin` and `arrive_and_wait`, in one call for an array that fits into a slot: these take
        a microsecond of Python, half of which is calling and storing, and a small all_reduce three in all.

        Parameters
        ----------
        views : list of array
            Every member's slot of the collective that begins, in the form of `x`.
        """
        context, words, number = self._context, self._words, self.number + 1
        self.operation, self.fingerprint, self.line = operation, fingerprint, line
        if number - GENERATIONS > self._all_done:
            self.wait_for_readers(number)
        context.open = self.number = number
        self.generation = generation = number % GENERATIONS
        # fault: enter
        # fault: half_payload
        views[self.index][...] = x
        slot = self._mine[generation]
        mine = fingerprint.word
        if span is not None:
            mine |= SHARED
            words[slot + SEGMENT] = span.segment
            words[slot + START] = span.start
            words[slot + STOP] = span.stop
        words[slot] = mine
        words[slot + LINE] = line
        if self._written[generation] is not fingerprint:
            self._describe(generation, slot, fingerprint)
        # fault: wrote_header
        self.arrivals = arrivals = self.arrivals + 1
        waiter = self._waiter
        waiter.announce(words, self._arrive, arrivals)
        # fault: wrote_flag
        same = True
        for rank, arrive, slot in self._peers[generation]:
            if words[arrive] < arrivals and not waiter.spin(words, arrive, arrivals):
                self._wait_for_arrival(rank, arrive, compare=True)
            if not self._strong_order:
                waiter.fence()  # read the slot only after its arrival counter
            if words[slot] != mine:
                same = False
        return same

    def arrive(self, bits: int = 0, span: SharedSpan | None = None) -> int:
        """Write the slot's header and arrive; returns the word that equal calls have in theirs."""
        words, generation, fingerprint = self._words, self.generation, self.fingerprint
        slot = self._mine[generation]
        mine = words[slot] = fingerprint.word | bits
        words[slot + LINE] = self.line
        if span is not None:
            words[slot + SEGMENT] = span.segment
            words[slot + START] = span.start
            words[slot + STOP] = span.stop
        if self._written[generation] is not fingerprint:
            self._describe(generation, slot, fingerprint)
        # fault: wrote_header
        self.arrivals = arrivals = self.arrivals + 1
        self._waiter.announce(words, self._arrive, arrivals)
        # fault: wrote_flag
        return mine

    def arrive_and_wait(self, bits: int = 0, span: SharedSpan | None = None) -> bool:
        """Arrive and wait for every member; whether all words are equal, low bits included."""
        mine = self.arrive(bits, span)
        words, arrivals, waiter = self._words, self.arrivals, self._waiter
        same = True
        for rank, arrive, slot in self._peers[self.generation]:
            if words[arrive] < arrivals and not waiter.spin(words, arrive, arrivals):
                self._wait_for_arrival(rank, arrive, compare=True)
            if not self._strong_order:
                waiter.fence()  # read the slot only after its arrival counter
            if words[slot] != mine:
                same = False
        return same

    def _describe(self, generation: int, slot: int, fingerprint: Fingerprint) -> None:
        words, text = self._words, fingerprint.text
        words[slot + CALL], words[slot + CONTENT] = fingerprint.call, fingerprint.content
        words[slot + TEXT] = len(text)
        start = slot * 8 + TEXT_OFFSET
        self._octets[start : start + len(text)] = text
        self._written[generation] = fingerprint

    def synchronize(self) -> None:
        """Synchronise once more inside the same collective."""
        words, waiter = self._words, self._waiter
        self.arrivals = arrivals = self.arrivals + 1
        waiter.announce(words, self._arrive, arrivals)
        for rank, arrive, _ in self._peers[0]:
            if words[arrive] < arrivals and not waiter.spin(words, arrive, arrivals):
                self._wait_for_arrival(rank, arrive, compare=False)
        if not self._strong_order:
            waiter.fence()

    def release(self, *, wake: bool = False) -> None:
        """End the collective: release the peers' slots; with `wake`, wake the ranks that wait for that."""
        context = self._context
        if context.forked:
            return  # a child that was forked within the operation: the rank ends it
        if not self._strong_order:
            self._waiter.fence()  # all reads before the word that releases the slots
        self._words[self._done] = self.number
        if wake:
            self.announce_done()
        context.open = 0
        # fault: leave

    def state(self) -> dict[str, Any]:
        """Return what is kept of the collective that this rank is in, to go on with it later."""
        return {name: getattr(self, name) for name in _OF_A_COLLECTIVE}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with a collective of which `state` was kept."""
        for name, value in state.items():
            setattr(self, name, value)

    # -- comparing ---------------------------------------------------------------------------------------

    def check_overlap(self, bits: list[int], *, root: int | None = None) -> None:
        """Raise `ValueError` on every rank if two members would write the same shared memory.

        The memory of `root`, if given, is not written to, so that other members may pass it too.
        """
        found = self.spans.overlap(self.generation, bits, root)
        if found is not None:
            raise self.overlap(*found)

    def check_writes(self, bits: list[int]) -> None:
        """Raise `ValueError` on every rank if one will write what another one passed or will write."""
        found = self.spans.conflict(self.generation, bits)
        if found is not None:
            raise self.overlap(*found)

    def overlap(self, one: int, other: int) -> ValueError:
        """End the collective, before anything was written; returns the error about two members' memory."""
        self.release()
        return overlap(self.operation, self.ranks[one], self.ranks[other])

    # -- payloads --------------------------------------------------------------------------------------

    def payload_start(self, index: int) -> int:
        """Return the offset in bytes of the payload of a member's current slot."""
        return self.area.slots[index][self.generation] + SLOT_HEADER

    def put(self, data: bytes | memoryview) -> None:
        """Write the payload of this rank's slot; it must fit."""
        nbytes, start = len(data), self.payload_start(self.index)
        # fault: self._octets[start : start + nbytes // 2] = data[: nbytes // 2]
        # fault: half_payload
        self._octets[start : start + nbytes] = data
        self._words[self._mine[self.generation] + NBYTES] = nbytes

    def get(self, index: int) -> memoryview:
        """Return the payload of a member's slot; valid until `release`."""
        start = self.payload_start(index)
        nbytes = min(self._words[self._slot_words[index][self.generation] + NBYTES], self.payload_nbytes)
        return self._octets[start : start + nbytes]

    # -- waiting ---------------------------------------------------------------------------------------

    def announce_done(self) -> None:
        """Announce that this rank reads no peer's memory any more, and wake the ranks that wait for that."""
        self._waiter.announce(self._words, self._done, self.number)

    def wait_until_read(self) -> None:
        """Wait until no peer reads this rank's memory any more in this collective."""
        for rank, word in self._readers:
            self._wait_for_word(rank, word, self.number)

    def all_done(self) -> int:
        """Return the last collective whose slots every peer has released."""
        return min((self._words[word] for _, word in self._readers), default=self.number)

    def missing(self, arrivals: int) -> list[int]:
        """Return the ranks that have not reached a synchronisation."""
        words = self._words
        return [rank for rank, arrive, _ in self._peers[0] if words[arrive] < arrivals]

    def wait_for_arrivals(self) -> None:
        """Wait until every member has reached this synchronisation."""
        for rank, arrive, _ in self._peers[0]:
            if self._words[arrive] < self.arrivals:
                self._wait_for_arrival(rank, arrive, compare=True)

    def has_free_slot(self) -> bool:
        """Whether `begin` would not wait, and not reuse the slot of a collective that this rank is in."""
        self._all_done = self.all_done()
        return self.number + 1 - GENERATIONS <= min(self._all_done, self._words[self._done])

    def wait_for_readers(self, number: int) -> None:
        """Wait until every peer has released the slot that a collective takes."""
        oldest, least, words = number - GENERATIONS, number, self._words
        for rank, word in self._readers:
            done = words[word]
            if done < oldest:
                self._wait_for_word(rank, word, oldest)
                done = words[word]
            if done < least:
                least = done
        self._all_done = least

    def _wait_for_word(self, rank: int, word: int, value: int) -> None:
        words = self._words
        if words[word] >= value or self._waiter.spin(words, word, value):
            return

        def satisfied() -> bool:
            return words[word] >= value

        # Its owner is inside this collective and ends it by itself: no edge of the deadlock graph.
        wait = WaitRecord(
            self.operation, lambda: [] if satisfied() else [rank],
            lambda finished: left_inside(self.operation, finished[0]), self.line,
            sequence=self.number, deadline_ns=self.deadline_ns,
            late="did not read what this rank brought", area=self.area.packed,
        )  # fmt: skip
        self._context.wait(satisfied, rank, wait)

    def _wait_for_arrival(self, rank: int, arrive: int, *, compare: bool) -> None:
        words, arrivals = self._words, self.arrivals

        def satisfied() -> bool:
            return words[arrive] >= arrivals

        wait = WaitRecord(
            self.operation,
            lambda: self.missing(arrivals),
            lambda finished: self.not_called(self.operation, finished, self._arrived),
            self.line,
            sequence=self.number,
            target=arrivals,
            deadline_ns=self.deadline_ns,
            inspect=self._compare_arrived if compare else None,
            area=self.area.packed,
        )
        self._wait_began_ns = wait.began_ns
        self._context.wait(satisfied, rank, wait)

    def _arrived(self) -> list[int]:
        missing = self.missing(self.arrivals)
        return [i for i, rank in enumerate(self.ranks) if rank not in missing]

    def _compare_arrived(self) -> None:
        """Raise early if the calls of those that have arrived differ already, in a wait that takes long."""
        if time.monotonic_ns() - self._wait_began_ns < EARLY_NS:
            return
        arrived = self._arrived()
        if self.differs(arrived):
            raise self._context.mark_failed(self.mismatch(DIFFERENT, arrived))

    def close(self) -> None:
        """Release the memory views."""
        self.spans.close()
