"""Memories: blocks of memory over all their uses, and the clients that keep them mapped in between.

A segment is one use of a block.  A client that has released it may keep the block mapped, so that the next
use needs neither a request nor page faults; only the block's owner decides when it is used no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nbparallel.supervisor.ledger.actions import Notify
from nbparallel.wire.segments import Ended, Unmap, creator_of


@dataclass(slots=True)
class Memory:
    """One block of memory."""

    nbytes: int
    """Size in bytes."""
    uses: set[int] = field(default_factory=set)
    """Segments that are known."""
    keepers: dict[int, bool] = field(default_factory=dict)
    """Client that has kept it mapped -> whether it was notified of an end since its last message about it.

    A client that unmaps it by itself stays here, and is notified once more than needed.
    """
    freed: bool = False
    """Whether its owner has freed it, or is dead: there will be no other use."""


@dataclass(slots=True)
class MemoryTable:
    """The memories of a session, by id."""

    known: dict[int, Memory] = field(default_factory=dict)
    """Memory id -> record."""

    def use(self, memory: int, segment: int, nbytes: int) -> bool:
        """Begin a use; return False if there can be none."""
        record = self.known.setdefault(memory, Memory(nbytes))
        if record.nbytes != nbytes or record.freed:
            return False
        record.uses.add(segment)
        return True

    def keep(self, memory: int, client: int, *, proven: bool) -> list[Notify]:
        """Record that a client keeps a memory mapped; `proven`: it held a use of it.

        It is requested to unmap what will not be used again.
        """
        record = self.known.get(memory)
        if record is None or not (proven or client in record.keepers):
            return [Notify(client, Unmap(memory))]
        record.keepers[client] = False
        return []

    def used(self, memory: int, client: int) -> bool:
        """Record that a client uses what it keeps mapped; return False if it never kept it."""
        record = self.known.get(memory)
        if record is None or client not in record.keepers:
            return False
        record.keepers[client] = False
        return True

    def ended(self, memory: int, segment: int) -> list[Notify]:
        """Notify the clients that keep it mapped that a use is over.

        Once until the client's next message: notices to one that computes for hours must not pile up.
        """
        record = self.known.get(memory)
        if record is None:
            return []
        notified = [client for client, knows in sorted(record.keepers.items()) if not knows]
        record.keepers.update(dict.fromkeys(notified, True))
        return [Notify(client, Ended(segment, memory)) for client in notified]

    def forget(self, memory: int, segment: int) -> list[Notify]:
        """Record that a segment was deleted."""
        record = self.known.get(memory)
        if record is None:
            return []
        record.uses.discard(segment)
        return self._retire(memory, record)

    def freed(self, memory: int) -> list[Notify]:
        """Record that there will be no other use."""
        record = self.known.get(memory)
        if record is None:
            return []
        record.freed = True
        return self._retire(memory, record)

    def gone(self, client: int) -> list[Notify]:
        """Forget a client: what it kept, and what it owned once the last use is over."""
        actions = []
        for memory, record in list(self.known.items()):
            record.keepers.pop(client, None)
            if creator_of(memory) == client:
                actions += self.freed(memory)
        return actions

    def _retire(self, memory: int, record: Memory) -> list[Notify]:
        # While a client holds a use, others that keep the memory mapped may still hold it, too.
        if not record.freed or record.uses:
            return []
        del self.known[memory]
        return [Notify(client, Unmap(memory)) for client in sorted(record.keepers)]
