"""The ledger: which client holds which segment.

A pure state machine: no descriptor, no socket, no clock, so that tests can run a hundred thousand histories
a minute.  `SegmentServer` reads frames and performs the actions that the ledger returns.

Note [holds]
------------
A client either holds a segment or does not: registering and fetching take the hold, releasing ends it, and
all of a client's holds end with it.  While a client holds a segment its memory stays.  After the last hold
its living creator gets it back (`Idle`), otherwise it is closed.  What only a *dead* client held goes
back to the system, even if the creator lives (`Drop`): it is not reused.

Note [kept mappings]
--------------------
A block of memory has an id over all its uses, and a client that has released a use may keep the block mapped
(`MemoryTable`).  Such a client holds the next use by `Hold`, which waits for no answer: it then notifies the
sender of the array, which releases.  So the two messages lie in two sockets, in causal order, and are
read in any.  Hence the end of a segment that may be held so is acted on only after everything has been read
that was sent before it was noticed: `mark`, read all sockets, `settle`.  For the same reason a hold or a
question may come before the registration, and waits for it as long.
Whatever a dead client held of such memory is not used again: it may have sent it to a client whose hold
arrives too late.

Note [names]
------------
A client says which name it will make before it makes it (`Intend`).  From then on the name is the
ledger's: it is removed with the last hold of its segment, when its maker ends and no client holds it, and
with the session.  Removing a name takes no memory from processes that have mapped it, so removing too early
keeps others from mapping it, but never loses data.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from nbparallel.errors import ProtocolError
from nbparallel.supervisor.ledger.records import (
    Action,
    Close,
    Grant,
    MemoryTable,
    Notify,
    ParcelTable,
    StoreDescriptor,
    Unlink,
    holder_of,
)
from nbparallel.wire.segments import (
    AllowWrite,
    CloseMailbox,
    Drop,
    Fetch,
    Forget,
    Freed,
    Hold,
    Idle,
    Intend,
    Lost,
    LostReason,
    Open,
    Post,
    Register,
    Release,
    Removed,
    SegmentMessage,
    Take,
    Unmap,
    creator_of,
)

# Entries of the ledger: segments, and messages about segments that are not registered yet.


@dataclass(slots=True)
class Entry:
    """One segment."""

    nbytes: int
    """Size in bytes."""
    writable: bool
    """Whether others than its creator may write."""
    holders: set[int]
    """Clients that hold it, and numbers of parcels (`records`, note [parcels]); empty: its creator has been
    notified and may use the memory again."""
    unwanted: bool = False
    """Its creator does not want the memory back."""
    path: str = ""
    """Its name in the file system; empty: none, or no longer."""
    memory: int = 0
    """The memory that it is a use of; 0: one that no client keeps mapped."""
    died: bool = False
    """Whether its memory must not be used again, because of a holder that died."""


@dataclass(frozen=True, slots=True)
class Carry:
    """A parcel is to hold a segment."""

    segment: int


@dataclass(frozen=True, slots=True)
class Question:
    """A message about a segment that is not registered yet."""

    client: int
    """The client, or the number of a parcel."""
    message: Fetch | Hold | Carry
    sequence: int
    """Number of the question, for the answer."""
    turn: int
    """When it was read."""


_OF_CREATORS = frozenset({Register.kind, AllowWrite.kind, Forget.kind, Freed.kind, Post.kind})
"""Messages that only the client may send which has made what their first field names; 0 is none."""


@dataclass(slots=True)
class Ledger:
    """All segments of a session, by id."""

    clients: set[int] = field(default_factory=set)
    """The clients of the session."""
    entries: dict[int, Entry] = field(default_factory=dict)
    """Segment id -> entry."""
    waiting: list[Question] = field(default_factory=list)
    """About segments whose registration may still be in another client's socket."""
    _ending: dict[int, int] = field(default_factory=dict)
    """Segments that no client holds, as far as has been read, and the turn when that was noticed."""
    _turn: int = field(default=0, compare=False)
    memories: MemoryTable = field(default_factory=MemoryTable)
    """What clients may keep mapped."""
    names: dict[str, int] = field(default_factory=dict)
    """Every name that may exist -> the client that said so."""
    parcels: ParcelTable = field(default_factory=ParcelTable)
    """Messages in flight."""
    _held: dict[int, set[int]] = field(default_factory=dict)
    """Client, or number of a parcel -> ids of the segments that it holds."""

    @property
    def unsettled(self) -> bool:
        """Whether something is decided only after everything that was sent has been read."""
        return bool(self.waiting or self._ending or self.parcels.unsettled)

    def mark(self) -> int:
        """Return the turn to `settle` once everything that has been sent until now is read."""
        self._turn += 1
        return self._turn - 1

    def step(self, client: int, message: SegmentMessage, sequence: int = 0) -> Sequence[Action]:
        """Record a client's message and return what has to be done, in this order.

        Raises
        ------
        ProtocolError
            It did what no client of ours does: end the connection.
        """
        if client not in self.clients:
            raise ProtocolError(f"client {client} is not in this session")
        if message.kind in _OF_CREATORS and message[0] and creator_of(message[0]) != client:
            raise ProtocolError(
                f"a {message.kind.name} frame about {message[0]:#x}, which is another client's"
            )
        match message:
            case Fetch():
                return self._fetch(client, message, sequence)
            case Register():
                return self._register(client, message)
            case Intend(path):
                if self.names.setdefault(path, client) != client:
                    raise ProtocolError(f"client {client} wants to make {path!r}, which is another's")
            case Removed(path):
                if self.names.get(path) == client:
                    del self.names[path]
            case Hold():
                return self._hold_again(client, message, sequence)
            case Release():
                return self._release_use(client, message)
            case AllowWrite() | Forget():
                return self._decide(client, message)
            case Freed(0):
                return [Notify(other, Unmap(0)) for other in sorted(self.clients - {client})]
            case Freed(memory):
                return [*self.memories.freed(memory)]
            case Take(parcel):
                return self.end_parcel(parcel)
            case Post():
                return self._post(client, message)
            case Open(mailbox):
                self.parcels.open(client, mailbox)
            case CloseMailbox(mailbox):
                self.parcels.close(client, mailbox, self._turn)
        return []

    def _register(self, client: int, message: Register) -> list[Action]:
        segment = message.segment
        entry = self.entries.get(segment)
        if entry is not None:
            # Sent twice: after an interrupt, or for a descriptor that was not kept (a kept one stays).
            if entry.nbytes != message.nbytes:
                raise ProtocolError(f"segment {segment:#x} was registered again with another size")
            entry.writable |= message.writable
            entry.unwanted = False
            self._hold(client, segment, entry)
            return [StoreDescriptor(segment)]
        if message.path and self.names.setdefault(message.path, client) != client:
            raise ProtocolError(f"client {client} registered {message.path!r}, which is another's")
        if message.memory and not self._is_of(client, message):
            raise ProtocolError(f"segment {segment:#x} can be no use of memory {message.memory:#x}")
        entry = Entry(message.nbytes, message.writable, set(), path=message.path, memory=message.memory)
        self.entries[segment] = entry
        self._hold(client, segment, entry)
        actions: list[Action] = [StoreDescriptor(segment)]
        asked = [question for question in self.waiting if question.message.segment == segment]
        self.waiting = [question for question in self.waiting if question.message.segment != segment]
        for question in asked:
            if isinstance(question.message, Carry):
                self._carry(question.client, segment)
                continue
            # What a hold does wrong is not the registering client's doing, and does no harm.
            with suppress(ProtocolError):
                actions += self.step(question.client, question.message, question.sequence)
        return actions

    def _is_of(self, client: int, message: Register) -> bool:
        return creator_of(message.memory) == client and self.memories.use(
            message.memory, message.segment, message.nbytes
        )

    def _fetch(self, client: int, message: Fetch, sequence: int) -> list[Action]:
        segment = message.segment
        creator, entry = creator_of(segment), self.entries.get(segment)
        if entry is None:
            if creator in self.clients and creator != client:
                self.waiting.append(Question(client, message, sequence, self._turn))
                return []
            return [_refuse(client, segment, LostReason.UNKNOWN, sequence)]
        if self._is_over(segment, entry) and client != creator:
            # Its creator may be using the memory again for something else.
            return [_refuse(client, segment, LostReason.UNKNOWN, sequence)]
        if message.memory not in (0, entry.memory):
            # A damaged handle: what is kept mapped under that id would later be found for other arrays.
            return [_refuse(client, segment, LostReason.UNKNOWN, sequence)]
        if message.writable and not entry.writable and client != creator:
            return [_refuse(client, segment, LostReason.READ_ONLY, sequence)]
        fresh = client not in entry.holders
        self._hold(client, segment, entry)
        return [Grant(client, segment, entry.nbytes, message.writable, sequence, fresh)]

    def _hold_again(self, client: int, message: Hold, sequence: int) -> list[Action]:
        segment = message.segment
        entry = self.entries.get(segment)
        if entry is None:
            if creator_of(segment) in self.clients:
                self.waiting.append(Question(client, message, sequence, self._turn))
            return []
        if entry.memory != message.memory:
            return []  # a damaged handle, which led to the array that lies in that memory
        if not self.memories.used(message.memory, client):
            raise ProtocolError(f"client {client} holds segment {segment:#x}, which it never mapped")
        if self._is_over(segment, entry):
            return []  # the client that sent it has not kept it
        if message.writable and not entry.writable:
            raise ProtocolError(f"client {client} may not write to segment {segment:#x}")
        self._hold(client, segment, entry)
        return []

    def _is_over(self, segment: int, entry: Entry) -> bool:
        """Whether its creator may be using the memory again for something else."""
        return not entry.holders and segment not in self._ending

    def _release_use(self, client: int, message: Release) -> list[Action]:
        segment, memory = message.segment, message.memory
        actions: list[Action] = []
        if memory:
            entry = self.entries.get(segment)
            if client == creator_of(segment):
                raise ProtocolError(f"client {client} keeps mapped what it owns, segment {segment:#x}")
            if entry is None or entry.memory == memory:
                proven = entry is not None and client in entry.holders
                actions += self.memories.keep(memory, client, proven=proven)
        self.waiting = [
            q
            for q in self.waiting
            if not (isinstance(q.message, Hold) and (q.client, q.message.segment) == (client, segment))
        ]
        return actions + self._release(client, segment)

    def _release(self, client: int, segment: int, *, died: bool = False) -> list[Action]:
        entry = self.entries.get(segment)
        if entry is None or client not in entry.holders:
            # Sent twice, after an interrupt: the answer may have been lost as well.
            unheld = entry is None or self._is_over(segment, entry)
            return [Notify(client, Idle(segment))] if unheld and client == creator_of(segment) else []
        entry.holders.discard(client)
        self._held[client].discard(segment)
        entry.died |= died and bool(entry.memory or not entry.holders)
        if entry.holders:
            return []
        if entry.memory:
            self._ending[segment] = self._turn
            return []
        return self._finish(segment, entry)

    def settle(self, turn: int) -> list[Action]:
        """Decide what had to wait until all was read that had been sent before `mark` returned `turn`."""
        unknown = [question for question in self.waiting if question.turn <= turn]
        self.waiting = [question for question in self.waiting if question.turn > turn]
        actions: list[Action] = [
            _refuse(question.client, question.message.segment, LostReason.UNKNOWN, question.sequence)
            for question in unknown
            if isinstance(question.message, Fetch)
        ]
        for segment in [segment for segment, since in self._ending.items() if since <= turn]:
            del self._ending[segment]
            actions += self._finish(segment, self.entries[segment])
        for parcel in self.parcels.settle(turn):
            actions += self.end_parcel(parcel)
        return actions

    def _finish(self, segment: int, entry: Entry) -> list[Action]:
        """Act on the end of a segment."""
        creator = creator_of(segment)
        wanted = creator in self.clients and not entry.unwanted
        actions = self._unname(entry)
        if wanted and not entry.died:
            return [*actions, *self.memories.ended(entry.memory, segment), Notify(creator, Idle(segment))]
        if wanted:
            actions.append(Notify(creator, Drop(segment)))
        return [*actions, *self._delete(segment)]

    def _unname(self, entry: Entry) -> list[Action]:
        path, entry.path = entry.path, ""
        if path not in self.names:
            return []
        del self.names[path]
        return [Unlink(path)]

    def _decide(self, client: int, message: AllowWrite | Forget) -> list[Action]:
        segment = message.segment
        entry = self.entries.get(segment)
        if entry is None:
            return []
        if isinstance(message, AllowWrite):
            entry.writable = True
            return []
        entry.unwanted = True
        return self._delete(segment) if self._is_over(segment, entry) else self._release(client, segment)

    def client_gone(self, client: int) -> list[Action]:
        """End all holds of a client whose process has ended, or whose socket sent damage."""
        self.clients.discard(client)
        self.waiting = [question for question in self.waiting if question.client != client]
        actions: list[Action] = []
        self.parcels.close_all(client, self._turn)
        actions += self._release_all(client, died=True)
        for segment in sorted(segment for segment in self.entries if creator_of(segment) == client):
            if self._is_over(segment, self.entries[segment]):
                actions += self._delete(segment)
        actions += self.memories.gone(client)
        in_use = {entry.path for entry in self.entries.values()}
        for path in sorted(path for path, maker in self.names.items() if maker == client):
            if path not in in_use:
                del self.names[path]
                actions.append(Unlink(path))
        return actions

    def _post(self, client: int, message: Post) -> list[Action]:
        if self.parcels.post(message, client, self._turn):
            for segment in message.segments:
                self._carry(holder_of(message.parcel), segment)
        return []

    def _carry(self, holder: int, segment: int) -> None:
        """Let a parcel, or a forked child, hold a segment; what is over stays so."""
        if (entry := self.entries.get(segment)) is None:
            if creator_of(segment) in self.clients:
                self.waiting.append(Question(holder, Carry(segment), 0, self._turn))
        elif not self._is_over(segment, entry):
            self._hold(holder, segment, entry)

    def end_parcel(self, parcel: int) -> list[Action]:
        """End what a parcel holds; one that is not known may still come."""
        if parcel not in self.parcels.parcels:
            self.parcels.take(parcel, self._turn)
            return []
        holder = holder_of(parcel)
        self.waiting = [question for question in self.waiting if question.client != holder]
        self.parcels.remove(parcel, self._turn)
        return self._release_all(holder, died=False)

    def inherit(self, client: int, parent: int) -> None:
        """Let a child that is being forked hold, and read, what the client does that it is forked from."""
        for mailbox in self.parcels.opened(parent):
            self.parcels.open(client, mailbox)
        for segment in self._claims(parent):
            self._carry(client, segment)

    def _claims(self, holder: int) -> tuple[int, ...]:
        """Return the segments that a client, or a parcel, holds or has asked for."""
        asked = (question.message.segment for question in self.waiting if question.client == holder)
        return (*sorted(self._held.get(holder, ())), *asked)

    def _release_all(self, holder: int, *, died: bool) -> list[Action]:
        actions: list[Action] = []
        for segment in sorted(self._held.get(holder, ())):
            actions += self._release(holder, segment, died=died)
        self._held.pop(holder, None)
        return actions

    def _hold(self, client: int, segment: int, entry: Entry) -> None:
        self._ending.pop(segment, None)
        entry.holders.add(client)
        self._held.setdefault(client, set()).add(segment)

    def _delete(self, segment: int) -> list[Action]:
        entry = self.entries.pop(segment)
        ended = self.memories.ended(entry.memory, segment)
        return [Close(segment), *ended, *self.memories.forget(entry.memory, segment)]


def _refuse(client: int, segment: int, reason: LostReason, sequence: int) -> Notify:
    return Notify(client, Lost(segment, reason), sequence)
