"""What the ledger keeps besides its entries, and the actions that it decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from nbparallel.wire.segments import Ended, FramePayload, Post, Unmap, creator_of

# Actions: what the ledger decides, for `SegmentServer` to perform.


@dataclass(frozen=True, slots=True)
class StoreDescriptor:
    """Keep the descriptor that came with the event, if none is kept yet."""

    segment: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close the descriptor of a segment."""

    segment: int


@dataclass(frozen=True, slots=True)
class Unlink:
    """Remove a name from the file system; it may never have been made, or be removed already."""

    path: str


@dataclass(frozen=True, slots=True)
class Grant:
    """Send a descriptor."""

    client: int
    segment: int
    nbytes: int
    writable: bool
    """False: one that is open for reading only."""
    sequence: int
    fresh: bool
    """Whether the client did not hold it before."""


@dataclass(frozen=True, slots=True)
class Notify:
    """Send a message without a descriptor: that there is none, or what becomes of a segment."""

    client: int
    message: FramePayload
    sequence: int = 0
    """Number of the question that it answers."""


Action: TypeAlias = StoreDescriptor | Close | Unlink | Grant | Notify


# Memories: blocks of memory over all their uses, and the clients that keep them mapped in between.
#
# A segment is one use of a block.  A client that has released it may keep the block mapped, so that the next
# use needs neither a request nor page faults; only the block's owner decides when it is used no more.


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
        if (record := self.known.get(memory)) is None:
            return []
        notified = [client for client, knows in sorted(record.keepers.items()) if not knows]
        record.keepers.update(dict.fromkeys(notified, True))
        return [Notify(client, Ended(segment, memory)) for client in notified]

    def forget(self, memory: int, segment: int) -> list[Notify]:
        """Record that a segment was deleted."""
        if (record := self.known.get(memory)) is None:
            return []
        record.uses.discard(segment)
        return self._retire(memory, record)

    def freed(self, memory: int) -> list[Notify]:
        """Record that there will be no other use."""
        if (record := self.known.get(memory)) is None:
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


# Parcels: messages in flight and the mailboxes in which they lie.
#
# Note [parcels]
# --------------
# In the ledger a parcel is one more holder: its number is the negative of its id, so it is no client's.  It
# ends when a receiver has taken it, when no client can read its mailbox, or, without a mailbox, some time
# after its sender has ended.
#
# Note [readers]
# --------------
# A mailbox is read by the clients that opened it.  Its reading end may lie in a parcel itself: then it is as
# readable as that parcel's own mailbox.  (A queue that was put into itself is not: the chain has to begin
# with a client.)  The messages that say so lie in several sockets: so a mailbox without a reader is decided
# about only when everything has been read that was sent before this was noticed, as the ledger does with
# segments.  For the same reason a ``TAKE`` may be read before its ``POST``, and a ``POST`` before the
# mailbox's ``OPEN``.


def holder_of(parcel: int) -> int:
    """Return the number under which a parcel holds segments and mailboxes.

    >>> holder_of(5)
    -5
    """
    return -parcel


@dataclass(slots=True)
class Parcel:
    """One message in flight."""

    sender: int
    """The client that posted it."""
    mailbox: int
    """Where it lies; 0: in a connection without one."""
    carried: tuple[int, ...] = ()
    """Mailboxes whose reading ends travel in it."""


@dataclass(slots=True)
class ParcelTable:
    """The parcels and mailboxes of a session."""

    parcels: dict[int, Parcel] = field(default_factory=dict)
    """Parcel id -> record."""
    _early: dict[int, int] = field(default_factory=dict)
    """Parcels that were taken before they were posted, and the turn when that was read."""
    _readers: dict[int, set[int]] = field(default_factory=dict)
    """Mailbox -> clients, and numbers of parcels, that can read from it."""
    _contents: dict[int, set[int]] = field(default_factory=dict)
    """Mailbox -> parcels that lie there."""
    _unread: dict[int, int] = field(default_factory=dict)
    """Mailboxes that no client has open, and the turn when that was noticed."""

    @property
    def unsettled(self) -> bool:
        """Whether something is decided only after everything that was sent has been read."""
        return bool(self._early or self._unread)

    def post(self, message: Post, sender: int, turn: int) -> bool:
        """Enter a parcel; return False if it is taken already, or known."""
        parcel = message.parcel
        if parcel in self.parcels or self._early.pop(parcel, None) is not None:
            return False
        self.parcels[parcel] = Parcel(sender, message.mailbox, message.carried)
        for mailbox in message.carried:
            self.open(holder_of(parcel), mailbox)
        if message.mailbox:
            self._contents.setdefault(message.mailbox, set()).add(parcel)
            self._notice(message.mailbox, turn)
        return True

    def take(self, parcel: int, turn: int) -> None:
        """Record that a parcel which is not known was taken."""
        self._early[parcel] = turn

    def remove(self, parcel: int, turn: int) -> None:
        """Remove a parcel."""
        record = self.parcels.pop(parcel)
        contents = self._contents.get(record.mailbox)
        if contents is not None:
            contents.discard(parcel)
            if not contents:
                del self._contents[record.mailbox]
                self._unread.pop(record.mailbox, None)
        for mailbox in record.carried:
            self.close(holder_of(parcel), mailbox, turn)

    def open(self, holder: int, mailbox: int) -> None:
        """Let a client, or a parcel, read from a mailbox (idempotent)."""
        self._readers.setdefault(mailbox, set()).add(holder)
        if holder >= 0:
            self._unread.pop(mailbox, None)

    def close(self, holder: int, mailbox: int, turn: int) -> None:
        """End that (idempotent)."""
        readers = self._readers.get(mailbox)
        if readers is not None:
            readers.discard(holder)
            if not readers:
                del self._readers[mailbox]
        # Others may have been readable through what lies in this one.
        for other in [mailbox, *self._contents]:
            self._notice(other, turn)

    def close_all(self, client: int, turn: int) -> None:
        """End all that a client could read."""
        for mailbox in self.opened(client):
            self.close(client, mailbox, turn)

    def opened(self, client: int) -> tuple[int, ...]:
        """Return the mailboxes that a client can read."""
        return tuple(sorted(mailbox for mailbox, readers in self._readers.items() if client in readers))

    def of(self, sender: int) -> list[int]:
        """Return a client's parcels without a mailbox."""
        return [
            parcel
            for parcel, record in self.parcels.items()
            if record.sender == sender and not record.mailbox
        ]

    def settle(self, turn: int) -> list[int]:
        """Return the parcels that no client can receive any more, as `Ledger.settle` decides."""
        self._early = {parcel: since for parcel, since in self._early.items() if since > turn}
        due = [mailbox for mailbox, since in self._unread.items() if since <= turn]
        for mailbox in due:
            del self._unread[mailbox]
        lost = [mailbox for mailbox in due if not self._is_readable(mailbox, set())]
        return sorted(parcel for mailbox in lost for parcel in self._contents.get(mailbox, ()))

    def _notice(self, mailbox: int, turn: int) -> None:
        if mailbox in self._contents and not any(who >= 0 for who in self._readers.get(mailbox, ())):
            self._unread.setdefault(mailbox, turn)

    def _is_readable(self, mailbox: int, seen: set[int]) -> bool:
        if mailbox in seen:
            return False
        seen.add(mailbox)
        for reader in self._readers.get(mailbox, ()):
            if reader >= 0:
                return True
            outer = self.parcels[-reader].mailbox
            if not outer or self._is_readable(outer, seen):
                return True
        return False
