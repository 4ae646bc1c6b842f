"""Meeting: how a group comes together in a collective, compares what it called, and gives its slots free.

Every member has `GENERATIONS` slots, used in turn.  One collective::

    wait until everybody's *done* counter has passed this slot's last use      (nearly always true)
    write payload, fingerprint and line into the slot
    arrive += 1                                      (the word that announces it; wakes sleepers)
    wait until everybody's arrive counter is as far
    compare all fingerprints with mine               (every rank does: nobody leaves before)
    read the others' slots
    done = number of this collective

There is no closing barrier: a rank may be writing its slot of the next collective while a slow one still
reads this one's, and the done counters are what keeps it from going round the ring of slots.
Further synchronisations of the same collective only count `arrive` up.
"""

from __future__ import annotations

import time

from nbparallel.distributed.runtime import fault_injection
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import SharedSpan, Span, conflict, overlapping
from nbparallel.distributed.runtime.waiting import WaitRecord
from nbparallel.distributed.slots.deadlock import wait_text
from nbparallel.distributed.slots.fingerprint import BITS, Fingerprint, parse, table
from nbparallel.distributed.slots.slot_area import SlotArea
from nbparallel.errors import CollectiveMismatchError, NbParallelError
from nbparallel.wire.control import GENERATIONS, SLOT_HEADER, Operation, State

# Words of a slot's first line.
WORD, CALL, CONTENT, LINE, SEGMENT, START, STOP, NBYTES, TEXT, WRITTEN = range(10)
"""`WRITTEN` and the two behind it: the shared memory that a reduction will write on this rank, if it is not
that of all."""
TEXT_OFFSET = 128
"""Bytes from the slot's begin to its description."""
EARLY_NS = 100_000_000
"""How long the others may take before those who differ are told: the table is better complete."""
_NO_FINGERPRINT = Fingerprint(0, 0, 0, b"")


