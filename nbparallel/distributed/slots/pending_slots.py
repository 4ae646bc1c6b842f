"""Collectives whose end may come later: the slot protocol in parts that do not wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nbparallel.distributed.at_once import InlineSlotProtocol
from nbparallel.distributed.runtime import fault_injection
from nbparallel.distributed.slots.fingerprint import Fingerprint
from nbparallel.distributed.slots.slot_protocol import LINE
from nbparallel.wire.control import GENERATIONS, Operation

Posting = tuple[int, int, int, Operation, Fingerprint, int, int, "int | None"]
"""A collective to come back to: number, generation, arrivals, what was called, line; `open`, deadline."""


class PendingSlots(InlineSlotProtocol):
    """One rank's side of all collectives of a group, some of which were begun and not ended."""

    def has_slot(self) -> bool:
        """Whether `begin` would not wait, and takes no slot of a collective that this rank has not ended."""
        self._all_done = self.all_done()
        return self.number + 1 - GENERATIONS <= min(self._all_done, self._words[self._done])

    def arrive(self) -> Posting:
        """Leave the fingerprint and arrive, for a collective that ends later."""
        slot, fingerprint = self._mine[self.generation], self._fingerprint
        self._words[slot], self._words[slot + LINE] = fingerprint.word, self._line
        if self._written[self.generation] is not fingerprint:
            self._describe(self.generation, slot, fingerprint)
        if fault_injection.ARMED:
            fault_injection.hit("wrote_header", self._context.rank)
        self.arrivals += 1
        self._waiter.announce(self._words, self._arrive, self.arrivals)
        if fault_injection.ARMED:
            fault_injection.hit("wrote_flag", self._context.rank)
        self._context.open = 0
        return self._posting()

    def _posting(self) -> Posting:
        return (
            self.number, self.generation, self.arrivals, self._operation, self._fingerprint, self._line,
            self._context.open, self.deadline_ns,
        )  # fmt: skip

    def arrived(self, pending: Posting) -> bool:
        """Whether every member has come to a collective."""
        words = self._words
        return all(words[arrive] >= pending[2] for _, arrive, _ in self._peers)

    def is_hopeless(self, pending: Posting) -> bool:
        """Whether somebody who has not come to a collective will not come any more."""
        context, words = self._context, self._words
        context.check_peers(self.peers)
        return any(words[arrive] < pending[2] and context.gone(rank) for rank, arrive, _ in self._peers)

    @contextlib.contextmanager
    def resumed(self, pending: Posting) -> Iterator[None]:
        """Be in an earlier collective meanwhile, and end it."""
        former = self._posting()
        self._resume((*pending[:6], pending[0], pending[7]))
        self._context.waiter.fence()  # the others' slots after their words
        try:
            yield
        finally:
            broken = self._context.open  # it did not come to its end
            self._resume(former)
            if broken:
                self._context.open = broken

    def _resume(self, pending: Posting) -> None:
        self.number, self.generation, self.arrivals, self._operation, self._fingerprint = pending[:5]
        self._line, self._context.open, self.deadline_ns = pending[5:]

    def wait_for(self, pending: Posting | None, deadline_ns: int | None) -> None:
        """Wait until every member has come to a collective; for a free slot, if it was not posted yet."""
        if pending is None:
            self.deadline_ns = deadline_ns
            self._wait_for_readers(self.number + 1)
            return
        former = self._posting()
        self._resume((*pending[:7], deadline_ns))
        try:
            for rank, arrive, _ in self._peers:
                if self._words[arrive] < pending[2]:
                    self._wait_for_arrival(rank, arrive, compare=True)
        finally:
            self._resume((*former[:6], self._context.open, former[7]))
