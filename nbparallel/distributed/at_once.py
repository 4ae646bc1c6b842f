"""A meeting in one call: what a small collective does most often, without its steps' calls between them.

`begin`, writing the payload, and `meet` take a microsecond of Python, half of which is calling and storing.
A small all_reduce takes three in all; so the three are written out here once more, for an array that fits
in the slots.  Everything that does not go its usual way is left to `SlotProtocol`.
"""

from __future__ import annotations

from nbparallel.distributed.runtime import fault_injection
from nbparallel.distributed.runtime.rank_context import RankContext
from nbparallel.distributed.runtime.shared_arrays import AnyArray, SharedSpan
from nbparallel.distributed.slots.fingerprint import SHARED, Fingerprint
from nbparallel.distributed.slots.slot_area import SlotArea
from nbparallel.distributed.slots.slot_protocol import LINE, SEGMENT, START, STOP, SlotProtocol
from nbparallel.wire.control import GENERATIONS, SLOT_HEADER, Operation


class InlineSlotProtocol(SlotProtocol):
    """One rank's side of all collectives of a group, with a quick way for small arrays."""

    def __init__(self, context: RankContext, area: SlotArea) -> None:
        super().__init__(context, area)
        self._peers_of = [
            tuple((rank, arrive, slots[generation]) for rank, arrive, slots in self._peers)
            for generation in range(GENERATIONS)
        ]
        """For each generation: rank, its arrival word, the first word of its slot."""
        slots = self._slot_words
        stride = slots[1][0] - slots[0][0] if len(slots) > 1 else 1
        stop = len(slots) * stride
        self._all_segments = [
            self._words[first + SEGMENT : first + SEGMENT + stop : stride] for first in slots[0]
        ]
        """For each generation: the word of every member that names the segment of its array."""
        self._apart: list[int] = []
        """Such words that are known to be all different."""

    def swap(
        self,
        operation: Operation,
        fingerprint: Fingerprint,
        line: int,
        x: AnyArray,
        place: SharedSpan | None,
        views: list[AnyArray],
    ) -> bool:
        """Begin, leave `x` in this rank's slot, and wait for everybody; whether all call the same.

        Parameters
        ----------
        views : list of array
            Every member's slot of the collective that begins (`next_generation`), in the form of `x`.
        """
        context, words, number = self._context, self._words, self.number + 1
        self._operation, self._fingerprint, self._line = operation, fingerprint, line
        if number - GENERATIONS > self._all_done:
            self._wait_for_readers(number)
        context.open = self.number = number
        self.generation = generation = number % GENERATIONS
        if armed := fault_injection.ARMED:
            fault_injection.hit("enter", context.rank)
            fault_injection.hit("half_payload", context.rank)
        views[self.index][...] = x
        slot = self._mine[generation]
        mine = fingerprint.word
        if place is not None:
            mine |= SHARED
            words[slot + SEGMENT] = place.segment
            words[slot + START] = place.start
            words[slot + STOP] = place.stop
        words[slot] = mine
        words[slot + LINE] = line
        if self._written[generation] is not fingerprint:
            self._describe(generation, slot, fingerprint)
        if armed:
            fault_injection.hit("wrote_header", context.rank)
        self.arrivals = arrivals = self.arrivals + 1
        waiter = self._waiter
        waiter.announce(words, self._arrive, arrivals)
        if armed:
            fault_injection.hit("wrote_flag", context.rank)
        same = True
        for rank, arrive, slot in self._peers_of[generation]:
            if words[arrive] < arrivals and not waiter.spin(words, arrive, arrivals):
                self._wait_for_arrival(rank, arrive, compare=True)
            if not self._strong_order:
                waiter.fence()  # his slot after his word
            if words[slot] != mine:
                same = False
        return same

    def next_generation(self) -> int:
        """Return which slots the next collective will take."""
        return (self.number + 1) % GENERATIONS

    def payload_starts(self, generation: int) -> list[int]:
        """Return the first byte of every member's payload in the slots of a generation."""
        return [slots[generation] * 8 + SLOT_HEADER for slots in self._slot_words]

    def disjoint(self) -> bool:
        """Whether every rank's array lies in another segment; nothing is known otherwise."""
        segments = self._all_segments[self.generation].tolist()
        if segments == self._apart:
            return True
        if len(set(segments)) < len(segments):
            return False
        self._apart = segments
        return True

    def close(self) -> None:
        """Let go of the slots."""
        for words in self._all_segments:
            words.release()
        self._all_segments.clear()