class SlotProtocol:
    """One rank's side of all collectives of a group in an epoch.

    Members are counted by their place in the group, but for words and errors, which name ranks of the world.

    Attributes
    ----------
    ranks : tuple of int
        The members' ranks.
    index : int
        This rank's place among them.
    number : int
        Of the last collective that began.
    generation : int
        Index of its slot.
    """

    def __init__(self, context: RankContext, area: SlotArea) -> None:
        self.area, self.ranks, self.index = area, area.ranks, area.index
        self._context, self._words, self._octets = context, area.words, area.octets
        self._waiter = context.waiter
        self.payload_nbytes = area.payload_nbytes
        self._arrive, self._done = area.arrive[area.index], area.done[area.index]
        self._slot_words = [[start // 8 for start in slots] for slots in area.slots]
        self._mine = self._slot_words[area.index]
        self.peers = tuple(area.ranks[i] for i in area.others)
        """The other members' ranks."""
        self._peers = [(area.ranks[i], area.arrive[i], self._slot_words[i]) for i in area.others]
        self._readers = [(area.ranks[i], area.done[i]) for i in area.others]
        self.number = self.arrivals = self.generation = 0
        self._strong_order = context.waiter.strong_order
        self._all_done = 0
        self._written: list[Fingerprint] = [_NO_FINGERPRINT] * GENERATIONS
        self._fingerprint = _NO_FINGERPRINT
        self._operation = Operation.none
        self._line = 0
        self._wait_began_ns = 0
        self.deadline_ns: int | None = None

    # -- begin and end ---------------------------------------------------------------------------------

    def begin(self, operation: Operation, fingerprint: Fingerprint, line: int) -> int:
        """Take this rank's next slot; returns its generation."""
        number = self.number + 1
        self._operation, self._fingerprint, self._line = operation, fingerprint, line
        if number - GENERATIONS > self._all_done:
            self._wait_for_readers(number)
        self._context.open = self.number = number
        self.generation = generation = number % GENERATIONS
        if fault_injection.ARMED:
            fault_injection.hit("enter", self._context.rank)
        return generation

    def arrive_and_wait(self, bits: int = 0, place: SharedSpan | None = None) -> bool:
        """Leave the fingerprint, arrive, wait for everybody; whether all words equal mine, bits included."""
        words, slot, fingerprint = self._words, self._mine[self.generation], self._fingerprint
        generation = self.generation
        mine = fingerprint.word | bits
        words[slot] = mine
        words[slot + LINE] = self._line
        if place is not None:
            words[slot + SEGMENT] = place.segment
            words[slot + START] = place.start
            words[slot + STOP] = place.stop
        if self._written[generation] is not fingerprint:
            self._describe(generation, slot, fingerprint)
        if fault_injection.ARMED:
            fault_injection.hit("wrote_header", self._context.rank)
        self.arrivals = arrivals = self.arrivals + 1
        self._waiter.announce(words, self._arrive, arrivals)
        if fault_injection.ARMED:
            fault_injection.hit("wrote_flag", self._context.rank)
        same = True
        for rank, arrive, slots in self._peers:
            if words[arrive] < arrivals and not self._waiter.spin(words, arrive, arrivals):
                self._wait_for_arrival(rank, arrive, compare=True)
            if not self._strong_order:
                self._context.waiter.fence()  # his slot after his word
            if words[slots[generation]] != mine:
                same = False
        return same

    def _describe(self, generation: int, slot: int, fingerprint: Fingerprint) -> None:
        words, text = self._words, fingerprint.text
        words[slot + CALL], words[slot + CONTENT] = fingerprint.call, fingerprint.content
        words[slot + TEXT] = len(text)
        start = slot * 8 + TEXT_OFFSET
        self._octets[start : start + len(text)] = text
        self._written[generation] = fingerprint

    def again(self) -> None:
        """Synchronise once more inside the same collective."""
        words = self._words
        self.arrivals = arrivals = self.arrivals + 1
        self._waiter.announce(words, self._arrive, arrivals)
        for rank, arrive, _ in self._peers:
            if words[arrive] < arrivals and not self._waiter.spin(words, arrive, arrivals):
                self._wait_for_arrival(rank, arrive, compare=False)
        if not self._strong_order:
            self._context.waiter.fence()

    def end(self, *, wake: bool = False) -> None:
        """Give the others' slots free, and this rank's next operation; wake who waits for that."""
        if self._context.inert:
            return  # a child that was forked within the operation: it is the rank that ends it
        if not self._strong_order:
            self._context.waiter.fence()  # all reads before the word that gives the slots free
        self._words[self._done] = self.number
        if wake:
            self.stop_reading()
        self._context.open = 0
        if fault_injection.ARMED:
            fault_injection.hit("leave", self._context.rank)

    # -- comparing ---------------------------------------------------------------------------------------

    def compare(self, *, root: int | None = None) -> None:
        """Raise on every rank if the calls differ; to be called when `meet` says that words do.

        With a `root`, others may leave open what is moved.
        """
        words, generation = self._words, self.generation
        slots = [slot[generation] for slot in self._slot_words]
        calls = {words[slot + CALL] for slot in slots}
        contents = {words[slot + CONTENT] for slot in slots}
        if root is not None:
            contents.discard(0)
        if len(calls) > 1 or len(contents) > 1:
            raise self.mismatch("ranks called different operations, or the same with different arguments")

    def agree(self) -> bool:
        """Whether all bring the same, where one operation may be called with different things.

        To be called when `meet` says that words differ; raises on every rank if they call another operation.
        """
        words, generation = self._words, self.generation
        slots = [slot[generation] for slot in self._slot_words]
        if len({words[slot + CALL] for slot in slots}) > 1:
            self.compare()
        return len({words[slot + CONTENT] for slot in slots}) == 1

    def mismatch(self, what: str) -> CollectiveMismatchError:
        """Return the error that says what is wrong and what every member called."""
        rows = {rank: self._row(i) for i, rank in enumerate(self.ranks)}
        return CollectiveMismatchError(f"{what}:\n{table(rows)}")

    def bits(self) -> list[int]:
        """Return every member's low bits."""
        return [self._words[slots[self.generation]] & BITS for slots in self._slot_words]

    def check_overlap(self, bits: list[int], *, root: int | None = None) -> None:
        """Raise `ValueError` on every rank if two would write the same shared memory.

        The very memory of `root`, if given, is not written to, so that others may have it too.
        """
        words, generation = self._words, self.generation
        spans = []
        for i, slots in enumerate(self._slot_words):
            first = slots[generation] + SEGMENT
            spans.append((words[first], words[first + 1], words[first + 2]) if bits[i] else (0, 0, 0))
        if root is not None and spans[root][0]:
            spans = [(0, 0, 0) if s == spans[root] and i != root else s for i, s in enumerate(spans)]
        found = overlapping(spans)
        if found is not None:
            raise self.overlap(*found)

    def same_memory(self, one: int, other: int) -> bool:
        """Whether two members, both with shared arrays, passed the very same memory."""
        words, (first, second) = self._words, (self._slot_words[i][self.generation] for i in (one, other))
        return words[first + SEGMENT : first + STOP + 1] == words[second + SEGMENT : second + STOP + 1]

    def write(self, place: SharedSpan | None) -> None:
        """Say which shared memory this rank will write, before it arrives."""
        first = self._mine[self.generation] + WRITTEN
        self._words[first] = 0 if place is None else place.segment
        if place is not None:
            self._words[first + 1], self._words[first + 2] = place.start, place.stop

    def check_writes(self, bits: list[int]) -> None:
        """Raise `ValueError` on every rank if one writes (`write`) what another one passed or writes."""
        words, generation = self._words, self.generation
        spans: list[list[tuple[Span, bool]]] = []
        for i, slots in enumerate(self._slot_words):
            read, written = slots[generation] + SEGMENT, slots[generation] + WRITTEN
            mine: list[tuple[Span, bool]] = []
            if bits[i]:
                mine.append(((words[read], words[read + 1], words[read + 2]), False))
            if words[written]:
                mine.append(((words[written], words[written + 1], words[written + 2]), True))
            spans.append(mine)
        found = conflict(spans)
        if found is not None:
            raise self.overlap(*found)

    def overlap(self, one: int, other: int) -> ValueError:
        """End the collective, before anything was written; returns the error about two members' memory."""
        first, second = sorted((self.ranks[one], self.ranks[other]))
        self.end()
        return ValueError(
            f"ranks {first} and {second} passed overlapping memory of one shared array to "
            f"{self._operation.name}, which would write it: pass each rank's own part, or x.copy()"
        )

    def _row(self, index: int) -> tuple[str, ...]:
        slot = self._slot_words[index][self.generation]
        start = slot * 8 + TEXT_OFFSET
        text = bytes(self._octets[start : start + min(self._words[slot + TEXT], SLOT_HEADER - TEXT_OFFSET)])
        return parse(text, self._words[slot + LINE])

    # -- slots' contents -------------------------------------------------------------------------------

    def payload_start(self, index: int) -> int:
        """Return the first byte of the payload of a member's current slot."""
        return self._slot_words[index][self.generation] * 8 + SLOT_HEADER

    def put(self, data: bytes | memoryview) -> None:
        """Write the payload of this rank's slot; it must fit."""
        nbytes, start = len(data), self.payload_start(self.index)
        if fault_injection.ARMED:
            half = nbytes // 2
            self._octets[start : start + half] = data[:half]
            fault_injection.hit("half_payload", self._context.rank)
        self._octets[start : start + nbytes] = data
        self._words[self._mine[self.generation] + NBYTES] = nbytes

    def get(self, index: int) -> memoryview:
        """Return the payload of a member's slot; valid until `end`."""
        start = self.payload_start(index)
        nbytes = min(self._words[self._slot_words[index][self.generation] + NBYTES], self.payload_nbytes)
        return self._octets[start : start + nbytes]

    # -- waiting ---------------------------------------------------------------------------------------

    def stop_reading(self) -> None:
        """Say that this rank reads nobody's memory any more, to who may be waiting for that."""
        self._waiter.announce(self._words, self._done, self.number)

    def wait_until_read(self) -> None:
        """Wait until everybody is done with this collective and reads this rank's memory no more."""
        for rank, word in self._readers:
            self._wait_for_word(rank, word, self.number)

    def all_done(self) -> int:
        """Return the last collective that nobody reads any more."""
        return min((self._words[word] for _, word in self._readers), default=self.number)

    def _wait_for_readers(self, number: int) -> None:
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

        # Its owner is inside this collective and needs nobody to end it: no edge of the deadlock graph.
        wait = WaitRecord(
            self._operation,
            lambda: [] if satisfied() else [rank],
            self._explain_vanished,
            self._line,
            sequence=self.number,
            deadline_ns=self.deadline_ns,
            area=self.area,
        )
        self._context.wait(satisfied, rank, wait)

    def _wait_for_arrival(self, rank: int, arrive: int, *, compare: bool) -> None:
        words, arrivals = self._words, self.arrivals

        def satisfied() -> bool:
            return words[arrive] >= arrivals

        wait = WaitRecord(
            self._operation,
            lambda: [r for r, a, _ in self._peers if words[a] < arrivals],
            self._explain_finished,
            self._line,
            sequence=self.number,
            target=arrivals,
            deadline_ns=self.deadline_ns,
            look=self._compare_arrived if compare else None,
            area=self.area,
        )
        self._wait_began_ns = wait.began_ns
        self._context.wait(satisfied, rank, wait)

    def _arrived(self) -> list[int]:
        words, arrivals = self._words, self.arrivals
        mine, arrive = self.index, self.area.arrive
        return [i for i in range(len(arrive)) if i == mine or words[arrive[i]] >= arrivals]

    def _compare_arrived(self) -> None:
        """Raise early if those who are here differ already, and somebody takes long to come."""
        if time.monotonic_ns() - self._wait_began_ns < EARLY_NS:
            return
        words, generation = self._words, self.generation
        calls = {words[self._slot_words[i][generation] + CALL] for i in self._arrived()}
        if len(calls) > 1:
            raise self._context.doom(
                CollectiveMismatchError(
                    "ranks called different operations, or the same with different arguments:\n"
                    + table(self._rows(()))
                )
            )

    def _rows(self, finished: tuple[int, ...] | list[int]) -> dict[int, tuple[str, ...] | str]:
        rows: dict[int, tuple[str, ...] | str] = {self.ranks[i]: self._row(i) for i in self._arrived()}
        for rank in self.ranks:
            if rank in rows:
                continue
            if rank in finished or self._context.gone(rank):
                rows[rank] = f"rank {rank} finished the cell"
                continue
            record = self._context.view.read_slot(rank)
            waiting = record.readable and record.state is State.WAITING
            rows[rank] = "waits " + wait_text(record, []) if waiting else "has not called it yet"
        return rows

    def _explain_finished(self, finished: list[int]) -> NbParallelError:
        names = ", ".join(f"rank {r} finished the cell" for r in finished)
        return CollectiveMismatchError(
            f"{names} without calling {self._operation.name}, for which the others wait:\n"
            + table(self._rows(finished))
        )

    def _explain_vanished(self, finished: list[int]) -> NbParallelError:
        return CollectiveMismatchError(
            f"rank {finished[0]} ended the cell in the middle of {self._operation.name}"
        )
