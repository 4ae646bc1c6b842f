"""Parcels: messages in flight and the mailboxes in which they lie.

Note [parcels]
--------------
In the ledger a parcel is one more holder: its number is the negative of its id, so it is no client's.  It
ends when a receiver has taken it, when no client can read its mailbox, or, without a mailbox, some time after
its sender has ended.

Note [readers]
--------------
A mailbox is read by the clients that opened it.  Its reading end may lie in a parcel itself: then it is as
readable as that parcel's own mailbox.  (A queue that was put into itself is not: the chain has to begin with
a client.)  The messages that say so lie in several sockets: so a mailbox without a reader is decided about
only when everything has been read that was sent before this was noticed, as the ledger does with segments.
For the same reason a ``TAKE`` may be read before its ``POST``, and a ``POST`` before the mailbox's ``OPEN``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nbparallel.wire.segments import Post


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
